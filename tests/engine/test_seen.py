"""What has been seen before is known, exactly, for as long as it is promised."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.engine.seen import Seen
from kvcache_factory.engine.table import Keys

CAPACITY = 64


def chain(number: int, blocks: int) -> Keys:
    """Keys of a conversation: those of a longer one begin with them."""
    return np.random.default_rng(number).integers(0, 2**63, (blocks, 2)).astype(np.uint64)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 12)), max_size=120))
def test_the_latest_keys_are_known_and_no_others(steps: list[tuple[bool, int, int]]) -> None:
    """Against a list of all keys by when they were seen last: the latest half is known, what never came is not."""
    seen, last, ever = Seen(0, least=CAPACITY), dict[bytes, None](), set[bytes]()
    for asks, number, blocks in steps:
        keys = chain(number, blocks)
        names = [key.tobytes() for key in keys]
        if asks:
            latest = list(last)[-CAPACITY // 2 :]
            must = max((i + 1 for i, name in enumerate(names) if name in latest), default=0)
            may = max((i + 1 for i, name in enumerate(names) if name in ever), default=0)
            assert must <= seen.leading(keys) <= may
        else:
            seen.add(keys)
        for name in names:
            last.pop(name, None)
            last[name] = None
        ever.update(names)


def test_a_chain_longer_than_the_memory_and_a_fresh_start() -> None:
    """Its end is remembered, and stands for all of it; after a reset nothing is."""
    seen, keys = Seen(0, least=CAPACITY), chain(1, 3 * CAPACITY)
    assert seen.leading(keys) == 0
    assert seen.leading(keys) == len(keys)
    assert seen.leading(keys[:CAPACITY]) == 0
    seen.clear()
    assert seen.leading(keys) == 0


def test_room_grows_with_the_tiers() -> None:
    """Four keys for each block, within bounds."""
    assert Seen(10_000).capacity == 40_000
    assert Seen(1).capacity == 1 << 14
