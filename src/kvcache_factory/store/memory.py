"""Blocks in memory: host DRAM as whole slot images, or the memory of any torch device as payloads."""

from __future__ import annotations

from typing import Any, ClassVar

from ..block.spec import PAGE, BlockSpec, round_up
from ..memory.device import DeviceSlab
from ..memory.move import copy_slots
from ..memory.shared import SharedSlab
from ..memory.slab import Slab
from .base import SlotMemory, Slots, Store


class MemoryStore(Store):
    """Slots in memory.

    Parameters
    ----------
    device:
        None for host DRAM in one mapping of our own; else a torch device, ``"cpu"`` included.
    huge_pages:
        Ask for huge pages (host DRAM only).
    shared:
        Host DRAM that other processes can map, without huge pages.
    """

    name: ClassVar[str] = "memory"

    def __init__(self, device: str | None = None, huge_pages: bool = True, shared: bool = False) -> None:
        self.device = device
        self.huge_pages = huge_pages
        self.shared = shared
        self._memory: Slab | DeviceSlab | None = None
        self._payload_bytes = 0
        self._payload_offset = 0

    def open(self, spec: BlockSpec, slots: int) -> None:
        assert self._memory is None, "the store is open"
        self._payload_bytes = spec.payload_bytes
        if self.device is None:
            self._payload_offset = spec.header_bytes
            shared, size = self.shared, spec.slot_bytes
            self._memory = SharedSlab(slots, size) if shared else Slab(slots, size, huge_pages=self.huge_pages)
        else:
            self._memory = DeviceSlab(slots, self.slot_bytes(spec), self.device)
        self._memory.prefault_in_background()

    def slot_bytes(self, spec: BlockSpec) -> int:
        return spec.slot_bytes if self.device is None else round_up(spec.payload_bytes, PAGE)

    @property
    def memory(self) -> SlotMemory | None:
        return self._memory

    @property
    def payload_offset(self) -> int:
        return self._payload_offset

    def figures(self) -> dict[str, Any]:
        memory = self._memory
        if not isinstance(memory, DeviceSlab):
            return {}
        in_use, peak = memory.usage()
        return {"device": memory.device, "device_bytes": in_use, "device_peak_bytes": peak}

    def payload(self, slot: int) -> memoryview | None:
        assert self._memory is not None, "the store is not open"
        if self._memory.device != "cpu":
            return None
        return memoryview(self._memory.view[slot])[self._payload_offset :][: self._payload_bytes]

    def write(self, slots: Slots, source: SlotMemory, source_slots: Slots, source_offset: int) -> int:
        assert self._memory is not None, "the store is not open"
        offsets = source_offset, self._payload_offset
        copy_slots(source, source_slots, self._memory, slots, self._payload_bytes, *offsets)
        return len(slots)

    def read(self, slots: Slots, target: SlotMemory, target_slots: Slots, target_offset: int) -> int:
        assert self._memory is not None, "the store is not open"
        offsets = self._payload_offset, target_offset
        copy_slots(self._memory, slots, target, target_slots, self._payload_bytes, *offsets)
        return len(slots)

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
