"""The remote level: what is written when, what is asked for, and that nothing comes back unproven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.engine.remote_harness import SHARE, SPEC, TOKENS, RemoteCache, caches

from kvcache_factory import CPUBackend, DiskBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.block.envelope import Fidelity
from kvcache_factory.connector import mock
from kvcache_factory.engine.ledger import Event
from kvcache_factory.manager import CacheManager
from kvcache_factory.testing import sized_level


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens caches, checks and closes them."""
    with caches() as make:
        yield make


@pytest.mark.parametrize(
    ("ingestion", "counts"), [("all", (8, 8, 8)), ("hot", (0, 8, 8)), ("evicted", (0, 0, 0))], ids=lambda x: str(x)
)
def test_what_is_written_when(opened: Any, ingestion: str, counts: tuple[int, int, int]) -> None:
    """After a save of eight blocks, a first read and a second one; EVICTED then writes exactly what leaves."""
    cache = opened(ingestion=ingestion)
    assert cache.save(TOKENS) == 8
    found = [len(cache.settled())]
    for _ in range(2):
        assert cache.load(TOKENS) == [0] * 8
        found.append(len(cache.settled()))
    assert tuple(found) == counts
    if ingestion == "evicted":
        assert cache.manager.evict(3) == 3
        assert len(cache.settled()) == 3
        assert cache.manager._ledger.total(Event.EVICTED, "cpu", "kept_below").blocks == 3
    assert cache.total(Event.STORED) == len(cache.settled())


def test_blocks_that_leave_in_the_background_are_written(opened: Any) -> None:
    """EVICTED: a tier that fills up writes what it lets go, and loses nothing of it."""
    cache = opened(sized_level(20, SPEC), ingestion="evicted")
    for first in range(0, 20, 5):
        cache.save([1000 * first + i for i in range(20)])
        cache.settled()
    left = cache.manager._ledger.total(Event.EVICTED, "cpu").blocks
    assert left > 0
    assert left == len(cache.settled()) == cache.manager._ledger.total(Event.EVICTED, "cpu", "kept_below").blocks


@pytest.mark.parametrize("connector", [{}, {"use_rdma": True, "use_mput_mget": True}], ids=str)
def test_blocks_that_a_save_drives_out_are_written(opened: Any, connector: dict[str, bool]) -> None:
    """EVICTED, at once and without waiting for the store: what left is there, and comes back byte for byte."""
    cache = opened(sized_level(8, SPEC), ingestion="evicted", connector=connector)
    conversations = [[1000 * n + i for i in range(32)] for n in range(3)]
    for tokens in conversations:
        assert cache.save(tokens) == 8
        cache.settled()  # background demotion holds blocks for a moment, which a save would find fewer for
    left = cache.manager._ledger.total(Event.EVICTED, "cpu").blocks
    held = cache.manager._chain.tiers[0].index.ready
    assert left + held == 24
    assert len(cache.there()) == left == cache.total(Event.STORED)
    reader = opened(connector=connector)
    for tokens in conversations[:2]:
        reader.fetch(tokens)
        assert reader.load(tokens) == [0] * 8


def test_a_save_never_drives_out_what_it_builds_on(opened: Any) -> None:
    """The beginning of a conversation stays while its end is stored."""
    cache = opened(sized_level(10, SPEC), ingestion="evicted")
    cache.save([7] * 16)
    cache.save(TOKENS[:16])
    assert cache.save(TOKENS) == 4
    assert cache.load(TOKENS) == [0] * 8


