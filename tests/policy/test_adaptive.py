"""The policy that follows the best of its members."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache_factory import AdaptivePolicy, ConfigError
from kvcache_factory.engine.index import Index
from kvcache_factory.policy.base import NO_HINT


class Numbers:
    """A chain of one block with this number."""

    def __init__(self, number: int) -> None:
        self.keys = np.array([[number * 0x9E3779B97F4A7C15 % 2**64, number]], np.uint64)
        self.num_blocks = 1
        self.extras, self.token_blocks = np.zeros((1, 2), np.uint64), np.zeros((1, 0), np.uint32)
        self.memo: dict[int, object] = {}


def play(index: Index, numbers: list[int]) -> None:
    for number in numbers:
        chain = Numbers(number)
        found = index.match(chain, -2, 1).rows
        if len(found):
            index.unpin(int(found[0]))
        else:
            index.commit(index.reserve(chain, -2, 0, 1).rows, NO_HINT)


def test_the_member_that_would_have_hit_most_takes_over() -> None:
    """A scan larger than the cache defeats LRU, not LFU with a hot set; then the hot set moves, and LRU is back."""
    policy = AdaptivePolicy(["lru", "lfu"], sample=1)
    ticks = iter(range(1 << 30))
    index = Index(32, 0, policy, lambda: float(next(ticks)))
    assert policy.in_charge == "lru"
    scan = [block for turn in range(60) for block in (*range(16), *range(1000 + 40 * turn, 1040 + 40 * turn))]
    play(index, list(range(16)) * 3 + scan)
    assert policy.in_charge == "lfu"
    play(index, [5000 + 20 * (turn // 8) + block for turn in range(400) for block in range(20)])
    assert policy.in_charge == "lru"
    assert index.check() == []


def test_members_are_checked_when_it_is_described() -> None:
    """Names are made into policies at once."""
    with pytest.raises(ConfigError, match="at least two"):
        AdaptivePolicy(["lru"])
    with pytest.raises(ConfigError, match="no eviction policy"):
        AdaptivePolicy(["lru", "mru"])
