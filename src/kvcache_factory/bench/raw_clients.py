"""What a store can do without us: the shortest client for it, on one thread, to and from the same memory."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..errors import ConfigError, MissingDependencyError

_MOST_DUE = 4 << 20  # bytes of values that are asked for ahead


class RawClient(Protocol):
    """A yardstick: batches of whole values."""

    def put(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Store the bytes of *views*."""

    def get(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Fill *views*."""

    def close(self) -> None:
        """Disconnect."""


class RawRedis:
    """One TCP connection and a pipeline: gathered out of memory, received into it.

    Few answers are due at a time, as Redis' documentation advises: a server that must queue 64 MiB of them takes twice
    as long.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._socket = socket.create_connection(_redis_address(options), 5)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb", buffering=64 << 10)

    def put(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(view))
            self._send([memoryview(head), view, memoryview(b"\r\n")])
        for _ in names:
            if self._reader.readline() != b"+OK\r\n":
                raise ConfigError("the server refused a SET; give it more memory")

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def get(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        asks = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names]
        ahead = max(_MOST_DUE // len(views[0]), 1)
        self._socket.sendall(b"".join(asks[:ahead]))
        for at, view in enumerate(views):
            if self._reader.readline() != b"$%d\r\n" % len(view):
                raise ConfigError("a value that was stored is not there; give the server more memory")
            while view:
                view = view[self._reader.readinto(view) :]  # type: ignore[attr-defined]
            self._reader.read(2)
            self._socket.sendall(b"".join(asks[at + ahead : at + ahead + 1]))

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


class RedisPackage:
    """What people write with the package ``redis``: a pipeline of SETs, an MGET, and a copy of each value."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import redis

        host, port = _redis_address(options)
        self._client: Any = redis.Redis(host=host, port=port)

    def put(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name, view in zip(names, views, strict=True):
            pipeline.set(name, view)
        pipeline.execute()

    def get(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for value, view in zip(self._client.mget(names), views, strict=True):
            view[:] = value

    def close(self) -> None:
        self._client.close()


def _redis_address(options: Mapping[str, Any]) -> tuple[str, int]:
    url = urlsplit(options.get("url", "redis://127.0.0.1:6379"))
    if url.scheme != "redis" or url.password:
        raise ConfigError("bench l2 measures Redis over TCP, without a password: --option url=redis://host:port")
    return url.hostname or "127.0.0.1", url.port or 6379


class RawFiles:
    """One file for each value: written beside and renamed, read straight into memory."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._root = _place(options)

    def put(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            path = self._root / name.hex()
            with open(path.with_suffix(".tmp"), "wb", buffering=0) as file:
                while view:
                    view = view[file.write(view) :]
            os.replace(path.with_suffix(".tmp"), path)

    def get(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            with open(self._root / name.hex(), "rb", buffering=0) as file:
                while view:
                    view = view[file.readinto(view) :]

    def close(self) -> None:
        shutil.rmtree(self._root)


class RawRocksDB:
    """rocksdict with the options of the connector, one value after the other."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            import rocksdict
        except ImportError:
            raise MissingDependencyError.of("rocksdict", "rocksdb", "bench l2 --connector ROCKSDB") from None
        given = rocksdict.Options(raw_mode=True)
        given.create_if_missing(True)
        given.set_write_buffer_size(64 << 20)
        given.set_target_file_size_base(64 << 20)
        given.set_max_write_buffer_number(3)
        given.set_max_total_wal_size(128 << 20)
        given.set_max_background_jobs(8)
        given.set_compression_type(rocksdict.DBCompressionType.none())
        access = rocksdict.AccessType.read_write().with_ttl(600)
        self._root = _place(options)
        self._db: Any = rocksdict.Rdict(str(self._root), given, access_type=access)

    def put(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            self._db[name] = bytes(view)

    def get(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            view[:] = self._db[name]

    def close(self) -> None:
        self._db.close()
        shutil.rmtree(self._root)


def _place(options: Mapping[str, Any]) -> Path:
    """A directory of its own beside that of the connector, to be removed with the client."""
    return Path(tempfile.mkdtemp(prefix="raw-", dir=options["root"]))


class RawDict:
    """A dict of bytes."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._values: dict[bytes, bytes] = {}

    def put(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            self._values[name] = bytes(view)

    def get(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for name, view in zip(names, views, strict=True):
            view[:] = self._values[name]

    def close(self) -> None:
        self._values.clear()


RAW_CLIENTS: dict[str, dict[str, Callable[[Mapping[str, Any]], RawClient]]] = {
    "MOCK": {"dict": RawDict},
    "REDIS": {"socket": RawRedis, "redis-py": RedisPackage},
    "ROCKSDB": {"rocksdict": RawRocksDB},
    "SHFS": {"files": RawFiles},
}
"""Yardsticks by connector, the shortest first; other connectors are measured alone."""
_PACKAGES = {"redis-py": "redis"}


def raw_clients(connector: str, options: Mapping[str, Any]) -> dict[str, RawClient]:
    """The yardsticks for a connector, as far as their packages are installed."""
    makers = RAW_CLIENTS.get(connector.upper(), {})
    return {
        name: make(options)
        for name, make in makers.items()
        if name not in _PACKAGES or find_spec(_PACKAGES[name]) is not None
    }
