"""The contract of stores: where the bytes of blocks rest, by slot number.

A store decides nothing.  It moves whole batches between its slots and memory that the caller supplies, and the caller
keeps that memory until the call has returned.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec

if TYPE_CHECKING:
    from ..memory.device import DeviceSlab
    from ..memory.slab import Slab

Slots: TypeAlias = npt.NDArray[np.int32]
Places: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Keys: TypeAlias = npt.NDArray[np.uint64]
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
    def write(self, slots: Slots, source: SlotMemory, source_slots: Slots, source_offset: int) -> int:
        """Copy the payloads of *source_slots* into *slots*; returns how many of the leading n were written.

        A payload begins *source_offset* bytes into its source slot.  Raises StoreError, with a reason, when none could
        be written.
        """

    @abstractmethod
    def read(self, slots: Slots, target: SlotMemory, target_slots: Slots, target_offset: int) -> int:
        """Copy the payloads of *slots* into *target_slots*; returns how many of the leading ones were read.

        Raises StoreError, with a reason, when the first cannot be read; 0 where it is not there any more.
        """

    def figures(self) -> dict[str, Any]:
        """What there is to say beyond blocks, as plain data, whether open or not; each of these where it applies.

        ``device``, ``device_bytes``, ``device_peak_bytes``: memory in use on a device by everybody, and its peak.
        ``fragmentation``: by size of a slot in bytes, bytes that hold no payload and cannot be used otherwise.
        ``breakers``: by kind of work, whether it is not tried for the moment because it has failed.
        ``writable``: whether a write would be tried now.
        ``self_test``: whether what was written when the store was opened could be read back.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Give everything back; idempotent."""


class Entries(msgspec.Struct, frozen=True):
    """Blocks that a lasting store holds, one entry in each column; all but *places* are hints until a read proves them.

    Attributes:
        keys, parents, identities, extras: ``uint64 [n, 2]``; identities are digests, and the parent of a first block
            is the root of its chain.
        depth: number of the block in its chain, ``int32 [n]``; -1 where the writer did not say.
        time_ns: wall clock of the write, ``int64 [n]``; good for an order and nothing else.
        fidelity, layout: ``uint8 [n]``; layouts as in ``docs/format.md`` (0 LCND, 1 LCHND, 255 another).
        owned: whether this process may free the block, ``bool [n]``.
        places: where the block rests, ``int64 [n]``.
    """

    keys: Keys
    parents: Keys
    identities: Keys
    extras: Keys
    depth: npt.NDArray[np.int32]
    time_ns: npt.NDArray[np.int64]
    fidelity: npt.NDArray[np.uint8]
    layout: npt.NDArray[np.uint8]
    owned: Mask
    places: Places

    def __len__(self) -> int:
        return len(self.places)


class Changes(msgspec.Struct, frozen=True):
    """What others have done since the last look.

    Attributes:
        gone: rows whose block is no longer there.
        adopted: rows whose block this process may free from now on, because its owner has died.
        fresh: blocks that have no row yet.
    """

    gone: Slots
    adopted: Slots
    fresh: Entries


class LastingStore(Store):
    """A store that keeps blocks beyond the process and shares them with others.

    Its slot numbers are rows: the store finds room for the block of a row when it is written, and may have none left.
    What it moves are whole images, header included, so that an offset is where an image begins.
    """

    @abstractmethod
    def write(
        self,
        slots: Slots,
        source: SlotMemory,
        source_slots: Slots,
        source_offset: int,
        *,
        depths: npt.NDArray[np.int32] | None = None,
        image_bytes: int = 0,
    ) -> int:
        """As :meth:`Store.write`, of images whose headers are packed; *depths* are what others learn by :meth:`scan`.

        *image_bytes*: how many bytes of each image must be kept, in slots of the smallest size that has room for them;
        0 for whole ones.

        The reason of a StoreError is ``full`` where nothing is free and the budget is used up.
        """

    def report_to(self, count: Callable[[str, int], object]) -> None:
        """Call *count* with a reason and a number of times for whatever goes wrong from now on."""

    @abstractmethod
    def scan(self) -> Entries:
        """Everything that is there and has no row yet; call it once after :meth:`open`."""

    @abstractmethod
    def bind(self, rows: Slots, places: Places) -> Mask:
        """Give entries their rows; -1 lets go of a block, for good where it is ours.  False where it left meanwhile."""

    @abstractmethod
    def refresh(self) -> Changes:
        """Take in what other processes have added and freed since; a few system calls for each of their segments."""

    @abstractmethod
    def room(self, image_bytes: int = 0) -> int:
        """How many blocks, with images of so many bytes or like the last ones, can be written without freeing any."""

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the places that hold a block; None where all are alike."""
        return None

    @abstractmethod
    def present(self, rows: Slots) -> Mask:
        """Where the block of a row is still there, as far as this process knows."""

    @abstractmethod
    def owned(self, rows: Slots) -> Mask:
        """Where freeing a row makes room."""

    @abstractmethod
    def free(self, rows: Slots) -> None:
        """Forget the blocks of *rows*; those of our own make room.  Never raises for a store that has failed."""

    @abstractmethod
    def erase(self, rows: Slots) -> int:
        """Overwrite the blocks of *rows* of our own with zeros and free them all; returns how many were overwritten."""

    @abstractmethod
    def quarantine(self, rows: Slots) -> None:
        """Free *rows* and never use their places again in this run."""

    @abstractmethod
    def reassign(self, image_bytes: int = 0) -> bool:
        """Give the room of an own empty segment of another block size to ours; False when there is none.

        *image_bytes* as in :meth:`room`, also below.
        """

    @abstractmethod
    def fullest_other_class(self, image_bytes: int = 0) -> Slots:
        """Rows to free so that :meth:`reassign` succeeds, the fewest there are; empty when that cannot help."""

    @abstractmethod
    def surplus(self) -> Slots:
        """Rows to free so that a process below its fair share of the budget finds room; mostly empty."""


