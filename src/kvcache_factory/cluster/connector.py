"""A cluster as one connector: each key goes to the member that owns its slot.

The membership may change at any time.  Connections of members that stay are kept, those of new ones are opened before
anybody is sent there, then one snapshot takes the place of the other, and what left is closed when its calls have
ended.  A call keeps to the snapshot that it began with.  What a member cannot give, is a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any

from ..connector.base import Connector, ConnectorFeature, MemoryRegion, OptionsConnector
from ..errors import ConfigError, KVCacheError, StoreError
from ..status import Status, StatusCodes
from .links import ANYTHING, Link, Make, Member, Snapshot, failed
from .membership import Membership, parse_membership
from .meta_service import MetaService
from .placement import placement_class

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvcache_factory")
Regions = MemoryRegion | Sequence[MemoryRegion]
Statuses = Sequence[Status[Any]]
Ask = Callable[[Connector[bytes, Any], list[int]], Awaitable[Statuses]]

CONNECT_WAIT_S = 2.0
"""Longest that opening, and taking over a change, wait for members to connect; they are misses until they have."""
TICK_S = 0.25


class ClusterConnector(OptionsConnector):
    """Routes calls to the members that the meta service names.

    Parameters
    ----------
    make:
        Makes the unopened connector of a node.
    feature:
        What connectors of this kind offer; zero copy is not passed on.
    meta:
        Opens the meta service.
    key:
        Where the membership is kept in it.
    refresh_interval_s:
        Seconds between two looks at the membership; 0: it is read once, when the connector is opened.
    placement:
        Name of the rule by which keys belong to members.
    """

    batched_lookups = True

    def __init__(
        self,
        make: Make,
        feature: ConnectorFeature,
        meta: Callable[[], MetaService],
        key: str,
        refresh_interval_s: float = 30.0,
        placement: str = "SIMPLE",
        shorter_values: bool = False,
    ) -> None:
        placement_class(placement)
        self.shorter_values = shorter_values
        if not key:
            raise ConfigError("a cluster needs the key under which the meta service holds its membership")
        f = feature
        self._feature = ConnectorFeature(f.mput_mget, f.prefetch, f.rdma, f.gdr_put, f.gdr_get)
        self._make = make
        self._open_meta = meta
        self._key = key
        self._interval_s = refresh_interval_s
        self._placement = placement
        self._changed = threading.Condition()
        self._refreshing = threading.Lock()
        self._snapshot = Snapshot(Membership(), [], placement)
        self._members: list[Member] = []
        self._leaving: list[Link] = []
        self._meta: MetaService | None = None
        self._slabs: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._closed = True
        self._complained = ""

    @classmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> ClusterConnector:
        """Not offered: a cluster is made from a backend with a meta service."""
        raise ConfigError(_NOT_ALONE)

    @classmethod
    def from_options(cls, conn_id: str, executor: Executor, options: Any) -> ClusterConnector:
        """Not offered either."""
        raise ConfigError(_NOT_ALONE)

    @property
    def name(self) -> str:
        return f"cluster {self._key}"

    @property
    def feature(self) -> ConnectorFeature:
        return self._feature

    # -- open and close -----------------------------------------------------------------------------------------------

    def open(self) -> Status[Any]:
        """Read the membership and connect; ERROR when it is to be read once and cannot be."""
        if not self._closed:
            return Status()
        self._closed = False
        self.refresh()
        if not self._interval_s and not self._snapshot.members:
            why = self._complained or "it names no server"
            self.close()
            return Status(StatusCodes.ERROR, f"the membership {self._key!r} is read once, and {why}")
        self._thread = threading.Thread(target=self._maintain, name="kvcache-factory-cluster", daemon=True)
        self._thread.start()
        return Status()

    def close(self) -> Status[Any]:
        with self._changed:
            if self._closed:
                return Status()
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._refreshing, self._changed:
            links = [member.link for member in self._snapshot.members if member.link is not None] + self._leaving
            self._snapshot, self._leaving, self._members = Snapshot(Membership(), [], self._placement), [], []
        for link in links:
            self._end(link)
        if self._meta is not None:
            self._meta.close()
            self._meta = None
        self._slabs, self._complained = [], ""
        return Status()

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        """Register memory with every member, and with those that come."""
        if not self._feature.rdma:
            raise NotImplementedError
        with self._changed:
            self._slabs = [*self._slabs, *slabs]
            links = [member.link for member in self._snapshot.members if member.link is not None]
        for link in links:
            status = link.connector.register_slabs(slabs)
            if not status.is_ok():
                return status
        return Status()

    # -- membership ---------------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Look at the membership now and take over what has changed; returns whether something has."""
        with self._refreshing:
            try:
                membership = self._read()
            except KVCacheError as error:
                self._complain(str(error))
                return False
            self._complained = ""
            if membership == self._snapshot.membership:
                return False
            self._take_over(membership)
            return True

    def _read(self) -> Membership:
        if self._meta is None:
            self._meta = self._open_meta()
        text = self._meta.get(self._key)
        if text is None:
            raise StoreError(f"the meta service holds nothing under {self._key!r}", reason="absent")
        return parse_membership(text)

    def _complain(self, why: str) -> None:
        """Once for each reason: the last good membership stays in force."""
        if why != self._complained:
            _log.warning("cluster %s: %s; going on with %d servers", self._key, why, len(self._snapshot.members))
        self._complained = why

    def _take_over(self, membership: Membership) -> None:
        before = self._snapshot.members
        members = []
        for node in membership.nodes:
            same = next((member for member in before if member.node.is_same_server(node)), None)
            members.append(same or Member(node))
        # Snapshots share their members, so the old one stays good for those that began with it.
        with self._changed:
            self._members = members
            fresh = [member for member in members if member not in before]
            for member in fresh:
                member.connect(self._make, self._prepare, self._settled)
            self._changed.wait_for(lambda: self._closed or not any(map(_is_trying, fresh)), CONNECT_WAIT_S)
            self._snapshot = Snapshot(membership, members, self._placement)
            left = [member for member in before if member not in members]
            self._leaving += [member.link for member in left if member.link is not None]
            self._changed.notify_all()

    def _prepare(self, connector: Connector[bytes, Any]) -> Status[Any]:
        with self._changed:
            slabs = self._slabs
        return connector.register_slabs(slabs) if self._feature.rdma and slabs else Status()

    def _settled(self, member: Member, link: Link | None, why: str) -> None:
        """A thread has connected a member, or has not."""
        with self._changed:
            wanted = member in self._members and not self._closed
            useless = member.settle(link, why) if wanted else link
            if useless is not None and not self._closed:
                self._leaving.append(useless)
            self._changed.notify_all()
        if useless is not None and self._closed:
            self._end(useless)

    # -- in the background --------------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        look_at = time.monotonic() + self._interval_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work(), TICK_S)
                if self._closed:
                    return
                ended = [link for link in self._leaving if link.idle]
                self._leaving = [link for link in self._leaving if not link.idle]
                for member in self._snapshot.members:
                    if member.due(time.monotonic()):
                        member.connect(self._make, self._prepare, self._settled)
            for link in ended:
                self._end(link)
            if self._interval_s and time.monotonic() >= look_at:
                self.refresh()
                look_at = time.monotonic() + self._interval_s

    def _has_work(self) -> bool:
        now = time.monotonic()
        return any(link.idle for link in self._leaving) or any(member.due(now) for member in self._snapshot.members)

    def _end(self, link: Link) -> None:
        with contextlib.suppress(Exception):  # nothing can be done about it
            link.connector.close()

    # -- calls --------------------------------------------------------------------------------------------------------

    async def exists(self, key: bytes) -> Status[Any]:
        return (await self._route([key], lambda c, _: _one(c.exists(key)), _ABSENT))[0]

    async def mexists(self, keys: Sequence[bytes]) -> Statuses:
        """:meth:`exists` of a batch, each member asked once where its connector can."""
        return await self._route(keys, partial(_look_up, "exists", keys), _ABSENT)

    async def mdelete(self, keys: Sequence[bytes]) -> Statuses:
        """:meth:`delete` of a batch."""
        return await self._route(keys, partial(_look_up, "delete", keys), _NOTHING)

    async def get(self, key: bytes, mr: Regions) -> Status[Any]:
        return (await self._route([key], lambda c, _: _one(c.get(key, mr)), _ABSENT))[0]

    async def put(self, key: bytes, mr: Regions) -> Status[Any]:
        return (await self._route([key], lambda c, _: _one(c.put(key, mr)), _NO_ROOM))[0]

    async def delete(self, key: bytes) -> Status[Any]:
        return (await self._route([key], lambda c, _: _one(c.delete(key)), _NOTHING))[0]

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        async def ask(connector: Connector[bytes, Any], part: list[int]) -> Statuses:
            await connector.prefetch([keys[i] for i in part])
            return [Status()] * len(part)

        if self._feature.prefetch:
            await self._route(keys, ask, _NOTHING)

    def get_batches(
        self, keys: Sequence[Any], mrs: Sequence[Regions], batch_size: int
    ) -> Sequence[Sequence[tuple[bytes, Regions]]]:
        """Batches in the order of *keys*: one of them may go to several members at the same time."""
        if not self._feature.mput_mget:
            raise NotImplementedError
        pairs = list(zip(keys, mrs, strict=True))
        return [pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)]

    async def mget(self, keys: Sequence[bytes], mrs: Sequence[Regions]) -> Statuses:
        return await self._move("mget", keys, mrs, _ABSENT)

    async def mput(self, keys: Sequence[bytes], mrs: Sequence[Regions]) -> Statuses:
        return await self._move("mput", keys, mrs, _NO_ROOM)

    async def _move(self, verb: str, keys: Sequence[bytes], mrs: Sequence[Regions], miss: Status[Any]) -> Statuses:
        if not self._feature.mput_mget:
            raise NotImplementedError

        async def ask(connector: Connector[bytes, Any], part: list[int]) -> Statuses:
            own_keys, own_mrs = [keys[i] for i in part], [mrs[i] for i in part]
            found: dict[bytes, Status[Any]] = {}
            for batch in connector.get_batches(own_keys, own_mrs, len(part)):
                names = [key for key, _ in batch]
                found.update(zip(names, await getattr(connector, verb)(names, [mr for _, mr in batch]), strict=True))
            return [found[key] for key in own_keys]

        return await self._route(keys, ask, miss)

    async def _route(self, keys: Sequence[bytes], ask: Ask, miss: Status[Any]) -> list[Status[Any]]:
        """Ask the owner of each key, all of them at the same time; *miss* for keys that nobody can be asked for."""
        if self._closed:
            return [Status(StatusCodes.ERROR, "the cluster is closed")] * len(keys)
        results = [miss] * len(keys)
        calls, alone = self._begin(keys)

        async def one(link: Link, number: int, part: list[int]) -> None:
            answers: Statuses = []
            try:
                answers = await ask(link.connector, part)
            except ANYTHING as error:
                answers = [Status(StatusCodes.ERROR, error)] * len(part)
            finally:
                if len(answers) != len(part):
                    answers = [Status(StatusCodes.ERROR, "answers do not match the keys")] * len(part)
                with self._changed:
                    link.end(number, any(map(failed, answers)))
                    if link.broken or link in self._leaving:
                        self._changed.notify_all()
            for i, answer in zip(part, answers, strict=True):
                # While others answer, one server that does not is a miss, and no reason to ask none of them.
                results[i] = answer if alone or not failed(answer) else miss

        # Every call to its end, also when one is cancelled: none may be running when its memory is given back.
        for ended in await asyncio.gather(*(one(*call) for call in calls), return_exceptions=True):
            if ended is not None:
                raise ended
        return results

    def _begin(self, keys: Sequence[bytes]) -> tuple[list[tuple[Link, int, list[int]]], bool]:
        """Links to ask, each with the number of its call and its part of the keys; and whether it is the only one."""
        with self._changed:
            snapshot = self._snapshot
            owners = snapshot.placement.owners_of(keys).tolist()
            parts: dict[int, list[int]] = {}
            for i, owner in enumerate(owners):
                if owner >= 0 and snapshot.members[owner].usable:
                    parts.setdefault(owner, []).append(i)
            calls = []
            for owner, part in parts.items():
                link = snapshot.members[owner].link
                assert link is not None
                calls.append((link, link.begin(), part))
            return calls, sum(member.usable for member in snapshot.members) < 2

    def members(self) -> list[dict[str, Any]]:
        """A row for each member: place, slots, whether it is in use, and if not, why."""
        with self._changed:
            return [
                {
                    "member": member.node.place,
                    "slots": sum(r.end - r.start + 1 for r in node.slots),
                    "usable": member.usable,
                    "why": "" if member.usable else member.why or "calls to it fail or hang",
                }
                for node, member in zip(self._snapshot.membership.nodes, self._snapshot.members, strict=True)
            ]


