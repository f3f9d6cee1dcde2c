"""Bytes scattered over equal parts of slots: reading and writing them, on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .device import DeviceSlab, slot_bytes
from .slab import Slab

Bytes = npt.NDArray[np.uint8]
Chunks = npt.NDArray[np.int32]


class ChunkPool:
    """Whole slots, and slots cut into chunks, of one slab; the caller keeps it from being used by two threads at once.

    Chunk n is part ``n % per_slot`` of slot ``n // per_slot``.  Slots are cut when chunks are needed, and become whole
    again when all of theirs are free.
    """

    def __init__(self, slots: int, per_slot: int) -> None:
        self.per_slot = per_slot
        self._slots = list(range(slots - 1, -1, -1))
        self._chunks: dict[int, list[int]] = {}
        self.cut = 0
        """Slots that are cut."""
        self.used_chunks = 0

    @property
    def free_slots(self) -> int:
        """Slots that are whole and free."""
        return len(self._slots)

    def take_slots(self, count: int) -> Chunks:
        """*count* free slots; there must be as many."""
        assert count <= len(self._slots)
        return np.array([self._slots.pop() for _ in range(count)], np.int32)

    def give_slots(self, slots: Chunks) -> None:
        """Slots are free again."""
        self._slots.extend(slots.tolist())

    def take_chunks(self, count: int) -> Chunks | None:
        """*count* free chunks, cutting slots where that is needed; None where there are too few."""
        free = sum(map(len, self._chunks.values()))
        while free < count:
            if not self._slots:
                return None
            slot = self._slots.pop()
            self._chunks[slot] = list(range((slot + 1) * self.per_slot - 1, slot * self.per_slot - 1, -1))
            self.cut += 1
            free += self.per_slot
        taken: list[int] = []
        for slot in sorted((s for s, c in self._chunks.items() if c), key=lambda s: len(self._chunks[s])):
            chunks = self._chunks[slot]
            while chunks and len(taken) < count:
                taken.append(chunks.pop())
        self.used_chunks += count
        return np.array(taken, np.int32)

    def give_chunks(self, chunks: Chunks) -> None:
        """Chunks are free again, and slots whole that have no other."""
        self.used_chunks -= len(chunks)
        for chunk in chunks.tolist():
            slot = chunk // self.per_slot
            self._chunks[slot].append(chunk)
            if len(self._chunks[slot]) == self.per_slot:
                del self._chunks[slot]
                self._slots.append(slot)
                self.cut -= 1


def write_chunks(slab: Slab | DeviceSlab, chunks: Chunks, per_slot: int, data: Bytes) -> None:
    """Spread *data* over *chunks*, in their order."""
    size = slab.slot_bytes // per_slot
    for number, chunk in enumerate(chunks.tolist()):
        part = data[number * size : (number + 1) * size]
        at = chunk % per_slot * size
        if slab.device == "cpu":
            slab.view[chunk // per_slot, at : at + len(part)] = part
        else:
            _to_device(slab, chunk // per_slot, at, part)


def read_chunks(slab: Slab | DeviceSlab, chunks: Chunks, per_slot: int, nbytes: int) -> Bytes:
    """The first *nbytes* bytes that :func:`write_chunks` spread over *chunks*."""
    size = slab.slot_bytes // per_slot
    out = np.empty(nbytes, np.uint8)
    for number, chunk in enumerate(chunks.tolist()):
        part = out[number * size : (number + 1) * size]
        at = chunk % per_slot * size
        if slab.device == "cpu":
            part[:] = slab.view[chunk // per_slot, at : at + len(part)]
        else:
            part[:] = slot_bytes(slab, chunk // per_slot)[at : at + len(part)].cpu().numpy()
    return out


def read_slot(slab: Slab | DeviceSlab, slot: int, offset: int, nbytes: int) -> Bytes:
    """Bytes of one slot as an array in host memory: a view where the slab is there, else a copy."""
    found: Any = (
        slab.view[slot, offset : offset + nbytes]
        if slab.device == "cpu"
        else slot_bytes(slab, slot)[offset : offset + nbytes].cpu().numpy()
    )
    copied: Bytes = found
    return copied


def write_slot(slab: Slab | DeviceSlab, slot: int, offset: int, data: Bytes) -> None:
    """Write *data* into one slot from *offset* on."""
    if slab.device == "cpu":
        slab.view[slot, offset : offset + len(data)] = data
    else:
        _to_device(slab, slot, offset, data)


def _to_device(slab: Slab | DeviceSlab, slot: int, at: int, data: Bytes) -> None:
    import torch

    slot_bytes(slab, slot)[at : at + len(data)].copy_(torch.from_numpy(np.ascontiguousarray(data)))
