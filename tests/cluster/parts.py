"""A meta service in memory, and a cluster of mocks whose servers a test kills, freezes and brings back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcache_factory.cluster.connector import ClusterConnector
from kvcache_factory.cluster.membership import Membership, Node, dump_membership, ranges_of
from kvcache_factory.cluster.meta_service import MetaService
from kvcache_factory.connector import Connector, ConnectorFeature, MemoryRegion
from kvcache_factory.connector.mock import MockConnector, MockOptions, forget
from kvcache_factory.errors import StoreError
from kvcache_factory.status import Status, StatusCodes

KEY = "nodes"


class MemoryMeta(MetaService):
    """Values in a dict; *down* makes every call fail."""

    def __init__(self, values: dict[str, bytes] | None = None) -> None:
        self.values = values if values is not None else {}
        self.down = False
        self.reads = 0
        self.closed = False
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        self._check()
        self.reads += 1
        return self.values.get(key)

    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        self._check()
        with self._lock:
            if self.values.get(key) != old:
                return False
            self.values[key] = new
            return True

    def put(self, key: str, value: bytes, ttl_s: int | None = None) -> None:
        self._check()
        self.values[key] = value

    def delete(self, key: str) -> None:
        self._check()
        self.values.pop(key, None)

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.down:
            raise StoreError("the meta service is down", reason="unavailable")


def membership(*places: str, total: int = 64, version: int = 1, **fields: Any) -> Membership:
    """A cluster in which the servers ``a:1`` take turns in *total* slots; ``-`` leaves its turns to nobody."""
    nodes = []
    for number, place in enumerate(places):
        addr, _, port = place.partition(":")
        slots = ranges_of(range(number, total, len(places)))
        if place != "-":
            nodes.append(Node(addr, int(port or 1), slots, tuple(fields.items())))
    return Membership(tuple(nodes), version)


class Servers:
    """Mocks by address, and what is wrong with them."""

    def __init__(self, share: str, **flags: bool) -> None:
        self.share, self.flags = share, flags
        self.dead: set[str] = set()
        self.frozen: dict[str, asyncio.Event] = {}
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.in_flight: dict[str, int] = {}
        self.closed_in_use: list[str] = []
        self.lock = threading.Lock()

    def make(self, node: Node) -> Connector[bytes, Any]:
        return ServerConnector(self, node.place)

    @property
    def feature(self) -> ConnectorFeature:
        return MockConnector(MockOptions(**self.flags)).feature

    def wipe(self, *places: str) -> None:
        """Forget all values."""
        for place in places:
            forget(f"{self.share}/{place}")


class ServerConnector(MockConnector):
    """A mock that does what its server does."""

    def __init__(self, servers: Servers, place: str) -> None:
        super().__init__(MockOptions(share=f"{servers.share}/{place}", **servers.flags))
        self.servers, self.place = servers, place

    def open(self) -> Status[Any]:
        if self.place in self.servers.dead:
            raise ConnectionRefusedError(self.place)
        self.servers.opened.append(self.place)
        return super().open()

    def close(self) -> Status[Any]:
        with self.servers.lock:
            if self.servers.in_flight.get(self.place, 0):
                self.servers.closed_in_use.append(self.place)
            self.servers.closed.append(self.place)
        return super().close()

    async def _server(self) -> None:
        with self.servers.lock:
            self.servers.in_flight[self.place] = self.servers.in_flight.get(self.place, 0) + 1
        try:
            await asyncio.sleep(0)
            if self.place in self.servers.frozen:
                await self.servers.frozen[self.place].wait()
            if self.place in self.servers.dead:
                raise ConnectionResetError(self.place)
        finally:
            with self.servers.lock:
                self.servers.in_flight[self.place] -= 1

    async def exists(self, key: bytes) -> Status[Any]:
        await self._server()
        return await super().exists(key)

    async def get(self, key: bytes, mr: Any) -> Status[Any]:
        await self._server()
        return await super().get(key, mr)

    async def put(self, key: bytes, mr: Any) -> Status[Any]:
        await self._server()
        return await super().put(key, mr)

    async def delete(self, key: bytes) -> Status[Any]:
        await self._server()
        return await super().delete(key)


def cluster(servers: Servers, meta: MetaService, refresh_interval_s: float = 3600.0) -> ClusterConnector:
    """A cluster that looks at the membership only when it is asked to."""
    return ClusterConnector(servers.make, servers.feature, lambda: meta, KEY, refresh_interval_s)


def meta_of(members: Membership) -> MemoryMeta:
    """A meta service that holds a membership."""
    return MemoryMeta({KEY: dump_membership(members)})


def region(value: bytes) -> MemoryRegion:
    """Memory with these bytes."""
    return MemoryRegion(np.frombuffer(bytearray(value), np.uint8))


def keys(count: int) -> list[bytes]:
    """Keys that are spread over slots."""
    return [b"key-%d" % i for i in range(count)]


async def put_all(connector: Connector[bytes, Any], names: Sequence[bytes]) -> list[StatusCodes]:
    """Put each key as its own value; returns the codes."""
    return [(await connector.put(name, region(name.ljust(16)))).error_code for name in names]


async def get_all(connector: Connector[bytes, Any], names: Sequence[bytes]) -> list[StatusCodes | bytes]:
    """What each key has: the value, or the code."""
    found: list[StatusCodes | bytes] = []
    for name in names:
        landing = region(b"\0" * 16)
        status = await connector.get(name, landing)
        found.append(landing.tobytes().rstrip() if status.is_ok() else status.error_code)
    return found