@pytest.mark.parametrize("builder", ["ROLLING_HASH", "RAW"])
def test_what_is_purged_on_its_way_out_does_not_stay(
    opened: Any, monkeypatch: pytest.MonkeyPatch, builder: str
) -> None:
    """It left memory before it was written; its session ends meanwhile."""
    cache = opened(sized_level(8, SPEC), ingestion="evicted", manager={"key_builder": builder})
    cache.manager.create_session("secret")
    cache.save(TOKENS, session="secret")
    put, ended = cache.level.store.put, list[str]()

    def purging(*args: Any, **options: Any) -> Any:
        cache.manager._keeper.end("secret", purge=True)  # as a thread of the engine would, at this moment
        ended.append("secret")
        return put(*args, **options)

    monkeypatch.setattr(cache.level.store, "put", purging)
    cache.save([7] * 32)
    there = {name.split(b"/", 2)[2] for name in cache.settled()}
    assert ended
    assert cache.total(Event.STORED), "what was on its way was written, and deleted behind that"
    chain = cache.space.chain(TOKENS)
    assert not {chain.name(i) if builder == "RAW" else chain.key_bytes(i).hex().encode() for i in range(8)} & there


@pytest.mark.parametrize("connector", [{}, {"use_mput_mget": True}, {"use_rdma": True}], ids=str)
@pytest.mark.parametrize("builder", ["ROLLING_HASH", "SIMPLE_HASH", "RAW"])
def test_another_manager_finds_what_one_has_stored(opened: Any, connector: dict[str, bool], builder: str) -> None:
    """Through the remote level alone: asked ahead of the match, then as good as its own."""
    first = opened(ingestion="all", connector=connector, manager={"key_builder": builder})
    first.save(TOKENS)
    assert len(first.settled()) == 8
    second = opened(ingestion="all", connector=connector, manager={"key_builder": builder}, op_batch=3)
    assert second.load(TOKENS) == []
    second.fetch()
    assert second.load(TOKENS) == [0] * 8
    assert second.total(Event.HIT) == 8
    assert len(second.settled()) == 8
    assert second.total(Event.STORED) == 0, "what came from there need not be written again"


@pytest.mark.parametrize(("chunk_tokens", "batches"), [(0, [8]), (1, [4, 4]), (24, [6, 2]), (1000, [8])])
def test_a_chunk_bounds_batches(
    opened: Any, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, batches: list[int]
) -> None:
    """CHUNK_SIZE: in tokens, rounded down to blocks of four, at least four of them; the other bound is op_batch."""
    cache = opened(ingestion="all", manager={"chunk_tokens": chunk_tokens})
    asked: dict[str, list[int]] = {"put": [], "get": []}
    for verb, sizes in asked.items():
        call = getattr(cache.level.store, verb)

        def counting(names: Any, *args: Any, call: Any = call, sizes: list[int] = sizes, **more: Any) -> Any:
            sizes.append(len(names))
            return call(names, *args, **more)

        monkeypatch.setattr(cache.level.store, verb, counting)
    cache.save(TOKENS)
    assert len(cache.settled()) == 8
    cache.manager.evict(8)
    cache.fetch()
    assert cache.load(TOKENS) == [0] * 8
    assert asked == {"put": batches, "get": batches}


def test_names_can_be_read(opened: Any) -> None:
    """namespace/identity/key."""
    cache = opened(ingestion="all", namespace="prod")
    cache.save(TOKENS)
    space = cache.space
    chain = space.chain(TOKENS)
    identity = space.identity.digest.hex()
    assert set(cache.settled()) == {f"prod/{identity}/{chain.key_bytes(i).hex()}".encode() for i in range(8)}


def test_raw_names_are_the_records(opened: Any) -> None:
    """With RAW, the key chain's own external name follows the head."""
    cache = opened(ingestion="all", manager={"key_builder": "RAW"})
    cache.save(TOKENS)
    chain = cache.space.chain(TOKENS)
    assert {name.split(b"/", 2)[2] for name in cache.settled()} == {chain.name(i) for i in range(8)}


