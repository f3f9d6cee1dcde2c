"""The directory of a disk tier: whose it is, who may change it, and how many bytes are in it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError, StoreError
from .aio import reason_of

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MARKER = "kvcache-factory.format"
LOCK = "kvcache-factory.lock"
DIRECTORY_VERSION = 1
_MARKER_TEXT = "kvcache-factory disk directory\nversion {}\n"
_MARKER_PATTERN = re.compile(r"kvcache-factory disk directory\nversion (\d{1,9})\n")
_OURS = re.compile(r"kvcache-factory\..*|[0-9a-f]{8}\.(data|log|log\.new)|process-\d+-[0-9a-f]{8}")
_SEGMENT_FILE = re.compile(r"([0-9a-f]{8})\.(data|log|log\.new)")
_LOCK_WAIT_S = 2.0
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


class Listing(msgspec.Struct):
    """What is in a directory: sizes in bytes of data files and logs by segment number, and the processes' files."""

    data: dict[int, int]
    logs: dict[int, int]
    unfinished: list[int]
    processes: list[str]

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the budget: a log counts twice, because compaction writes it anew beside itself."""
        return sum(self.data.values()) + 2 * sum(self.logs.values())


_HOLDERS: weakref.WeakSet[Holder] = weakref.WeakSet()


class Holder(ABC):
    """Something that holds a file lock as the sign that this process is alive."""

    def __init__(self) -> None:
        _HOLDERS.add(self)

    @abstractmethod
    def let_go(self) -> None:
        """Close the locked file, and leave everything else; idempotent."""


def _let_go_in_child() -> None:
    """A forked child holds the same locks as its parent: close them, so that they end when the parent does."""
    for holder in list(_HOLDERS):
        holder.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


class Directory:
    """One directory of segments, shared by any number of processes of one machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._device: int | None = None

    def data_path(self, number: int) -> Path:
        """The data file of a segment."""
        return self.path / f"{number:08x}.data"

    def log_path(self, number: int) -> Path:
        """The log of a segment."""
        return self.path / f"{number:08x}.log"

    def prepare(self) -> None:
        """Make the directory, or see that it is one of ours.

        Raises ConfigError for a path that cannot be used: a file, no permission, another program's directory, a newer
        version; StoreError when the disk fails.
        """
        if fcntl is None:
            raise ConfigError("a disk tier needs file locks that this system does not have; use DRAM or remote tiers")
        try:
            self._create()
            marker = self._read_marker()
        except OSError as error:
            raise self.refusal(error) from error
        match = _MARKER_PATTERN.fullmatch(marker)
        if match is None:
            raise ConfigError(f"{self.path} was written by something else; give the disk tier a directory of its own")
        if int(match[1]) > DIRECTORY_VERSION:
            raise ConfigError(
                f"{self.path} has version {match[1]}, this library knows {DIRECTORY_VERSION}; "
                "update kvcache-factory or give the disk tier another directory"
            )

    def _create(self) -> None:
        if self._device is not None:
            self._see_that_it_is_mounted(self._device)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            self.path.chmod(0o700)  # whatever the umask
        except FileExistsError:
            if not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(self.path)) from None
        names = os.listdir(self.path)
        if MARKER not in names and all(_OURS.fullmatch(name) for name in names):
            self._write_marker()
        self._device = os.stat(self.path).st_dev

    def _see_that_it_is_mounted(self, device: int) -> None:
        """A directory that comes back must be on the disk that it was on: a bare mount point is another's disk."""
        where = self.path if self.path.exists() else self.path.parent
        if where.stat().st_dev != device:
            raise FileNotFoundError(errno.ENOENT, "the file system is no longer mounted", str(self.path))

    def _write_marker(self) -> None:
        temporary = self.path / f"{MARKER}.{os.getpid()}"
        fd = open_private(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        with open(fd, "w", encoding="ascii") as file:
            file.write(_MARKER_TEXT.format(DIRECTORY_VERSION))
        with contextlib.suppress(PermissionError):  # an empty directory that belongs to somebody else
            self.path.chmod(0o700)
        temporary.replace(self.path / MARKER)

    def _read_marker(self) -> str:
        try:
            return (self.path / MARKER).read_bytes()[:256].decode("ascii", "replace")
        except FileNotFoundError:
            return ""

    def refusal(self, error: OSError) -> Exception:
        """The typed error that says what to do about *error*."""
        where = self.path
        if isinstance(error, NotADirectoryError):
            return ConfigError(f"{where} is a file or lies below one; give the disk tier a directory")
        if error.errno in (errno.EACCES, errno.EPERM):
            return ConfigError(f"no permission to write {where}; change its owner or mode, or choose another directory")
        if error.errno == errno.EROFS:
            return ConfigError(f"{where} is on a read-only file system; remount it or choose another directory")
        return StoreError(f"cannot use {where} as a disk tier: {error.strerror or error}", reason_of(error))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock under which segments appear and disappear.

        Raises StoreError (reason ``busy``) when another process holds it for two seconds.
        """
        give_up = time.monotonic() + _LOCK_WAIT_S
        while (fd := self._take_lock()) is None:
            if time.monotonic() > give_up:
                raise StoreError(f"another process keeps {self.path} locked", "busy")
            time.sleep(0.005)
        try:
            yield
        finally:
            os.close(fd)

    def _take_lock(self) -> int | None:
        fd = open_private(self.path / LOCK, os.O_CREAT | os.O_RDWR)
        try:
            if try_lock(fd) and is_still(fd, self.path / LOCK):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def list(self) -> Listing:
        """What is there now; raises OSError."""
        listing = Listing({}, {}, [], [])
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = _SEGMENT_FILE.fullmatch(entry.name)
                if match is None:
                    if entry.name.startswith("process-"):
                        listing.processes.append(entry.name)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    self._enter(listing, int(match[1], 16), match[2], entry)
        return listing

    @staticmethod
    def _enter(listing: Listing, number: int, kind: str, entry: os.DirEntry[str]) -> None:
        if kind == "log.new":
            listing.unfinished.append(number)
        else:
            (listing.data if kind == "data" else listing.logs)[number] = entry.stat(follow_symlinks=False).st_size

    def sweep(self) -> None:
        """Remove what a process left that died while it made or removed a segment; hold the lock."""
        listing = self.list()
        for number in listing.data.keys() - listing.logs.keys():
            self.data_path(number).unlink(missing_ok=True)
        for number in listing.unfinished:
            if number not in listing.logs:
                unfinished_log(self.log_path(number)).unlink(missing_ok=True)


def unfinished_log(log: Path) -> Path:
    """Where the log that will replace *log* is written."""
    return log.with_name(f"{log.name}.new")


def open_private(path: Path, flags: int) -> int:
    """Open a file that only its owner may read and write, whatever the umask."""
    fd = os.open(path, flags | _CLOEXEC, 0o600)
    if flags & os.O_CREAT and os.fstat(fd).st_mode & 0o777 != 0o600:
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, 0o600)
    return fd


def is_still(fd: int, path: Path) -> bool:
    """Whether *path* still names the file that is open: a lock on one that was replaced is worth nothing."""
    try:
        return path.stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file if nobody has it; it lasts until the file is closed everywhere."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
            return False
        raise
    return True
