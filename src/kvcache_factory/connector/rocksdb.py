"""ROCKSDB: a RocksDB database in a directory of this machine, for one process.

Beside each value stands a mark in a column family of its own: the value's length and the time of its writing.  A
look-up reads the mark only, where ``key in db`` would read the value; and a value is gone to the second when its time
is over, where RocksDB itself forgets it with some later compaction.  Marks are written behind their values: batches of
both cost a fifth more, and a value that a crash left without a mark is only not there yet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import quote

import msgspec

from ..errors import ConfigError
from ..status import Status, StatusCodes
from .base import ConnectorOptions, MemoryRegion
from .blocking import BlockingConnector, Call, Statuses, found, sdk, status_of, wrong_length

_MARK = struct.Struct("<Qd")  # length of the value, time of its writing in seconds
_MARKS = "marks"
_AGAIN_S = 5.0  # least time between two tries to open a database anew that has refused a write

Count = Annotated[int, msgspec.Meta(ge=1)]


class RocksDBOptions(ConnectorOptions, frozen=True, kw_only=True):
    """Where the database is, and RocksDB's own options.

    Attributes:
        root: directory; the database of a connection is a directory in it.
        ttl_s: seconds that a value is kept; 0 keeps it.
        write_buffer_size, target_file_size_base, max_total_wal_size: bytes.
        max_write_buffer_number, max_background_jobs: counts.
    """

    env_prefix: ClassVar[str] = "ROCKSDB_"

    root: str = "~/.kv_cache_ol/rocksdb"
    ttl_s: Annotated[int, msgspec.Meta(ge=0)] = 600
    write_buffer_size: Count = 64 << 20
    target_file_size_base: Count = 64 << 20
    max_write_buffer_number: Count = 3
    max_total_wal_size: Annotated[int, msgspec.Meta(ge=0)] = 128 << 20
    max_background_jobs: Count = 8


class RocksDBConnector(BlockingConnector):
    """Values in RocksDB.  Its client takes and gives ``bytes``, so a value is copied once each way."""

    Options: ClassVar[type[ConnectorOptions]] = RocksDBOptions
    shorter_values = True
    region_by_region = True
    clock = staticmethod(time.time)

    def __init__(self, conn_id: str, executor: Executor, options: RocksDBOptions) -> None:
        super().__init__(conn_id, executor, options)
        self.path = private_directory(options.root, conn_id)
        self._ttl_s = options.ttl_s
        self._db: Any = None
        self._marks: Any = None
        self._marks_handle: Any = None
        self._lock = threading.RLock()
        self._users = 0
        self._refused = False
        self._try_at_s = 0.0

    @property
    def name(self) -> str:
        return "ROCKSDB"

    def connect(self) -> None:
        """Open the database, or make it; PermissionError where another process has it open: RocksDB is for one."""
        module = _rocksdict()
        make_private(self.path)
        try:
            self._db = self._opened(module)
        except Exception as error:
            if "lock" in str(error).lower():
                raise PermissionError(f"another connector has {self.path} open; give each its own root") from error
            raise
        self._marks = self._db.get_column_family(_MARKS)
        self._marks_handle = self._db.get_column_family_handle(_MARKS)

    def _opened(self, module: Any) -> Any:
        given = self.options
        options = module.Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_write_buffer_size(given.write_buffer_size)
        options.set_target_file_size_base(given.target_file_size_base)
        options.set_max_write_buffer_number(given.max_write_buffer_number)
        options.set_max_total_wal_size(given.max_total_wal_size)
        options.set_max_background_jobs(given.max_background_jobs)
        options.set_compression_type(module.DBCompressionType.none())  # KV does not get smaller
        access = module.AccessType.read_write()
        if given.ttl_s:
            access = access.with_ttl(given.ttl_s)
        families = {"default": options, _MARKS: module.Options(raw_mode=True)}
        return module.Rdict(str(self.path), options, column_families=families, access_type=access)

    def disconnect(self) -> None:
        with self._lock:
            parts = self._marks, self._db
            self._db = self._marks = self._marks_handle = None  # its file is locked as long as any of them lives
            for part in parts:
                if part is not None:
                    part.close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """The database is not opened anew meanwhile."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The same for a write.  RocksDB that once could not write refuses all until it is opened anew."""
        with self._lock:
            if self._open and self._refused and not self._users and time.monotonic() >= self._try_at_s:
                self._try_at_s = time.monotonic() + _AGAIN_S
                self._open_anew()
        with self._in_use():
            try:
                yield
            except Exception:
                self._refused = True
                raise

    def _open_anew(self) -> None:
        """Close and open, if there is room for that: what can be read must not be lost to an opening that fails."""
        if self.path.is_dir() and shutil.disk_usage(self.path).free < self.options.write_buffer_size:
            return
        with contextlib.suppress(Exception):  # it has failed before, and says so once more
            self.disconnect()
        self.connect()
        self._refused = False

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        with self._in_use():
            return [found(length >= 0) for length in self._lengths(keys)]

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        statuses: Statuses = []
        with self._in_use():
            for key, mr, length in zip(keys, mrs, self._lengths(keys), strict=True):
                if call.cancelled:
                    break
                try:
                    statuses.append(self._get(key, mr, length))
                except Exception as error:  # a damaged value says nothing about those before it
                    statuses.append(self.status_of(error))
        return statuses + [Status(StatusCodes.CANCELLED)] * (len(keys) - len(statuses))

    def _get(self, key: bytes, mr: MemoryRegion, length: int) -> Status[Any]:
        if length >= 0 and not mr.takes(length):
            return wrong_length(key, length, mr.length)
        value = self._db.get(key) if length >= 0 else None
        if value is None or len(value) != length:
            return found(False)
        mr.shortened(length).fill(value)
        mr.has_come()
        return Status()

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        marks = _rocksdict().WriteBatch(raw_mode=True)
        done = 0
        with self._writing():
            for key, mr in zip(keys, mrs, strict=True):
                if call.cancelled or not mr.wait_ready():
                    break
                self._db[key] = bytes(mr.view)
                marks.put(key, _MARK.pack(mr.length, self.clock()), self._marks_handle)
                done += 1
            self._db.write(marks)
        why = StatusCodes.CANCELLED if call.cancelled else StatusCodes.TIMEOUT
        return [Status()] * done + [Status(why)] * (len(keys) - done)

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        module = _rocksdict()
        batch = module.WriteBatch(raw_mode=True)
        with self._writing():
            for key in keys:
                batch.delete(key)
                batch.delete(key, self._marks_handle)
            self._db.write(batch)
        return [Status() for _ in keys]

    def status_of(self, error: Exception) -> Status[Any]:
        return status_of(OSError(errno.ENOSPC, str(error)) if "No space left" in str(error) else error)

    def _lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of the values, -1 for one that is not there or whose time is over."""
        lengths = []
        for mark in self._marks.get(list(keys)):
            length, written_s = _MARK.unpack(mark) if mark is not None else (-1, 0.0)
            over = self._ttl_s and self.clock() - written_s >= self._ttl_s
            lengths.append(-1 if over else length)
        return lengths


def private_directory(root: str, conn_id: str) -> Path:
    """The directory of a connection below *root*, whatever its name is: no name leads out of it."""
    name = quote(conn_id, safe="")
    return Path(root).expanduser() / (f"%{name}" if name.startswith(".") else name or "%")


def make_private(path: Path) -> None:
    """:func:`make_directories` with a ConfigError where that cannot be."""
    try:
        make_directories(path)
    except OSError as error:
        raise ConfigError(f"the directory {path} cannot be made ({error}); give another root") from error


def make_directories(path: Path) -> None:
    """Make *path*, and what is missing above it, directories of mode 0700."""
    for directory in [*reversed(path.parents), path]:
        if not directory.is_dir():
            directory.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's, who lets us in
        os.chmod(path, 0o700)


def _rocksdict() -> Any:
    return sdk("rocksdict", "ROCKSDB", "pip install 'kvcache-factory[rocksdb]'")
