"""A cluster is one connector: routing, changes under load, members that are dead, slow or not there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_factory import ConfigError
from kvcache_factory.cluster.connector import ClusterConnector
from kvcache_factory.cluster.membership import dump_membership
from kvcache_factory.cluster.placement import SimplePlacement
from kvcache_factory.connector import Connector, ConnectorFeature
from kvcache_factory.status import StatusCodes
from kvcache_factory.testing import ConnectorTests

from .parts import (
    KEY,
    MemoryMeta,
    ServerConnector,
    Servers,
    cluster,
    get_all,
    keys,
    membership,
    meta_of,
    put_all,
    region,
)

THREE = ("a", "b", "c")


class ClusterOfMocks(ConnectorTests):
    """Three servers that keep what they were given."""

    flags: dict[str, bool] = {}  # noqa: RUF012

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return cluster(Servers(str(directory), **self.flags), meta_of(membership(*THREE)))

    @pytest.fixture(autouse=True)
    def _forget(self, tmp_path: Path) -> Iterator[None]:
        yield
        Servers(str(tmp_path)).wipe("a:1", "b:1", "c:1")


class TestPlain(ClusterOfMocks):
    """Single calls."""


class TestBatches(ClusterOfMocks):
    """Batches, each of which goes to several members."""

    flags = {"use_mput_mget": True}  # noqa: RUF012


class TestRDMA(ClusterOfMocks):
    """Memory is registered with every member."""

    flags = {"use_rdma": True, "use_mput_mget": True}  # noqa: RUF012


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(str(tmp_path), use_mput_mget=True)
    yield found
    found.wipe(*(f"{name}:1" for name in "abcd"))


def owners(names: list[bytes], *places: str) -> list[str]:
    """Which server each key belongs to."""
    members = membership(*places)
    return [members.nodes[i].place if i >= 0 else "-" for i in SimplePlacement(members).owners_of(names)]


async def eventually(condition: Any) -> None:
    """Let other threads work until *condition* holds."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


def test_each_key_is_on_the_member_that_owns_its_slot(servers: Servers) -> None:
    """What one connector of the member alone finds is what belongs there."""

    async def run() -> None:
        whole = cluster(servers, meta_of(membership(*THREE)))
        assert whole.open().is_ok()
        names = keys(60)
        assert set(await put_all(whole, names)) == {StatusCodes.OK}
        for node in membership(*THREE).nodes:
            alone = servers.make(node)
            alone.open()
            found = [name for name in names if (await alone.exists(name)).is_ok()]
            assert found == [n for n, owner in zip(names, owners(names, *THREE), strict=True) if owner == node.place]
            assert found
        whole.close()

    asyncio.run(run())


def test_a_gap_in_the_slots_is_a_miss(servers: Servers) -> None:
    """Nobody owns a third of the slots: their keys are absent, cannot be put, and harm nobody else's."""

    async def run() -> None:
        whole = cluster(servers, meta_of(membership("a", "-", "b")))
        whole.open()
        names = keys(60)
        gap = [owner == "-" for owner in _gap_owners(names)]
        assert any(gap)
        assert not all(gap)
        put = await put_all(whole, names)
        assert put == [StatusCodes.OUT_OF_MEMORY if missing else StatusCodes.OK for missing in gap]
        expected = [StatusCodes.NOT_FOUND if missing else n for n, missing in zip(names, gap, strict=True)]
        assert await get_all(whole, names) == expected
        assert (await whole.delete(names[gap.index(True)])).is_ok()
        whole.close()

    asyncio.run(run())


def _gap_owners(names: list[bytes]) -> list[str]:
    members = membership("a", "-", "b")
    return [members.nodes[i].place if i >= 0 else "-" for i in SimplePlacement(members).owners_of(names)]