def test_the_rest_of_a_chain_is_asked_for(opened: Any) -> None:
    """What memory has is not asked for again; only the leading run of what is there counts."""
    first = opened(ingestion="all")
    first.save(TOKENS)
    names = list(first.settled())
    second = opened(ingestion="hot")
    second.save(TOKENS[:8])
    del first.there()[names[6]]
    second.fetch()
    assert second.load(TOKENS) == [0] * 6
    assert (second.total(Event.ASKED), second.total(Event.HIT), second.total(Event.MISS)) == (6, 4, 2)
    assert second.total(Event.MISS, "absent") == 2


@pytest.mark.parametrize(("blocks", "ratio", "asked"), [(4, 0.1, 0), (3, 0.1, 3), (3, 0.5, 0), (0, 0.0, 3)])
def test_a_second_get_must_be_worth_it(opened: Any, blocks: int, ratio: float, asked: int) -> None:
    """Three of eight blocks are missing: asked for only past both thresholds."""
    opened(ingestion="all").save(TOKENS)
    cache = opened(double_get_blocks=blocks, double_get_ratio=ratio)
    cache.save(TOKENS[:20])
    cache.fetch()
    assert cache.total(Event.ASKED) == asked


def test_without_a_cache_in_memory_blocks_pass_through(opened: Any) -> None:
    """Staging: a few batches of blocks, first in first out; no threshold, as there is nothing to get first."""
    cache = opened(CPUBackend(staging=True, size_gb=0.0001), ingestion="all", op_batch=2)
    tier = cache.manager._chain.tiers[0]
    assert tier.index.capacity == 16
    assert tier.budget_bytes <= 64 << 20
    cache.save(TOKENS)
    assert len(cache.settled()) == 8
    for first in range(3):
        cache.save([1000 * first + i for i in range(32)])
        cache.settled()
    assert cache.load(TOKENS) == []
    cache.fetch()
    assert cache.load(TOKENS) == [0] * 8
    cache.fetch(TOKENS[:4])
    assert cache.total(Event.HIT) == 8


@pytest.mark.parametrize("connector", [{}, {"use_gdr_put": True, "use_gdr_get": True}], ids=str)
@pytest.mark.parametrize("ingestion", ["all", "hot"])
def test_a_device_tier_goes_by_way_of_host_memory_or_gdr(opened: Any, connector: Any, ingestion: str) -> None:
    """A tier of payloads only: images are put together in transit, or header and payload are two regions."""
    first = opened(sized_level(64, SPEC, device=True), ingestion=ingestion, connector=connector)
    first.save(TOKENS)
    first.load(TOKENS)
    assert len(first.settled()) == 8
    assert {len(value) for value in first.there().values()} == {SPEC.slot_bytes}
    second = opened(sized_level(64, SPEC, device=True), ingestion=ingestion, connector=connector)
    second.fetch()
    assert second.load(TOKENS) == [0] * 8
    third = opened()
    third.fetch()
    assert third.load(TOKENS) == [0] * 8


def test_below_a_disk_it_is_fed_from_memory(opened: Any, tmp_path: Any) -> None:
    """Memory, disk and remote: both get what is stored, and what comes from afar goes to the disk as well."""
    disk = [DiskBackend(str(tmp_path / name), size_gb=0.01, segment_mb=1) for name in "ab"]
    first = opened(sized_level(64, SPEC), disk[0], ingestion="all")
    first.save(TOKENS)
    assert len(first.settled()) == 8
    assert first.manager._chain.tiers[1].index.ready == 8
    second = opened(sized_level(64, SPEC), disk[1], ingestion="all")
    second.fetch()
    assert second.settled()
    assert second.manager._chain.tiers[1].index.ready == 8
    second.manager.evict(8)
    assert second.load(TOKENS) == [0] * 8


def damage(cache: RemoteCache, number: int, at: int, mask: int = 0xFF) -> None:
    """Change one byte of the value of block *number*."""
    name = next(n for n in cache.there() if n.endswith(cache.space.chain(TOKENS).key_bytes(number).hex().encode()))
    value = bytearray(cache.there()[name])
    value[at] ^= mask
    cache.there()[name] = bytes(value)


