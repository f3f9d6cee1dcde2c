"""The contract of stores: where the bytes of blocks rest, by slot number.

A store decides nothing.  It moves whole batches between its slots and memory that the caller supplies, and the caller
keeps that memory until the call has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec

if TYPE_CHECKING:
    from ..memory.device import DeviceSlab
    from ..memory.slab import Slab

Slots: TypeAlias = npt.NDArray[np.int32]
SlotMemory: TypeAlias = "Slab | DeviceSlab"


class Entries(msgspec.Struct, frozen=True):
    """What a store held before, a column per property; ``place`` is the store's own word for where."""

    keys: npt.NDArray[np.uint64]
    parents: npt.NDArray[np.uint64]
    identities: npt.NDArray[np.uint64]
    extras: npt.NDArray[np.uint64]
    depth: npt.NDArray[np.int32]
    time_ns: npt.NDArray[np.int64]
    fidelity: npt.NDArray[np.uint8]
    layout: npt.NDArray[np.uint8]
    owned: npt.NDArray[np.bool_]
    place: npt.NDArray[np.int64]


class Change(msgspec.Struct, frozen=True):
    """What other processes did to a shared store: rows that are gone, rows that are ours now, and new entries."""

    gone: Slots
    adopted: Slots
    fresh: Entries


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
    def write(self, slots: Slots, source: SlotMemory, source_slots: Slots, source_offset: int) -> int:
        """Copy the payloads of *source_slots* into *slots*, both [n]; returns how many leading ones were written.

        A payload begins *source_offset* bytes into its source slot.
        """

    @abstractmethod
    def read(self, slots: Slots, target: SlotMemory, target_slots: Slots, target_offset: int) -> int:
        """Copy the payloads of *slots* into *target_slots*; returns how many of the leading ones were read."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; idempotent."""


class PlacedStore(Store):
    """A store that is not memory: it keeps records of its own, finds places by itself, and may be shared.

    What it reads and writes are whole slot images in page-aligned host memory.  The index numbers rows; the store knows
    where each of them is.
    """

    @property
    def memory(self) -> SlotMemory | None:
        return None

    @abstractmethod
    def scan(self) -> Entries:
        """What was here when the store was opened."""

    @abstractmethod
    def bind(self, rows: Slots, entries: Entries) -> None:
        """The index knows *entries* as *rows* [n] from now on; -1 for an entry that it has no use for."""

    @abstractmethod
    def refresh(self) -> Change:
        """What other processes have changed since."""

    @abstractmethod
    def room(self) -> int:
        """How many more blocks can be placed without freeing any."""

    @abstractmethod
    def free(self, rows: Slots) -> None:
        """Free the places of *rows*; those that have none are fine."""

    @abstractmethod
    def erase(self, rows: Slots) -> None:
        """Overwrite the bytes of *rows*, then free their places."""

    @abstractmethod
    def quarantine(self, rows: Slots) -> None:
        """Never use the places of *rows* again in this run."""

    @abstractmethod
    def owns(self, rows: Slots) -> npt.NDArray[np.bool_]:
        """Which of *rows* this process may free."""

    def reassign(self) -> bool:
        """Make an empty region for blocks of another size available for ours; False when there is none."""
        return False

    def other_class(self) -> Slots:
        """Rows of blocks of another size that would have to leave first."""
        return np.empty(0, np.int32)

    def surplus(self) -> Slots:
        """Rows that other processes are waiting for the room of."""
        return np.empty(0, np.int32)
