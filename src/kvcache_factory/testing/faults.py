"""A store that fails on schedule: errors, slowness, short reads and flipped bits, the same in every run."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from ..block.spec import BlockSpec
from ..errors import StoreError
from ..memory.slab import Slab
from ..store.base import SlotMemory, Slots, Store


class Fail(msgspec.Struct, frozen=True):
    """Raise *error* with *message* before anything is done."""

    error: type[Exception] = StoreError
    message: str = "injected"


class Slow(msgspec.Struct, frozen=True):
    """Wait before doing it."""

    seconds: float = 0.01


class Short(msgspec.Struct, frozen=True):
    """A read or write ends after *blocks* blocks."""

    blocks: int = 0


class Flip(msgspec.Struct, frozen=True):
    """Invert bit *bit* of the payload of block number *block* of the batch, after it was written or read."""

    bit: int = 0
    block: int = 0


Fault: TypeAlias = Fail | Slow | Short | Flip
Schedule: TypeAlias = Callable[[str, int], Fault | None]
"""From an operation's name and the number of its call, counted from 0, to what goes wrong with it."""


def at(faults: Mapping[tuple[str, int], Fault]) -> Schedule:
    """Exactly these faults, by operation and number of the call."""
    return lambda op, call: faults.get((op, call))


def rate(share: float, faults: Sequence[Fault], ops: Sequence[str] = ("write", "read"), seed: int = 0) -> Schedule:
    """A *share* (0 to 1) of the calls of *ops* fails, each with one of *faults*; *seed* decides which.

    The choice depends on the operation and the number of its call only, so that threads cannot change it.
    """

    def pick(op: str, call: int) -> Fault | None:
        draw = zlib.crc32(f"{seed}/{op}/{call}".encode())
        if op not in ops or draw % 10_000 >= share * 10_000:
            return None
        return faults[draw // 10_000 % len(faults)]

    return pick


class FaultyStore(Store):
    """Another store, with faults.

    Operations are ``open``, ``write``, ``read`` and ``memory`` (the slots being asked for, which is how a mover reaches
    them).  Calls are counted in :attr:`calls`, faults that happened in :attr:`injected`; :attr:`schedule` may be
    replaced at any time.

    Parameters
    ----------
    inner:
        The store that does the work.
    schedule:
        What goes wrong; nothing by default.
    sleep:
        What waits for :class:`Slow`; tests that must not depend on the clock pass their own.
    """

    name = "faulty"

    def __init__(
        self, inner: Store, schedule: Schedule | None = None, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.inner = inner
        self.schedule: Schedule = schedule if schedule is not None else at({})
        self.calls: Counter[str] = Counter()
        self.injected: list[tuple[str, int, Fault]] = []
        self._sleep = sleep

    def _begin(self, op: str) -> Fault | None:
        """Count a call and do what goes wrong before it; returns what is left to go wrong after it."""
        call = self.calls[op]
        self.calls[op] += 1
        fault = self.schedule(op, call)
        if fault is None:
            return None
        self.injected.append((op, call, fault))
        if isinstance(fault, Fail):
            raise fault.error(f"{fault.message} ({op} {call})")
        if isinstance(fault, Slow):
            self._sleep(fault.seconds)
        return fault

    def open(self, spec: BlockSpec, slots: int) -> None:
        self._begin("open")
        self._spec = spec
        self.inner.open(spec, slots)

    def slot_bytes(self, spec: BlockSpec) -> int:
        return self.inner.slot_bytes(spec)

    @property
    def memory(self) -> SlotMemory | None:
        self._begin("memory")
        return self.inner.memory

    @property
    def payload_offset(self) -> int:
        return self.inner.payload_offset

    def payload(self, slot: int) -> memoryview | None:
        return self.inner.payload(slot)

    def write(self, slots: Slots, source: SlotMemory, source_slots: Slots, source_offset: int) -> int:
        fault = self._begin("write")
        if isinstance(fault, Short):
            slots, source_slots = slots[: fault.blocks], source_slots[: fault.blocks]
        if not isinstance(fault, Flip) or fault.block >= len(slots):
            return self.inner.write(slots, source, source_slots, source_offset)
        # Damaged on the way: the source belongs to the caller, so a copy of it carries the flipped bit.
        copy = Slab(source.slots, source.slot_bytes, huge_pages=False)
        copy.view[source_slots] = source.view[source_slots]
        _flip(copy, int(source_slots[fault.block]), source_offset, fault.bit % (8 * self._spec.payload_bytes))
        written = self.inner.write(slots, copy, source_slots, source_offset)
        copy.close()
        return written

    def read(self, slots: Slots, target: SlotMemory, target_slots: Slots, target_offset: int) -> int:
        fault = self._begin("read")
        if isinstance(fault, Short):
            slots, target_slots = slots[: fault.blocks], target_slots[: fault.blocks]
        count = self.inner.read(slots, target, target_slots, target_offset)
        if isinstance(fault, Flip) and fault.block < count:
            _flip(target, int(target_slots[fault.block]), target_offset, fault.bit % (8 * self._spec.payload_bytes))
        return count

    def close(self) -> None:
        self.inner.close()


def _flip(memory: SlotMemory, slot: int, offset: int, bit: int) -> None:
    memory.view[slot, offset + bit // 8] ^= np.uint8(1 << bit % 8)
