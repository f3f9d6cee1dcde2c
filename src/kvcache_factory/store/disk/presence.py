"""One small file for each process that uses a directory: who is alive, how much is theirs, and who is short of room."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct

import msgspec
import xxhash

from ...errors import StoreError
from .directory import Directory, Holder, is_still, open_private, try_lock

_RECORD = struct.Struct("<8s I I Q Q")
_MAGIC = b"KVCFPROC"


class Process(msgspec.Struct, frozen=True):
    """A live process: its id, whether it is short of room, and the bytes of its segments."""

    pid: int
    wants_room: bool
    owned_bytes: int


class Presence(Holder):
    """This process's file, locked for as long as the process lives; make it under the directory's lock."""

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self._fd = -1
        self._directory = directory
        self.name = f"process-{os.getpid()}-{secrets.token_hex(4)}"
        self._written = b""
        self._fd = open_private(directory.path / self.name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        if not _lock_soon(self._fd):
            os.close(self._fd)
            raise StoreError(f"cannot lock {directory.path / self.name}: the file system has no working locks", "lock")

    def say(self, wants_room: bool, owned_bytes: int) -> None:
        """Write down how this process stands; raises OSError."""
        body = _RECORD.pack(_MAGIC, os.getpid(), wants_room, owned_bytes, 0)[:-8]
        record = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
        if record != self._written and self._fd >= 0:
            os.pwrite(self._fd, record, 0)
            self._written = record

    def close(self) -> None:
        """Leave; idempotent."""
        if self.is_there():
            with contextlib.suppress(OSError):
                (self._directory.path / self.name).unlink()
        self.let_go()

    def is_there(self) -> bool:
        """Whether the file is still in the directory; if not, the directory is no longer the one that we opened."""
        return self._fd >= 0 and is_still(self._fd, self._directory.path / self.name)

    def let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _lock_soon(fd: int) -> bool:
    """Take the lock of a new file; somebody who looks whether we are dead may hold it for a moment."""
    return any(try_lock(fd) for _ in range(1000))


def others(directory: Directory, names: list[str], own: str) -> list[Process]:
    """The processes of the files *names* that are alive, without *own*."""
    alive = []
    for name in names:
        if name != own:
            with contextlib.suppress(OSError):
                process = _read(directory, name)
                if process is not None:
                    alive.append(process)
    return alive


def remove_dead(directory: Directory, names: list[str], own: str) -> None:
    """Remove the files of processes that have died; hold the directory's lock."""
    for name in names:
        if name != own:
            with contextlib.suppress(OSError):
                fd = os.open(directory.path / name, os.O_RDWR)
                try:
                    if try_lock(fd):
                        (directory.path / name).unlink(missing_ok=True)
                finally:
                    os.close(fd)


def _read(directory: Directory, name: str) -> Process | None:
    fd = os.open(directory.path / name, os.O_RDWR)
    try:
        if try_lock(fd):
            return None
        record = os.pread(fd, _RECORD.size, 0)
    finally:
        os.close(fd)
    if len(record) == _RECORD.size:
        magic, pid, wants_room, owned_bytes, expected = _RECORD.unpack(record)
        if magic == _MAGIC and expected == xxhash.xxh3_64_intdigest(record[:-8]):
            return Process(pid, bool(wants_room), owned_bytes)
    return Process(0, False, 0)  # alive, and about to say who it is