def test_members_change_under_load_without_a_lost_call(servers: Servers) -> None:
    """Every call ends well while servers come and go; connections that stay are kept, none is closed while in use."""

    async def run() -> None:
        meta = meta_of(membership(*THREE))
        whole = cluster(servers, meta)
        whole.open()
        stop = asyncio.Event()
        seen: list[StatusCodes | bytes] = []
        names = keys(40)

        async def load() -> None:
            while not stop.is_set():
                seen.extend(await put_all(whole, names[:8]))
                batch = whole.get_batches(names, [region(n.ljust(16)) for n in names], 16)
                for part in batch:
                    seen.extend(s.error_code for s in await whole.mput([k for k, _ in part], [m for _, m in part]))
                seen.extend(await get_all(whole, names[8:16]))

        loads = [asyncio.create_task(load()) for _ in range(4)]
        places = [THREE, ("a", "b"), ("a", "b", "d"), ("d", "c"), THREE]
        for version in range(25):
            meta.values[KEY] = dump_membership(membership(*places[version % len(places)], version=version + 2))
            assert await asyncio.to_thread(whole.refresh)
            before = len(seen)
            await eventually(lambda before=before: len(seen) > before + 100)
        stop.set()
        await asyncio.gather(*loads)
        assert {x for x in seen if isinstance(x, StatusCodes)} <= {StatusCodes.OK, StatusCodes.NOT_FOUND}
        assert servers.closed_in_use == []
        await eventually(lambda: len(servers.opened) - len(servers.closed) == len(whole.members()))
        # a leaves once in five changes, b twice: what stays is not opened again
        assert servers.opened.count("a:1") == 6
        whole.close()
        assert sorted(servers.opened) == sorted(servers.closed)

    asyncio.run(run())


def test_a_call_keeps_to_the_members_it_began_with(servers: Servers) -> None:
    """A member that left is closed when its last call has ended, not before."""

    async def run() -> None:
        meta = meta_of(membership(*THREE))
        whole = cluster(servers, meta)
        whole.open()
        names = keys(60)
        mine = names[owners(names, *THREE).index("c:1")]
        assert (await whole.put(mine, region(b"x"))).is_ok()
        servers.frozen["c:1"] = asyncio.Event()
        landing = region(b"\0")
        slow = asyncio.create_task(whole.get(mine, landing))
        await asyncio.sleep(0)
        meta.values[KEY] = dump_membership(membership("a", "b", version=2))
        assert await asyncio.to_thread(whole.refresh)
        assert (await whole.get(mine, region(b"\0"))).is_not_found()  # it has a new owner now
        assert servers.closed == []
        servers.frozen["c:1"].set()
        assert (await slow).is_ok()
        assert landing.tobytes() == b"x"
        await eventually(lambda: servers.closed == ["c:1"])
        assert servers.closed_in_use == []
        whole.close()

    asyncio.run(run())


