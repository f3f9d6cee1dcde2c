"""Reading and writing runs of slots: several in one call, past the page cache where a probe proves that it works."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ...block.spec import PAGE

BATCH_BYTES = 8 << 20
"""Bytes of one system call at most: enough to keep a disk busy, short enough to share it."""

_MAX_VECTORS = 512
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_REASONS = {
    errno.ENOSPC: "enospc",
    errno.EDQUOT: "enospc",
    errno.EIO: "eio",
    errno.ENOENT: "gone",
    errno.ESTALE: "gone",
    errno.ENOTDIR: "gone",
    errno.EROFS: "readonly",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EMFILE: "too_many_files",
    errno.ENFILE: "too_many_files",
}


def reason_of(error: OSError) -> str:
    """The one word under which an error of the system is counted."""
    return _REASONS.get(error.errno or 0, "io_error")


class SlotFile:
    """One data file, opened for one call: nothing to leak, and a file that was removed is noticed at once."""

    def __init__(self, path: Path, *, write: bool, direct: bool) -> None:
        flags = (os.O_RDWR if write else os.O_RDONLY) | _COMMON
        self.direct = direct and bool(_DIRECT)
        self.fd = os.open(path, flags | (_DIRECT if self.direct else 0))

    def __enter__(self) -> SlotFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Write *buffers* one after the other from *offset*; returns how many are whole on the file.

        Raises OSError when not even the first is.
        """
        done = _transfer(_pwritev, self.fd, offset, buffers)
        if buffers and not done:
            raise OSError(errno.EIO, "the system wrote less than one block and gave no reason")
        return done

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill *buffers* one after the other from *offset*; returns how many are whole, fewer at the end of the file.

        Raises OSError when the first cannot be read.
        """
        return _transfer(_preadv, self.fd, offset, buffers)


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, offset: int, buffers: Sequence[memoryview]
) -> int:
    """Move all bytes by as many calls as it takes; number of leading buffers moved whole."""
    moved, whole, error = 0, 0, None
    ends = _ends(buffers)
    while whole < len(buffers):
        begun = moved - (ends[whole - 1] if whole else 0)
        part = [buffers[whole][begun:], *buffers[whole + 1 : whole + _MAX_VECTORS]]
        try:
            count = call(fd, _limit(part), offset + moved)
        except OSError as failure:
            error = failure
            break
        # Where pages are the unit, a call that stopped between them has to be taken up at the page.
        count = count if count == sum(map(len, _limit(part))) else count // PAGE * PAGE
        if count <= 0:
            break
        moved += count
        while whole < len(buffers) and ends[whole] <= moved:
            whole += 1
    if error is not None and not whole:
        raise error
    return whole


def _ends(buffers: Sequence[memoryview]) -> list[int]:
    ends, total = [], 0
    for buffer in buffers:
        total += len(buffer)
        ends.append(total)
    return ends


def _limit(buffers: list[memoryview]) -> list[memoryview]:
    """The leading buffers of one system call: at most a batch of bytes, and at least one buffer."""
    total = 0
    kept: list[memoryview] = []
    for buffer in buffers:
        if kept and total + len(buffer) > BATCH_BYTES:
            break
        kept.append(buffer)
        total += len(buffer)
    return kept


def _pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, buffers, offset)
    return os.pwrite(fd, buffers[0], offset)


def _preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, buffers, offset)
    data = os.pread(fd, len(buffers[0]), offset)
    buffers[0][: len(data)] = data
    return len(data)


def probe(directory: Path, name: str, *, direct: bool) -> bool:
    """Whether files in *directory* can be written and read back, past the page cache if *direct*, by doing it once."""
    if direct and not _DIRECT:
        return False
    path = directory / name
    pattern = bytes(range(256)) * (2 * PAGE // 256)
    with mmap.mmap(-1, 2 * PAGE) as memory, mmap.mmap(-1, 2 * PAGE) as back:  # mappings are aligned as O_DIRECT wants
        memory[:] = pattern
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _COMMON, 0o600))
            with SlotFile(path, write=True, direct=direct) as file, memoryview(memory) as out, memoryview(back) as into:
                written = file.write(0, [out[:PAGE], out[PAGE:]])
                return written == 2 and file.read(0, [into[:PAGE], into[PAGE:]]) == 2 and back[:] == pattern
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)


def allocate(fd: int, size: int) -> None:
    """Give a file *size* bytes of disk now, so that a full disk shows here and not in the middle of a block."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)


def probe_direct(directory: Path, name: str) -> bool:
    """Whether :func:`probe` succeeds past the page cache."""
    return probe(directory, name, direct=True)