@pytest.mark.parametrize(("at", "reason"), [(-5000, "payload_checksum"), (0, "header_magic"), (40, "header_checksum")])
def test_a_damaged_value_is_a_miss_and_deleted(opened: Any, at: int, reason: str) -> None:
    """What comes before it is used; it is counted, and not offered to anybody again."""
    first = opened(ingestion="all")
    first.save(TOKENS)
    first.settled()
    damage(first, 5, at if at >= 0 else SPEC.header_bytes + 7)
    cache = opened()
    cache.fetch()
    assert cache.load(TOKENS) == [0] * 5
    assert cache.total(Event.LOAD_FAILED, reason) == 3
    assert len(cache.settled()) == 7
    assert cache.total(Event.DROPPED, "deleted") == 1


@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize("connector", [{}, {"use_mput_mget": True}, {"use_gdr_get": True}], ids=str)
def test_counts_do_not_depend_on_how_a_batch_is_cut(opened: Any, blocks: int, connector: Any) -> None:
    """Images are proven piece by piece: a damaged one costs itself and what is behind it in its batch."""

    def cut(level: Any) -> None:
        level.store.settings = msgspec.structs.replace(level.store.settings, piece_bytes=blocks * SPEC.slot_bytes)

    memory = [sized_level(64, SPEC, device=True)] if connector.get("use_gdr_get") else []
    first = opened(*memory, ingestion="all", connector=connector, prepare=cut)
    first.save(TOKENS)
    assert len(first.settled()) == 8
    damage(first, 5, SPEC.header_bytes + 7)
    cache = opened(*memory, connector=connector, prepare=cut)
    cache.fetch()
    assert cache.load(TOKENS) == [0] * 5
    assert cache.total(Event.LOAD_FAILED, "payload_checksum") == 3
    assert (cache.total(Event.HIT), cache.total(Event.MISS)) == (5, 3)
    assert len(cache.settled()) == 7


def test_a_foreign_value_is_a_miss_and_deleted(opened: Any) -> None:
    """A sound image of another block under this name, or a value of another size: neither served nor kept."""
    first = opened(ingestion="all")
    first.save(TOKENS)
    names = list(first.settled())
    first.there()[names[2]] = first.there()[names[1]]
    first.there()[names[4]] = b"short"
    cache = opened()
    cache.fetch()
    assert cache.load(TOKENS) == [0] * 2
    assert (cache.total(Event.LOAD_FAILED, "key"), cache.total(Event.LOAD_FAILED, "invalid")) == (2, 1)
    assert {names[2], names[4]}.isdisjoint(cache.settled())


def test_a_value_that_is_not_exact_is_a_miss_and_stays(opened: Any) -> None:
    """Somebody who takes approximations may use it."""
    first = opened(ingestion="all")
    first.save(TOKENS, fidelity=Fidelity.APPROXIMATE)
    assert len(first.settled()) == 8
    cache = opened()
    cache.fetch()
    assert cache.load(TOKENS) == []
    assert cache.total(Event.LOAD_FAILED, "not_exact") == 8
    assert len(cache.settled()) == 8


@pytest.mark.parametrize("builder", ["ROLLING_HASH", "RAW"])
def test_what_is_dropped_is_deleted_there(opened: Any, builder: str) -> None:
    """drop, reset and the purge of a session; the end of a session alone leaves to others what others may use."""
    cache = opened(ingestion="all", manager={"key_builder": builder})
    cache.save(TOKENS)
    assert len(cache.settled()) == 8
    cache.space.drop(cache.space.chain(TOKENS), 5)
    assert len(cache.settled()) == 5
    cache.manager.create_session("kept")
    cache.manager.create_session("purged")
    for session, first in (("kept", 500), ("purged", 600)):
        cache.save(range(first, first + 16), session=session)
    assert len(cache.settled()) == 13
    cache.manager.destroy_session("kept")
    assert len(cache.settled()) == 13
    cache.manager.destroy_session("purged", purge=True)
    assert len(cache.settled()) == 9
    mock._shared[SHARE][b"of somebody else"] = b""
    cache.manager.reset()
    assert list(cache.settled()) == [b"of somebody else"]


