"""Books of policies, ghosts included, are bounded by their rows, and by what they say a row costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache_factory import jit
from kvcache_factory.bench.policy import book_bytes
from kvcache_factory.engine.index import Index
from kvcache_factory.registry import known_policies, make_policy

ROWS = 2048
FIXED = 8 << 20
"""What a policy may cost however few rows there are: GRE remembers 32,768 spells and as many ghosts at least."""
NEEDS: dict[str, Any] = {"hybrid": {"policies": ["lru", "s3fifo"]}}


class Numbered:
    """A chain of eight blocks that nobody else has."""

    num_blocks = 8

    def __init__(self, number: int) -> None:
        words = np.arange(8 * number, 8 * number + 8, dtype=np.uint64)
        self.keys = np.stack((words * np.uint64(0x9E3779B97F4A7C15), words), axis=1)
        self.extras, self.token_blocks = np.zeros((8, 2), np.uint64), np.zeros((8, 0), np.uint32)
        self.memo: dict[int, object] = {}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Compile before the first test."""
    assert jit.warm_up() or jit.numba_refused(), jit.status()


def play(index: Index, numbers: range) -> None:
    """Store chains, look at some again, and end their requests."""
    for number in numbers:
        chain = Numbered(number)
        index.commit(index.reserve(chain, -2, 0, 8).rows)
        found = index.match(Numbered(number - number % 7), -2, 8).rows
        if len(found):
            index.finish(int(found[-1]), number % 300)
            index.unpin(int(found[-1]))


@pytest.mark.parametrize("name", sorted(known_policies()))
def test_books_are_bounded(name: str) -> None:
    """After four and after twelve times as many blocks as there are rows: the same, and no more than is budgeted."""
    policy = make_policy(name, **NEEDS.get(name, {}))
    now = iter(range(1 << 30))
    index = Index(ROWS, 0, policy, lambda: float(next(now)))
    turns = ROWS // 8
    play(index, range(4 * turns))
    early = book_bytes(policy)
    play(index, range(4 * turns, 12 * turns))
    late = book_bytes(policy)
    assert late <= 2 * early + 65536
    assert late <= ROWS * (60 + policy.bytes_per_row) + FIXED
    assert index.check() == []
