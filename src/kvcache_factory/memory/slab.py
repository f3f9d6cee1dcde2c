"""One anonymous mapping cut into slots: where slot images rest in DRAM."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ..block.spec import PAGE
from ..errors import CapacityError, ClosedError
from .beside import Pin

_PIECE = 4 << 20  # bytes; touching one holds the address space for a millisecond or two
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it


class Slab:
    """*slots* slots of *slot_bytes* bytes each, page aligned, in one private mapping and nowhere else.

    Memory costs nothing until it is touched; :meth:`prefault_in_background` touches it ahead of use.

    Raises CapacityError when a size is not positive or the system refuses the memory.
    """

    device = "cpu"

    def __init__(self, slots: int, slot_bytes: int, *, huge_pages: bool = True) -> None:
        if slots <= 0 or slot_bytes <= 0:
            raise CapacityError(
                f"a slab needs at least one slot of at least one byte, not {slots} slots of {slot_bytes} bytes; "
                "give the tier a larger size"
            )
        self.slots = slots
        self.slot_bytes = slot_bytes
        mapping = self._map(slots * slot_bytes)
        self.huge_pages = huge_pages and _advise_huge_pages(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8)
        self.base = int(self._bytes.ctypes.data)
        self._start, self._step = np.uint64(self.base), np.uint64(slot_bytes)
        self._prefault: _Prefault | None = None
        self._pin: Pin | None = None

    def _map(self, size: int) -> mmap.mmap:
        return _map(size)

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The slots as uint8 [slots, slot_bytes], without a copy; ClosedError after :meth:`close`."""
        if self._bytes is None:
            raise ClosedError("the slab is closed")
        return self._bytes.reshape(self.slots, self.slot_bytes)

    def address(self, slots: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Address in bytes of each slot number, uint64 of the same shape."""
        rows = np.asarray(slots).astype(np.uint64)  # a negative number becomes a huge one
        assert self._bytes is not None, "the slab is closed"
        assert not rows.size or rows.max() < self.slots, "slot number out of range"
        rows *= self._step
        rows += self._start
        return rows

    def prefault_in_background(self) -> None:
        """Start touching all pages in a daemon thread; contents are never altered, so slots can be used meanwhile."""
        if self._prefault is None and self._bytes is not None:
            self._prefault = _Prefault(self._bytes)

    @property
    def prefaulted(self) -> float:
        """Share of the slab, 0 to 1, that the background thread has touched."""
        return self._prefault.done / (self.slots * self.slot_bytes) if self._prefault else 0.0

    def pin_in_background(self) -> None:
        """Start registering the memory with CUDA, so that devices reach it themselves; slots can be used meanwhile."""
        if self._pin is None and self._bytes is not None:
            self._pin = Pin(self.base, self.slots, self.slot_bytes)

    @property
    def pinned(self) -> float:
        """Share of the slab, 0 to 1, that is registered with CUDA."""
        return self._pin.pinned / (self.slots * self.slot_bytes) if self._pin else 0.0

    def close(self) -> None:
        """Give the memory back; idempotent.  Views that are still held keep it alive until they go."""
        if self._pin is not None:
            self._pin.stop()
        if self._prefault is not None:
            self._prefault.stop()
        self._bytes = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a view is still held: the mapping goes with the last one
                mapping.close()

    def __del__(self) -> None:
        pin = getattr(self, "_pin", None)
        if pin is not None:
            pin.stop()
        job = getattr(self, "_prefault", None)
        if job is not None:  # the job holds the mapping itself; it only needs to end early
            job.stopping.set()


class _Prefault:
    """One background job that owns a reference to the memory it touches until it has ended."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.done = 0
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(memory,), name="kvcache-factory-prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the job to end and wait for it; at most the touching of one piece."""
        self.stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, memory: npt.NDArray[np.uint8]) -> None:
        madvise = _libc_madvise()
        while self.done < len(memory) and not self.stopping.is_set():
            piece = memory[self.done : self.done + _PIECE]
            if madvise is None or not _populate(madvise, piece):
                madvise = None
                # Reading cannot harm a slot in use.  It allocates the page everywhere but on old Linux kernels, where
                # the first write still pays for it.
                piece[::PAGE].max()
            self.done += len(piece)


def _map(size: int) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, size)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise CapacityError(
            f"the system refused {size / 2**30:.2f} GiB of memory for a slab ({error}); "
            "give the tier a smaller size_gb or free memory"
        ) from error


def _advise_huge_pages(mapping: mmap.mmap) -> bool:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return False
    try:
        mapping.madvise(advice)
    except OSError:  # a kernel without transparent huge pages
        return False
    return True


def _libc_madvise() -> Any:
    """libc's madvise, which unlike ``mmap.madvise`` lets go of the GIL; None off Linux."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _populate(madvise: Any, piece: npt.NDArray[np.uint8]) -> bool:
    while madvise(piece.ctypes.data, len(piece), _MADV_POPULATE_WRITE) != 0:
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            return False
    return True