def test_a_block_that_was_dropped_while_it_was_written_does_not_stay(opened: Any, monkeypatch: Any) -> None:
    """Whoever dropped it could not see the copy yet."""
    cache = opened(ingestion="all")
    level = cache.level
    put = level.store.put

    def dropping(*args: Any, **options: Any) -> Any:
        done = put(*args, **options)
        for tier in cache.manager._chain.tiers:
            tier.drop(tier.index.rows_of(cache.space.chain(TOKENS).keys[6:]), "asked")
        return done

    monkeypatch.setattr(level.store, "put", dropping)
    cache.save(TOKENS)
    assert len(cache.settled()) == 6


def test_tokens_in_flight_are_bounded(opened: Any, monkeypatch: Any) -> None:
    """The first blocks are written as far as the cap allows, the others counted; it is free again afterwards."""
    cache = opened(ingestion="all", max_inflight_tokens=16)
    cache.save(TOKENS)
    assert len(cache.settled()) == 4
    assert cache.total(Event.NOT_STORED, "inflight_full") == 4
    cache.save([7] * 16)
    assert len(cache.settled()) == 8
    cache.save([*TOKENS, *range(900, 916)])  # the next turn: what was left out comes first
    assert len(cache.settled()) == 12
    assert cache.manager.state()["remote"]["tokens_in_flight"] == 0
    cache.level.writes.tokens_in_flight = 14  # no room for a block
    cache.save([8] * 16)
    assert len(cache.settled()) == 12


def test_strict_sync_waits_until_it_is_written(opened: Any) -> None:
    """The documented meaning of 0 tokens in flight, for who wants it to the letter."""
    cache = opened(ingestion="all", strict_sync=True)
    cache.save(TOKENS)
    assert len(cache.there()) == 8


def test_the_state_tells_of_the_level(opened: Any) -> None:
    """Level, breaker, what is in flight, and the counts in the events."""
    cache = opened(ingestion="all")
    cache.save(TOKENS)
    cache.settled()
    state = cache.manager.state()
    remote = state["remote"]
    assert (remote["tier"], remote["connector"], remote["ingestion"]) == ("remote", "MOCK", "all")
    assert (remote["breaker"], remote["operations_in_flight"], remote["abandoned_blocks"]) == ("closed", 0, 0)
    assert {"tier": "remote", "event": "stored", "reason": "", "times": 1, "blocks": 8}.items() <= next(
        row.items() for row in state["events"] if row["tier"] == "remote" and row["event"] == "stored"
    )
    assert opened(sized_level(4, SPEC)).manager.state()["remote"]["breaker"] == "closed"


def test_operations_are_timed(opened: Any) -> None:
    """With metrics, each kind of call has a histogram of its own."""
    cache = opened(ingestion="all", manager={"enable_metrics": True})
    cache.save(TOKENS)
    cache.settled()
    cache.manager.evict(8)
    cache.fetch()
    cache.space.drop(cache.space.chain(TOKENS))
    cache.settled()
    timed = {row["operation"]: row["count"] for row in cache.manager.state()["durations"] if row["tier"] == "remote"}
    assert timed == {"put": 1, "exists": 1, "get": 1, "delete": 1}


def test_a_manager_with_a_remote_level_is_data() -> None:
    """Description and configuration are the same thing; nothing connects."""
    backend = HierarchicalBackend([CPUBackend(size_gb=1), RemoteBackend(connector="mock", options={"share": "x"})])
    data = CacheManager(backend).to_config()
    assert msgspec.json.decode(msgspec.json.encode(data)) == data
    assert CacheManager.from_config(data).to_config() == data
