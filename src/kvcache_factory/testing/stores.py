"""The contract of :class:`~kvcache_factory.store.base.Store` as tests to inherit."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from ..block.spec import BlockSpec, KVDtype
from ..errors import KVCacheError
from ..memory.slab import Slab
from ..store.base import Slots, Store

Bytes = npt.NDArray[np.uint8]

SPECS = {
    "less_than_a_page": BlockSpec(KVDtype.F32, num_layers=2, num_kv_heads=3, head_dim=4, block_tokens=4),
    "odd_bytes": BlockSpec(KVDtype.FP8_E4M3, num_layers=1, num_kv_heads=1, head_dim=7, block_tokens=3),
    "whole_pages": BlockSpec(KVDtype.BF16, num_layers=2, num_kv_heads=2, head_dim=64, block_tokens=16),
    "many_tokens": BlockSpec(KVDtype.F16, num_layers=3, num_kv_heads=5, head_dim=24, block_tokens=1200),
}
SLOTS = 6
OFFSET, TAIL = 48, 32
"""Bytes before and after the payload in the slots of the kit's own memory; a store must leave them alone."""


class StoreTests(ABC):
    """Subclass in a test module, implement :meth:`make_store`, inherit the suite.

    Memory and disk alike: the kit writes from and reads into slabs of its own, and looks behind the contract only where
    a store offers its slots as memory.
    """

    refuses_absurd_sizes: ClassVar[bool] = True
    """Whether :meth:`Store.open` itself fails for 2**43 slots (a store may find out later, when it writes)."""

    @abstractmethod
    def make_store(self, directory: Path) -> Store:
        """A fresh, unopened store; *directory* is empty and the test's own."""

    @pytest.fixture(params=list(SPECS))
    def spec(self, request: pytest.FixtureRequest) -> BlockSpec:
        """Geometries: payloads smaller than a page, of an odd size, of whole pages, with a header of several."""
        return SPECS[request.param]

    @pytest.fixture
    def store(self, spec: BlockSpec, tmp_path: Path) -> Iterator[Store]:
        """The store under test, open with :data:`SLOTS` slots."""
        store = self.make_store(tmp_path)
        store.open(spec, SLOTS)
        with closing(store):
            yield store

    # -- description --------------------------------------------------------------------------------------------------

    def test_a_store_that_was_never_opened_can_be_measured_and_closed(self, spec: BlockSpec, tmp_path: Path) -> None:
        """A store is a description until it is opened: its size is known, and closing it is nothing."""
        store = self.make_store(tmp_path)
        assert store.slot_bytes(spec) >= spec.payload_bytes
        store.close()
        store.close()

    def test_closing_twice_is_closing_once_and_a_closed_store_opens_again(self, spec: BlockSpec, store: Store) -> None:
        """close() is idempotent; a tier whose neighbour failed to open closes its store and may open it later."""
        store.close()
        store.close()
        store.open(spec, SLOTS)
        with images(spec, 1) as source:
            store.write(slots(2), source, slots(0), OFFSET)
            assert np.array_equal(contents(store, spec, slots(2)), payloads(source, spec, slots(0)))

    def test_a_size_that_cannot_be_had_is_a_typed_error(self, spec: BlockSpec, tmp_path: Path) -> None:
        """Whatever the system says, the user reads one of our errors, and the store can be closed."""
        if not self.refuses_absurd_sizes:
            pytest.skip("this store finds out when it writes")
        with closing(self.make_store(tmp_path)) as store, pytest.raises(KVCacheError):
            store.open(spec, 2**43)

    # -- what is written is read --------------------------------------------------------------------------------------

    def test_every_slot_gives_back_its_own_bytes(self, spec: BlockSpec, store: Store) -> None:
        """A batch in any order: each payload rests in the slot it was sent to and comes back from there."""
        order, back = slots(4, 0, 5, 2), slots(2, 4, 0, 5)
        with images(spec, 4) as source:
            assert store.write(order, source, slots(3, 1, 0, 2), OFFSET) == 4
            sent = dict(zip(order.tolist(), payloads(source, spec, slots(3, 1, 0, 2)), strict=True))
        assert np.array_equal(contents(store, spec, back), np.stack([sent[slot] for slot in back.tolist()]))

    def test_the_last_write_of_a_slot_wins(self, spec: BlockSpec, store: Store) -> None:
        """Slots are reused: nothing of the block before shines through."""
        with images(spec, 2) as source:
            store.write(slots(3), source, slots(0), OFFSET)
            store.write(slots(3), source, slots(1), OFFSET)
            assert np.array_equal(contents(store, spec, slots(3)), payloads(source, spec, slots(1)))

    def test_other_slots_are_left_alone(self, spec: BlockSpec, store: Store) -> None:
        """Writing to one slot changes no other, not even its neighbours."""
        with images(spec, SLOTS) as source:
            store.write(slots(*range(SLOTS)), source, slots(*range(SLOTS)), OFFSET)
            store.write(slots(2), source, slots(5), OFFSET)
            expected = payloads(source, spec, slots(0, 1, 5, 3, 4, 5))
            assert np.array_equal(contents(store, spec, slots(*range(SLOTS))), expected)

    def test_memory_of_the_caller_is_only_touched_where_it_was_offered(self, spec: BlockSpec, store: Store) -> None:
        """A read writes the payload's bytes and no more; a write changes nothing of its source."""
        with images(spec, 3) as source, images(spec, 3, seed=1) as target:
            before, around = source.view.copy(), target.view.copy()
            store.write(slots(0), source, slots(1), OFFSET)
            assert np.array_equal(source.view, before)
            assert store.read(slots(0), target, slots(1), OFFSET) == 1
            around[1, OFFSET:-TAIL] = before[1, OFFSET:-TAIL]
            assert np.array_equal(target.view, around)

    def test_the_source_is_the_callers_again_when_the_call_returns(self, spec: BlockSpec, store: Store) -> None:
        """Nothing is read later: what the caller does with its memory afterwards is its own affair."""
        with images(spec, 1) as source:
            sent = payloads(source, spec, slots(0))
            store.write(slots(1), source, slots(0), OFFSET)
            source.view[:] = 0xEE
            assert np.array_equal(contents(store, spec, slots(1)), sent)

    def test_an_empty_batch_is_a_batch(self, spec: BlockSpec, store: Store) -> None:
        """No blocks are written and read without fuss."""
        with images(spec, 1) as source:
            before = source.view.copy()
            assert store.write(slots(), source, slots(), OFFSET) == 0
            assert store.read(slots(), source, slots(), OFFSET) == 0
            assert np.array_equal(source.view, before)

    def test_a_slot_that_was_never_written_is_no_error(self, spec: BlockSpec, store: Store) -> None:
        """A store may give any bytes or none for it; who knows what was written asks for nothing else."""
        with images(spec, 2) as source, images(spec, 2) as target:
            store.write(slots(0), source, slots(0), OFFSET)
            assert store.read(slots(0, 1), target, slots(0, 1), OFFSET) in (1, 2)
            assert np.array_equal(payloads(target, spec, slots(0)), payloads(source, spec, slots(0)))

    # -- views --------------------------------------------------------------------------------------------------------

    def test_the_payload_of_a_slot_is_what_was_written(self, spec: BlockSpec, store: Store) -> None:
        """Where payloads can be seen from the host, they are exactly the bytes that were sent."""
        with images(spec, 1) as source:
            store.write(slots(4), source, slots(0), OFFSET)
            seen = store.payload(4)
            if seen is not None:
                assert bytes(seen) == payloads(source, spec, slots(0)).tobytes()

    def test_slots_that_are_memory_are_the_store(self, spec: BlockSpec, store: Store) -> None:
        """What a mover puts into the slots is what read() gives: there is no second copy."""
        memory = store.memory
        if memory is None or memory.device != "cpu":
            return
        assert memory.slots == SLOTS
        assert store.payload_offset + spec.payload_bytes <= memory.slot_bytes <= store.slot_bytes(spec)
        data = np.random.default_rng(5).integers(0, 256, spec.payload_bytes, np.uint8)
        memory.view[3, store.payload_offset :][: spec.payload_bytes] = data
        assert np.array_equal(contents(store, spec, slots(3))[0], data)
        assert memory.address([3])[0] - memory.address([0])[0] == 3 * memory.slot_bytes

    # -- threads ------------------------------------------------------------------------------------------------------

    def test_threads_with_slots_of_their_own_do_not_disturb_each_other(self, spec: BlockSpec, store: Store) -> None:
        """Batches from several threads run at the same time, each with slots of its own."""
        wrong: list[int] = []

        def work(own: int) -> None:
            mine = slots(own, own + SLOTS // 2)
            with images(spec, 8, seed=own) as source:
                for turn in range(4):
                    chosen = slots(turn, turn + 4)
                    store.write(mine, source, chosen, OFFSET)
                    if not np.array_equal(contents(store, spec, mine), payloads(source, spec, chosen)):
                        wrong.append(own)

        threads = [threading.Thread(target=work, args=(own,)) for own in range(SLOTS // 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def slots(*numbers: int) -> Slots:
    """Slot numbers as an array."""
    return np.array(numbers, np.int32)


@contextmanager
def images(spec: BlockSpec, count: int, seed: int = 0) -> Iterator[Slab]:
    """Memory of a caller: *count* slots with random bytes before, in and after the payload."""
    slab = Slab(count, OFFSET + spec.payload_bytes + TAIL, huge_pages=False)
    slab.view[:] = np.random.default_rng(seed).integers(0, 256, slab.view.shape, np.uint8)
    with closing(slab):
        yield slab


def payloads(slab: Slab, spec: BlockSpec, numbers: Slots) -> Bytes:
    """Copies uint8 [n, payload_bytes] of payloads in memory that :func:`images` made."""
    found: Bytes = slab.view[numbers][:, OFFSET : OFFSET + spec.payload_bytes].copy()
    return found


def contents(store: Store, spec: BlockSpec, numbers: Slots) -> Bytes:
    """What *store* gives for *numbers*, all of which must be there."""
    with images(spec, max(len(numbers), 1), seed=99) as target:
        into = np.arange(len(numbers), dtype=np.int32)
        assert store.read(numbers, target, into, OFFSET) == len(numbers)
        return payloads(target, spec, into)
