"""A slab that several processes map: the owner decides, workers copy into and out of it.

The memory is an anonymous file (memfd), reachable through the owner's file descriptor and gone with the last process
that maps it, however that ends.  Shared memory gets no huge pages on most systems, which costs about a quarter of the
copy rate; a manager whose engine runs in one process should use private memory.
"""

from __future__ import annotations

import mmap
import os
import sys

import msgspec

from ..errors import CapacityError, ConfigError
from .slab import Slab


class SlabHandle(msgspec.Struct, frozen=True):
    """Where a shared slab is: enough for another process of the same user to map it."""

    pid: int
    fd: int
    inode: int
    slots: int
    slot_bytes: int


class SharedSlab(Slab):
    """A slab in a memfd.  Raises ConfigError where the system has none, CapacityError where it refuses the memory."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._fd = -1
        super().__init__(slots, slot_bytes, huge_pages=False)

    def _map(self, size: int) -> mmap.mmap:
        if sys.platform != "linux":
            raise ConfigError("memory shared between processes needs Linux (memfd); use CPUBackend(shared=False)")
        self._fd = os.memfd_create("kvcache-factory", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size)
            return mmap.mmap(self._fd, size)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"the system refused {size / 2**30:.2f} GiB of shared memory ({error}); give a smaller size_gb"
            ) from error

    @property
    def handle(self) -> SlabHandle:
        """What another process needs to :meth:`attach`; valid while this slab is open."""
        return SlabHandle(os.getpid(), self._fd, os.fstat(self._fd).st_ino, self.slots, self.slot_bytes)

    @classmethod
    def attach(cls, handle: SlabHandle) -> Slab:
        """Map the slab of another process (or of this one); ConfigError when it is gone or not reachable."""
        return _AttachedSlab(handle)

    def close(self) -> None:
        super().close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _AttachedSlab(Slab):
    def __init__(self, handle: SlabHandle) -> None:
        self._handle = handle
        super().__init__(handle.slots, handle.slot_bytes, huge_pages=False)

    def _map(self, size: int) -> mmap.mmap:
        handle = self._handle
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the shared memory of process {handle.pid} cannot be opened ({error}); owner and worker "
                "must run as the same user in one PID namespace"
            ) from error
        try:
            status = os.fstat(fd)
            # The number of a descriptor may have been given to another file since.
            if status.st_ino != handle.inode or status.st_size < size:
                raise ConfigError(f"{path} is not the shared memory that was announced; the owner has closed it")
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