def test_a_dead_member_is_a_miss_and_is_found_again(servers: Servers) -> None:
    """One of three dies: its keys are misses, the others' are there; when it is back, so are its keys."""

    async def run() -> None:
        whole = cluster(servers, meta_of(membership(*THREE)))
        whole.open()
        names = keys(60)
        await put_all(whole, names)
        servers.dead.add("b:1")
        expected = [
            StatusCodes.NOT_FOUND if owner == "b:1" else n
            for n, owner in zip(names, owners(names, *THREE), strict=True)
        ]
        assert await get_all(whole, names) == expected
        batch = whole.get_batches(names, [region(b"\0" * 16) for _ in names], 60)[0]
        codes = [s.error_code for s in await whole.mget([k for k, _ in batch], [m for _, m in batch])]
        assert codes == [x if isinstance(x, StatusCodes) else StatusCodes.OK for x in expected]
        await eventually(lambda: [row["usable"] for row in whole.members()] == [True, False, True])
        servers.dead.clear()
        await eventually(lambda: all(row["usable"] for row in whole.members()))
        assert await get_all(whole, names) == names
        whole.close()

    asyncio.run(run())


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_client_that_would_end_the_program_is_a_member_that_failed(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Its keys are misses; the loop goes on, and so do the others."""
    server = ServerConnector._server

    async def leave(self: ServerConnector) -> None:
        if self.place == "b:1":
            raise error
        await server(self)

    async def run() -> None:
        whole = cluster(servers, meta_of(membership(*THREE)))
        whole.open()
        names = keys(60)
        await put_all(whole, names)
        monkeypatch.setattr(ServerConnector, "_server", leave)
        there = [owner != "b:1" for owner in owners(names, *THREE)]
        assert [s.is_ok() for s in await whole.mexists(names)] == there
        assert [(await whole.exists(name)).is_ok() for name in names] == there
        whole.close()

    asyncio.run(run())


def test_a_frozen_member_is_given_no_more_calls(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a call hangs there, its keys are misses at once; when it answers, it is asked again."""
    monkeypatch.setattr("kvcache_factory.cluster.links.STALL_S", 0.0)

    async def run() -> None:
        whole = cluster(servers, meta_of(membership(*THREE)))
        whole.open()
        names = keys(60)
        mine = [n for n, owner in zip(names, owners(names, *THREE), strict=True) if owner == "b:1"]
        await put_all(whole, names)
        servers.frozen["b:1"] = asyncio.Event()
        hung = asyncio.create_task(whole.exists(mine[0]))
        await asyncio.sleep(0)
        assert await get_all(whole, mine) == [StatusCodes.NOT_FOUND] * len(mine)
        servers.frozen.pop("b:1").set()
        assert (await hung).is_ok()
        assert await get_all(whole, mine) == mine
        whole.close()

    asyncio.run(run())


def test_a_member_that_cannot_be_reached_at_first_is_tried_again(servers: Servers) -> None:
    """Opening succeeds without it, its keys are misses, and when it comes up they are not."""

    async def run() -> None:
        servers.dead.add("c:1")
        whole = cluster(servers, meta_of(membership(*THREE)), refresh_interval_s=0)
        assert whole.open().is_ok()
        assert [row["usable"] for row in whole.members()] == [True, True, False]
        assert "ConnectionRefusedError" in str(whole.members()[2]["why"])
        servers.dead.clear()
        await eventually(lambda: all(row["usable"] for row in whole.members()))
        assert set(await put_all(whole, keys(30))) == {StatusCodes.OK}
        whole.close()

    asyncio.run(run())


def test_when_nobody_else_answers_the_failure_is_told(servers: Servers) -> None:
    """A cluster of one is no cluster: its errors are for the breaker of whoever calls."""

    async def run() -> None:
        whole = cluster(servers, meta_of(membership("a")))
        whole.open()
        servers.dead.add("a:1")
        assert (await whole.get(b"k", region(b"\0"))).is_error()
        whole.close()

    asyncio.run(run())


def test_a_membership_that_cannot_be_read_leaves_the_last_one_in_force(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken JSON, overlapping slots, a missing key or a dead meta service are said once, and change nothing."""
    meta = meta_of(membership(*THREE))
    whole = cluster(servers, meta)
    whole.open()
    good = meta.values[KEY]
    for broken in (b"{", b'{"nodes": 3}', None, "down"):
        meta.down = broken == "down"
        if isinstance(broken, bytes):
            meta.values[KEY] = broken
        elif broken is None:
            del meta.values[KEY]
        caplog.clear()
        assert [whole.refresh(), whole.refresh()] == [False, False]
        assert len(caplog.records) == 1
        assert "going on with 3 servers" in caplog.text
    meta.down, meta.values[KEY] = False, good
    assert not whole.refresh()
    assert len(whole.members()) == 3
    whole.close()
    assert meta.closed


def test_zero_reads_the_membership_once(servers: Servers) -> None:
    """Refresh 0 works, and asks no more; what cannot be read at all then is an error at open."""
    meta = meta_of(membership("a"))
    whole = cluster(servers, meta, refresh_interval_s=0)
    assert whole.open().is_ok()
    meta.values[KEY] = dump_membership(membership("a", "b", version=2))
    assert whole._has_work() is False
    assert (meta.reads, len(whole.members())) == (1, 1)
    whole.close()
    nothing = cluster(servers, MemoryMeta(), refresh_interval_s=0).open()
    assert nothing.is_error()
    assert "holds nothing" in str(nothing.value)


def test_the_membership_is_looked_at_again_after_the_interval(servers: Servers) -> None:
    """A server that joined is used without anybody asking for it; a meta service that comes up late is found."""

    async def run() -> None:
        meta = MemoryMeta()
        meta.down = True
        whole = cluster(servers, meta, refresh_interval_s=0.01)
        assert whole.open().is_ok()
        assert (await whole.get(b"k", region(b"\0"))).is_not_found()
        meta.values[KEY] = dump_membership(membership("a"))
        meta.down = False
        await eventually(lambda: len(whole.members()) == 1)
        meta.values[KEY] = dump_membership(membership("a", "b", version=2))
        await eventually(lambda: len(whole.members()) == 2)
        whole.close()

    asyncio.run(run())


def test_a_changed_field_is_a_changed_server(servers: Servers) -> None:
    """Other options mean another connection; other slots do not."""
    meta = meta_of(membership("a", "b"))
    whole = cluster(servers, meta)
    whole.open()
    meta.values[KEY] = dump_membership(membership("a", "b", total=32))
    assert whole.refresh()
    assert sorted(servers.opened) == ["a:1", "b:1"]
    meta.values[KEY] = dump_membership(membership("a", "b", total=32, rank=1))
    assert whole.refresh()
    assert sorted(servers.opened) == ["a:1", "a:1", "b:1", "b:1"]
    whole.close()


def test_memory_is_registered_with_members_that_come_later(tmp_path: Path) -> None:
    """RDMA: a region is good for every member, whenever it joined."""

    async def run() -> None:
        servers = Servers(str(tmp_path), use_rdma=True)
        meta = meta_of(membership("a"))
        whole = cluster(servers, meta)
        whole.open()
        slab = torch.zeros(64, dtype=torch.uint8)
        assert whole.register_slabs([slab]).is_ok()
        meta.values[KEY] = dump_membership(membership("b", "c", version=2))
        whole.refresh()
        from kvcache_factory.connector import MemoryRegion

        assert [(await whole.put(name, MemoryRegion(slab, 8, 8))).error_code for name in keys(20)] == [
            StatusCodes.OK
        ] * 20
        whole.close()
        servers.wipe("a:1", "b:1", "c:1")

    asyncio.run(run())


@pytest.mark.parametrize("batched", [False, True])
def test_names_are_looked_up_in_a_batch(servers: Servers, monkeypatch: pytest.MonkeyPatch, batched: bool) -> None:
    """One status for each key in its order, from members that can do that in one call and from those that cannot."""
    asked: list[int] = []
    if batched:

        async def whole(verb: str, connector: Any, names: list[bytes]) -> list[Any]:
            asked.append(len(names))
            return [await getattr(connector, verb)(name) for name in names]

        monkeypatch.setattr(ServerConnector, "batched_lookups", True)
        for verb in ("exists", "delete"):
            monkeypatch.setattr(
                ServerConnector, f"m{verb}", lambda self, names, v=verb: whole(v, self, names), raising=False
            )

    async def run() -> None:
        connector = cluster(servers, meta_of(membership("a", "b", "-")))
        connector.open()
        names = keys(30)
        put = await put_all(connector, names[:20])
        expected = [code is StatusCodes.OK for code in put] + [False] * 10
        assert [s.is_ok() for s in await connector.mexists(names)] == expected
        assert all(s.is_ok() for s in await connector.mdelete(names[:5]))
        assert [s.is_ok() for s in await connector.mexists(names)] == [False] * 5 + expected[5:]
        servers.dead.add("a:1")
        mine = [n for n, o in zip(names, owners_of(names), strict=True) if o == "a:1"]
        assert {s.error_code for s in await connector.mexists(mine)} == {StatusCodes.NOT_FOUND}
        assert len(await connector.mexists([])) == 0
        connector.close()

    asyncio.run(run())
    assert bool(asked) == batched


def owners_of(names: list[bytes]) -> list[str]:
    """Owners where every third slot has none."""
    members = membership("a", "b", "-")
    return [members.nodes[i].place if i >= 0 else "-" for i in SimplePlacement(members).owners_of(names)]


def test_misuse_is_told() -> None:
    """No key, an unknown placement, from_envs: ConfigErrors that say what to do."""
    for arguments in (("",), (KEY, 30.0, "RANDOM")):
        with pytest.raises(ConfigError):
            ClusterConnector(Servers("x").make, ConnectorFeature(), MemoryMeta, *arguments)
    with pytest.raises(ConfigError, match="meta_service"):
        ClusterConnector.from_envs("id", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="meta_service"):
        ClusterConnector.from_options("id", None, None)  # type: ignore[arg-type]
