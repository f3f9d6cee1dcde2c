"""Ghosts: a bounded memory of keys, compared with an ordered dict."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_factory import jit
from kvcache_factory.policy.base import Keys
from kvcache_factory.policy.ghosts import Ghosts

KEYS = np.array([[number * 0x9E3779B97F4A7C15 % 2**64, number] for number in range(30)], np.uint64)
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "take", "peek", "trim"]), st.lists(st.integers(0, 29), min_size=1, max_size=6)),
    max_size=40,
)


@pytest.fixture(params=["python", "compiled"], autouse=True)
def way(request: pytest.FixtureRequest) -> None:
    """Both ways in which the loops run."""
    if request.param == "compiled":
        assert jit.warm_up()


def some(numbers: list[int]) -> Keys:
    return KEYS[numbers]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.sampled_from([1, 3, 17]), STEPS)
def test_the_newest_are_remembered_with_their_numbers(capacity: int, steps: list[tuple[str, list[int]]]) -> None:
    """Whatever is added, asked for, taken and trimmed, in any order: the same as a dict that drops its oldest."""
    ghosts, plain, value = Ghosts(capacity, 2), OrderedDict[int, list[float]](), 0.0
    for step, numbers in steps:
        if step == "add":
            value += 1
            ghosts.add(some(numbers), np.array([[value, 2 * value]] * len(numbers)))
            for number in numbers:
                plain.pop(number, None)
                plain[number] = [value, 2 * value]
                if len(plain) > capacity:
                    plain.popitem(last=False)
        elif step == "take":
            assert ghosts.take(some(numbers)).tolist() == [plain.pop(number, [-1, -1]) for number in numbers]
        elif step == "peek":
            assert ghosts.peek(some(numbers)).tolist() == [plain.get(number, [-1, -1]) for number in numbers]
        else:
            ghosts.trim(len(numbers))
            while len(plain) > len(numbers):
                plain.popitem(last=False)
        assert len(ghosts) == len(plain) <= capacity


def test_no_capacity_is_no_memory() -> None:
    """Ghosts can be turned off."""
    ghosts = Ghosts(0, 1)
    ghosts.add(some([1, 2]))
    assert ghosts.peek(some([1])).tolist() == [[-1]]