class Operation:
    """A batch on its way outside.  Its memory belongs to it until it has ended, whoever waits for that or not.

    Attributes:
        blocks: number of blocks of the batch.
        count: how many leading blocks succeeded; what it says is final once the operation has ended.
        reason: why the next one did not, in a word: ``absent`` for a miss, a failure's kind otherwise.
        detail: the same for people.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.count = 0
        self.reason = ""
        self.detail = ""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to *timeout_s* seconds for its end; True when it has ended."""
        return self._ended.wait(timeout_s)

    def then(self, callback: Callable[[], object]) -> None:
        """Call *callback* when it has ended, at once if it has; in whatever thread ends it."""
        with self._lock:
            if not self._ended.is_set():
                self._then.append(callback)
                return
        callback()

    def end(self, count: int, reason: str = "", detail: str = "") -> None:
        """Set the outcome, once, and call whoever asked for that."""
        with self._lock:
            self.count, self.reason, self.detail = count, reason, detail
            self._ended.set()
            waiting, self._then = self._then, []
        for callback in waiting:
            callback()


class OutsideStore(ABC):
    """Blocks by name, in a place that other machines share: nobody knows what is there but by asking.

    Every call waits for at most its deadline.  The operation that it returns may not have ended then: until it has,
    its slots must be left alone.  Nothing raises but :meth:`open`; failures are reasons.
    """

    @abstractmethod
    def open(self, spec: BlockSpec, memories: Sequence[SlotMemory], most_abandoned: int) -> None:
        """Connect; *memories* are all that calls will name.

        At most *most_abandoned* blocks may be held by operations that nobody waits for any more; beyond that, and until
        some of them end, every call is refused.  Raises StoreError, ConfigError or MissingDependencyError.
        """

    @abstractmethod
    def exists(self, names: Sequence[bytes], deadline_s: float) -> Operation:
        """How many leading *names* are there."""

    @abstractmethod
    def get(
        self,
        names: Sequence[bytes],
        memory: SlotMemory,
        slots: Slots,
        deadline_s: float,
        headers: tuple[SlotMemory, Slots] | None = None,
        check: Callable[[slice], object] | None = None,
    ) -> Operation:
        """Fill whole *slots* with the images of *names*; those behind the leading run may hold anything.

        Where images were stored shorter, so is what is filled, and the rest of the slot stays as it is.

        *headers*: host slots for the headers where *memory* is that of a device and holds payloads.
        *check*: called by this thread with leading parts of the batch that have come, in order, while others are on
        their way; with all that came when the operation has ended in time.
        """

    @abstractmethod
    def put(
        self,
        names: Sequence[bytes],
        memory: SlotMemory,
        slots: Slots,
        deadline_s: float,
        headers: tuple[SlotMemory, Slots] | None = None,
        prepare: Callable[[slice], Sequence[int] | None] | None = None,
    ) -> Operation:
        """Store the images in *slots* under *names*, replacing what is there.

        *prepare*: called by this thread with parts of the batch, in order, while those before are on their way, and
        before their slots are looked at.  It may return how many bytes from the beginning of each slot are stored,
        where :attr:`takes_shorter`; all else.  Where it raises, the batch ends with the reason ``not_ready``.
        """

    @abstractmethod
    def delete(self, names: Sequence[bytes], deadline_s: float) -> Operation:
        """Remove *names*; what is not there counts as removed."""

    @property
    @abstractmethod
    def takes_shorter(self) -> bool:
        """Whether images may be stored, and come back, without the end of their slots."""

    @abstractmethod
    def takes_device_memory(self, way: str) -> bool:
        """Whether calls of this *way*, ``"get"`` or ``"put"``, take slots of a device, with headers apart."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Connector, breaker, what is in flight and the servers of a cluster, as plain data."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect, within a few seconds whatever is on its way; idempotent."""
