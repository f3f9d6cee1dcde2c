"""SHFS: one file for each value in a directory that several machines share.

A value is written under a name nobody else has and then renamed, so that a reader sees all of it or nothing.  Names of
files are digests of keys: no key leads out of the directory.  Directories have mode 0700, files 0600.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from ..status import Status, StatusCodes
from .base import ConnectorOptions, MemoryRegion
from .blocking import BlockingConnector, Call, NotReady, Statuses, found, ready_view, status_of, wrong_length
from .rocksdb import make_directories, make_private, private_directory

T = TypeVar("T")

_ABANDONED_S = 3600.0
_READ = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class SharedFilesOptions(ConnectorOptions, frozen=True, kw_only=True):
    """Where the files are.

    Attributes:
        root: the shared directory; the files of a connection are in a directory in it.
        min_free_gb: a put that would leave less room on the file system than this, in GiB, is refused.
    """

    env_prefix: ClassVar[str] = "SHFS_"

    root: str = "~/.kv_cache_ol/shfs"
    min_free_gb: Annotated[float, msgspec.Meta(ge=0)] = 1.0


class SharedFilesConnector(BlockingConnector):
    """Values as files.  Nothing is removed but by ``delete``: how long files stay is their owner's rule."""

    Options: ClassVar[type[ConnectorOptions]] = SharedFilesOptions
    shorter_values = True
    region_by_region = True

    def __init__(self, conn_id: str, executor: Executor, options: SharedFilesOptions) -> None:
        super().__init__(conn_id, executor, options)
        self.path = private_directory(options.root, conn_id)
        self._unfinished = self.path / "tmp"
        self._min_free_bytes = int(options.min_free_gb * 2**30)

    @property
    def name(self) -> str:
        return "SHFS"

    def connect(self) -> None:
        """Make the directories, and remove what writers left unfinished an hour ago or more."""
        make_private(self.path)
        make_private(self._unfinished)
        oldest_s = time.time() - _ABANDONED_S
        with contextlib.suppress(OSError), os.scandir(self._unfinished) as entries:
            _remove(entry.path for entry in entries if _modified_s(entry) < oldest_s)

    def disconnect(self) -> None:
        """Nothing is held between calls."""

    def path_of(self, key: bytes) -> Path:
        """The file of *key*."""
        digest = hashlib.sha256(key).hexdigest()
        return self.path / digest[:2] / digest[2:]

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return [found(self.path_of(key).exists()) for key in keys]

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        return [_each(call, self._get, key, mr) for key, mr in zip(keys, mrs, strict=True)]

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        return [_each(call, self._put, key, mr) for key, mr in zip(keys, mrs, strict=True)]

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return [_each(call, self._delete, key) for key in keys]

    def _get(self, key: bytes, mr: MemoryRegion) -> Status[Any]:
        try:
            fd = os.open(self.path_of(key), _READ)
        except FileNotFoundError:
            return found(False)
        try:
            length = os.fstat(fd).st_size
            if not mr.takes(length):
                return wrong_length(key, length, mr.length)
            view = mr.view[:length]
            while view:
                count = os.readv(fd, [view])
                if not count:
                    return wrong_length(key, length - len(view), mr.length)
                view = view[count:]
        finally:
            os.close(fd)
        mr.has_come()
        return Status()

    def _put(self, key: bytes, mr: MemoryRegion) -> Status[Any]:
        view = ready_view(mr)
        target, temporary = self.path_of(key), self._unfinished / uuid.uuid4().hex
        if self._min_free_bytes and _within(self._unfinished, self._free_bytes) - len(view) < self._min_free_bytes:
            return Status(StatusCodes.OUT_OF_MEMORY, f"less than {self.options.min_free_gb:g} GiB are free")
        try:
            _within(self._unfinished, partial(self._write, temporary, view))
            _within(target.parent, partial(os.replace, temporary, target))
        except BaseException:
            _remove([temporary])
            raise
        return Status()

    def _write(self, path: Path, view: memoryview) -> None:
        fd = os.open(path, _WRITE, 0o600)
        try:
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)

    def _free_bytes(self) -> int:
        room = os.statvfs(self.path)
        return room.f_bavail * room.f_frsize

    def _delete(self, key: bytes) -> Status[Any]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path_of(key))
        return Status()


def _each(call: Call, work: Any, *arguments: Any) -> Status[Any]:
    """One value of a batch: what happens to it says nothing about the others."""
    if call.cancelled:
        return Status(StatusCodes.CANCELLED)
    try:
        status: Status[Any] = work(*arguments)
    except (OSError, NotReady) as error:
        return status_of(error)
    return status


def _within(directory: Path, action: Callable[[], T]) -> T:
    """Do something for which *directory* is needed; it is made where it is not there yet, or not any more."""
    try:
        return action()
    except FileNotFoundError:
        make_directories(directory)
        return action()


def _modified_s(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return float("inf")


def _remove(paths: Iterable[Path | str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
