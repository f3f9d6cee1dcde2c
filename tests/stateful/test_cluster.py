"""A cluster under any order of puts, gets, deaths and changes: a value is right or absent, and there when it must."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.cluster.parts import KEY, MemoryMeta, Servers, cluster, keys, membership, region

from kvcache_factory.cluster.membership import dump_membership
from kvcache_factory.cluster.placement import SimplePlacement
from kvcache_factory.status import StatusCodes

NAMES = keys(12)
PLACES = ("a", "b", "c", "d")
HARMLESS = {StatusCodes.OK, StatusCodes.NOT_FOUND, StatusCodes.OUT_OF_MEMORY}


class ClusterMachine(RuleBasedStateMachine):
    """Values are made of their keys, as blocks are: a member that has an older one is never wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.servers = Servers(self.directory.name, use_mput_mget=True)
        self.version = 1
        self.members = membership("a", "b")
        self.meta = MemoryMeta({KEY: dump_membership(self.members)})
        self.cluster = cluster(self.servers, self.meta)
        self.held: dict[str, set[bytes]] = {f"{place}:1": set() for place in PLACES}
        assert self.cluster.open().is_ok()

    def owner(self, name: bytes) -> str | None:
        number = int(SimplePlacement(self.members).owners_of([name])[0])
        return self.members.nodes[number].place if number >= 0 else None

    def settle(self) -> None:
        """Wait until every living member is connected and usable, and no dead one is."""

        async def wait() -> None:
            for _ in range(3000):
                rows = {str(row["member"]): row["usable"] for row in self.cluster.members()}
                if all(rows[p] for p in rows if p not in self.servers.dead):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(f"{self.cluster.members()} with {self.servers.dead} dead")

        self.loop.run_until_complete(wait())

    def call(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @rule(chosen=st.lists(st.sampled_from(NAMES), min_size=1, unique=True), batch=st.booleans())
    def put(self, chosen: list[bytes], batch: bool) -> None:
        regions = [region(name.ljust(16)) for name in chosen]
        if batch:
            statuses = self.call(self.cluster.mput(chosen, regions))
        else:
            statuses = [self.call(self.cluster.put(n, r)) for n, r in zip(chosen, regions, strict=True)]
        for name, status in zip(chosen, statuses, strict=True):
            owner = self.owner(name)
            if owner is not None and owner not in self.servers.dead:
                assert status.is_ok(), status
                self.held[owner].add(name)
            else:
                assert not status.is_ok()

    @rule(chosen=st.lists(st.sampled_from(NAMES), min_size=1, unique=True), batch=st.booleans())
    def get(self, chosen: list[bytes], batch: bool) -> None:
        landings = [region(b"\0" * 16) for _ in chosen]
        if batch:
            statuses = self.call(self.cluster.mget(chosen, landings))
        else:
            statuses = [self.call(self.cluster.get(n, r)) for n, r in zip(chosen, landings, strict=True)]
        for name, landing, status in zip(chosen, landings, statuses, strict=True):
            owner = self.owner(name)
            there = owner is not None and owner not in self.servers.dead and name in self.held[owner]
            assert status.is_ok() == there, (name, owner, status)
            assert landing.tobytes() == (name.ljust(16) if there else b"\0" * 16)

    @rule(chosen=st.sampled_from(NAMES))
    def delete(self, chosen: bytes) -> None:
        owner = self.owner(chosen)
        if self.call(self.cluster.delete(chosen)).is_ok() and owner is not None and owner not in self.servers.dead:
            self.held[owner].discard(chosen)

    @rule(places=st.lists(st.sampled_from((*PLACES, "-")), min_size=1, max_size=5, unique=True))
    def change(self, places: list[str]) -> None:
        self.version += 1
        self.members = membership(*places, version=self.version)
        self.meta.values[KEY] = dump_membership(self.members)
        self.cluster.refresh()
        self.settle()

    @rule(text=st.sampled_from([b"{", b'{"nodes": [{}]}']))
    def break_the_membership(self, text: bytes) -> None:
        good, self.meta.values[KEY] = self.meta.values[KEY], text
        assert not self.cluster.refresh()
        self.meta.values[KEY] = good

    @rule(place=st.sampled_from(PLACES))
    def die(self, place: str) -> None:
        if len(self.servers.dead) < 2:
            self.servers.dead.add(f"{place}:1")

    @rule()
    def live(self) -> None:
        self.servers.dead.clear()
        self.settle()

    @invariant()
    def none_was_closed_in_use(self) -> None:
        assert self.servers.closed_in_use == []

    def teardown(self) -> None:
        self.cluster.close()
        assert sorted(self.servers.opened) == sorted(self.servers.closed)
        self.servers.wipe(*(f"{place}:1" for place in PLACES))
        self.loop.close()
        self.directory.cleanup()


TestCluster = ClusterMachine.TestCase
TestCluster.settings = settings(max_examples=30, stateful_step_count=25)
