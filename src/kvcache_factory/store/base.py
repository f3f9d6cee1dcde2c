"""The contract of stores: where the bytes of blocks rest, by slot number.

A store decides nothing.  It moves whole batches between its slots and memory that the caller supplies, and the caller
keeps that memory until the call has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec

if TYPE_CHECKING:
    from ..memory.device import DeviceSlab
    from ..memory.slab import Slab

Slots: TypeAlias = npt.NDArray[np.int32]
SlotMemory: TypeAlias = "Slab | DeviceSlab"


class Store(ABC):
    """A numbered set of equal slots for blocks of one geometry.

    A store is constructed as a description and allocates in :meth:`open`.  Slots belong to the index of the tier; a
    store never frees or reuses one by itself.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def open(self, spec: BlockSpec, slots: int) -> None:
        """Allocate *slots* slots for blocks of *spec*.

        Raises CapacityError, DeviceError or StoreError when that cannot be had.
        """

    @abstractmethod
    def slot_bytes(self, spec: BlockSpec) -> int:
        """Bytes that one slot of *spec* takes in this store, overhead included."""

    @property
    @abstractmethod
    def memory(self) -> SlotMemory | None:
        """The slots as memory that the mover can copy into and out of, or None where they are not memory."""

    @property
    def payload_offset(self) -> int:
        """Bytes from the start of a slot to its payload."""
        return 0

    def payload(self, slot: int) -> memoryview | None:
        """The payload bytes of one slot, where they can be seen from the host; None elsewhere."""
        return None

    @abstractmethod
    def write(self, slots: Slots, source: SlotMemory, source_slots: Slots, source_offset: int) -> None:
        """Copy the payloads of *source_slots* into *slots*; both have n entries.

        A payload begins *source_offset* bytes into its source slot.
        """

    @abstractmethod
    def read(self, slots: Slots, target: SlotMemory, target_slots: Slots, target_offset: int) -> int:
        """Copy the payloads of *slots* into *target_slots*; returns how many of the leading ones were read."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; idempotent."""
