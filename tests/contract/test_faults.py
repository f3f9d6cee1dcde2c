"""The fault-injecting store does what its schedule says, each time the same."""

import numpy as np
import pytest

from kvcache_factory.errors import StoreError
from kvcache_factory.memory import Slab
from kvcache_factory.store.memory import MemoryStore
from kvcache_factory.testing import Fail, FaultyStore, Flip, Schedule, Short, Slow, at, rate, tiny_spec

SPEC = tiny_spec()
ALL = np.arange(3, dtype=np.int32)


def opened(schedule: Schedule, slept: list[float] | None = None) -> FaultyStore:
    """A faulty store of three slots with random blocks in it, written past the schedule."""
    store = FaultyStore(MemoryStore(huge_pages=False), schedule, (slept if slept is not None else []).append)
    store.open(SPEC, 3)
    store.inner.write(ALL, caller(seed=0), ALL, 0)
    return store


def caller(seed: int) -> Slab:
    """Memory of a caller with random bytes."""
    slab = Slab(3, SPEC.payload_bytes, huge_pages=False)
    slab.view[:] = np.random.default_rng(seed).integers(0, 256, slab.view.shape, np.uint8)
    return slab


def test_an_error_happens_before_anything_is_done() -> None:
    """A failed write leaves slots as they were; the next call works."""
    store = opened(at({("write", 0): Fail(OSError, "no space"), ("read", 1): Fail()}))
    before = bytes(store.payload(1) or b"")
    with pytest.raises(OSError, match=r"no space \(write 0\)"):
        store.write(ALL, caller(1), ALL, 0)
    assert bytes(store.payload(1) or b"") == before
    assert store.write(ALL, caller(1), ALL, 0) == 3
    assert store.read(ALL, caller(2), ALL, 0) == 3
    with pytest.raises(StoreError, match="injected"):
        store.read(ALL, caller(2), ALL, 0)
    assert [(op, call) for op, call, _ in store.injected] == [("write", 0), ("read", 1)]
    store.close()


def test_slowness_waits_where_the_test_says() -> None:
    """Waiting is injected, so that no test depends on the clock."""
    slept: list[float] = []
    store = opened(at({("read", 0): Slow(7.5)}), slept)
    assert store.read(ALL, caller(1), ALL, 0) == 3
    assert slept == [7.5]
    store.close()


def test_a_short_read_and_a_short_write_end_early() -> None:
    """The leading blocks are moved, the others are left alone, the count says so."""
    store = opened(at({("read", 0): Short(2), ("write", 0): Short(1)}))
    target, around = caller(1), caller(1)
    assert store.read(ALL, target, ALL, 0) == 2
    assert np.array_equal(target.view[2], around.view[2])
    assert np.array_equal(target.view[:2], caller(0).view[:2])
    assert store.write(ALL, caller(5), ALL, 0) == 1
    assert bytes(store.payload(1) or b"") == caller(0).view[1].tobytes()
    store.close()


@pytest.mark.parametrize("op", ["read", "write"])
def test_exactly_one_bit_flips(op: str) -> None:
    """On the way in or out, in the block that was named, and never in the caller's own source."""
    store = opened(at({(op, 0): Flip(bit=1001, block=1)}))
    source, target = caller(3), caller(4)
    assert store.write(ALL, source, ALL, 0) == 3
    assert np.array_equal(source.view, caller(3).view)
    assert store.read(ALL, target, ALL, 0) == 3
    different = np.unpackbits(target.view ^ source.view, axis=1, bitorder="little")
    assert np.argwhere(different).tolist() == [[1, 1001]]
    store.close()


def test_a_rate_is_a_rate_and_repeats() -> None:
    """A share of all calls fails; the seed alone decides which, not the order in which threads come."""
    faults = [Fail(), Short(), Flip()]
    first, again, other = rate(0.3, faults), rate(0.3, faults), rate(0.3, faults, seed=1)
    drawn = [first("read", call) for call in range(1000)]
    assert drawn == [again("read", call) for call in reversed(range(1000))][::-1]
    assert drawn != [other("read", call) for call in range(1000)]
    assert 200 < sum(fault is not None for fault in drawn) < 400
    assert {type(fault) for fault in drawn} == {Fail, Short, Flip, type(None)}
    assert first("open", 3) is None