def _is_trying(member: Member) -> bool:
    return member.link is None and member.why == "not connected yet"


async def _look_up(verb: str, keys: Sequence[bytes], connector: Connector[bytes, Any], part: list[int]) -> Statuses:
    """Ask one member about its *part* of the keys."""
    own = [keys[i] for i in part]
    if isinstance(connector, OptionsConnector) and connector.batched_lookups:
        found: Statuses = await getattr(connector, f"m{verb}")(own)
        return found
    call = getattr(connector, verb)
    return await asyncio.gather(*(_answer(partial(call, key)) for key in own))


async def _answer(call: Callable[[], Awaitable[Status[Any]]]) -> Status[Any]:
    try:
        answer = await call()
    except ANYTHING as error:
        return Status(StatusCodes.ERROR, error)
    return answer if isinstance(answer, Status) else Status(StatusCodes.ERROR, f"{type(answer).__name__}: {answer}")


async def _one(call: Awaitable[Status[Any]]) -> Statuses:
    return [await call]


_NOT_ALONE = "a cluster is described by RemoteBackend(meta_service=...), or by META_SERVICE_* variables"
_ABSENT: Status[Any] = Status(StatusCodes.NOT_FOUND)
_NO_ROOM: Status[Any] = Status(StatusCodes.OUT_OF_MEMORY, "no member of the cluster takes this key now")
_NOTHING: Status[Any] = Status()
