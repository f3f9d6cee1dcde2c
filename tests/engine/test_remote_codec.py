"""Encoded values in a remote store: smaller there, proven here, and marked where they are lossy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.manager.test_compression import BLOCKS, MIB, SPEC, TOKENS, Cache, close_sound

from kvcache_factory import CompressionPolicy, CPUBackend, GPUBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.block.envelope import Fidelity, unpack_header
from kvcache_factory.connector import ConnectorFeature, mock
from kvcache_factory.errors import ConfigError

SHARE = "codecs"
HERE = "tests.engine.test_remote_codec"


class OneLength(mock.MockConnector):
    """As most stores are: what is got must have the length of its region."""

    shorter_values = False


class Lending(mock.MockConnector):
    """Lends memory, of one length for a batch, although values may be shorter."""

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature(zero_copy=True)


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens caches above MOCK or another connector; none may have broken an invariant when the test ends."""
    made: list[Cache] = []

    def make(codec: str | None = None, above: Any = None, policy: Any = None, **options: Any) -> Cache:
        connector = {"connector": "MOCK", "options": {"share": SHARE}, **options}
        remote = RemoteBackend(
            ingestion=connector.pop("ingestion", "all"), per_token_timeout_ms=60_000.0, max_wait_s=60.0, codec=codec,
            **connector,
        )  # fmt: skip
        memory = above or CPUBackend(size_gb=16 * MIB, huge_pages=False)
        made.append(Cache(HierarchicalBackend([memory, remote]), compression_policy=policy))
        return made[-1]

    yield make
    close_sound(made)
    mock.forget(SHARE)


def fetched(cache: Cache, tokens: Any = TOKENS) -> list[float]:
    """Ask the remote level, then load; the error of each block that came."""
    ticket = cache.space.prefetch(cache.space.chain(tokens))
    assert ticket is None or ticket.wait(60)
    return cache.load(tokens)


def values() -> list[bytes]:
    return list(mock._shared[SHARE].values())


@pytest.mark.parametrize("where", ["mock", "mock_batches", "mock_rdma", "SHFS"])
def test_a_lossless_codec_makes_values_smaller_and_changes_no_byte(opened: Any, tmp_path: Path, where: str) -> None:
    """Another manager reads them, with a codec or without; values take whole pages, and fewer than the slots."""
    flags = {"mock": {}, "mock_batches": {"use_mput_mget": True}, "mock_rdma": {"use_rdma": True}}
    shfs = {"connector": "SHFS", "options": {"root": str(tmp_path), "min_free_gb": 0.0}}
    options = shfs if where == "SHFS" else {"options": {"share": SHARE, **flags[where]}}
    writer = opened("bf16x", **options)
    assert writer.save(TOKENS) == BLOCKS
    assert writer.count("encoded", "bf16x") == BLOCKS
    if where == "SHFS":
        sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    else:
        sizes = [len(value) for value in values()]
    assert len(sizes) == BLOCKS
    assert all(SPEC.header_bytes < size <= 0.8 * SPEC.slot_bytes and size % 4096 == 0 for size in sizes)
    for codec in (None, "bf16x", "int8"):
        assert fetched(opened(codec, **options)) == [0.0] * BLOCKS


def test_what_is_lossy_is_marked(opened: Any) -> None:
    """The first block and the last stay exact; a manager that is not lossy uses the first, and replaces the others."""
    writer = opened("int8")
    assert writer.save(TOKENS) == BLOCKS
    headers = [unpack_header(value[: SPEC.header_bytes]) for value in values()]
    assert [h.codec for h in headers] == ["raw"] + ["int8"] * (BLOCKS - 2) + ["raw"]
    assert [h.fidelity for h in headers] == [Fidelity.EXACT] + [Fidelity.BOUNDED] * (BLOCKS - 2) + [Fidelity.EXACT]
    errors = fetched(opened("int8"))
    assert errors[0] == errors[-1] == 0.0
    assert all(0 < error < 0.01 for error in errors[1:-1])
    exact = opened(None)
    assert fetched(exact) == [0.0]
    assert len(values()) == BLOCKS
    exact.save(TOKENS)
    assert fetched(opened(None)) == [0.0] * BLOCKS


def test_the_end_of_a_chain_is_written_again_when_it_has_aged(opened: Any) -> None:
    """Exact while it is the end, encoded once others follow; nothing is written a third time."""
    writer = opened("int8")
    for blocks, stored in ((3, 3), (4, 5), (9, 11), (BLOCKS, BLOCKS + 3), (BLOCKS, BLOCKS + 3)):
        writer.save(TOKENS[: blocks * 64])
        assert writer.count("stored", tier="remote") == stored
        assert writer.count("encoded", "int8") == blocks - 2
    headers = [unpack_header(value[: SPEC.header_bytes]) for value in values()]
    assert [h.codec for h in headers] == ["raw"] + ["int8"] * (BLOCKS - 2) + ["raw"]
    assert max(h.generation for h in headers) == 1


def test_what_a_lossy_codec_touched_is_not_encoded_again(opened: Any) -> None:
    """Read, then written somewhere else: generation one, as it came."""
    opened("int8").save(TOKENS)
    again = opened("int8", ingestion="hot", options={"share": SHARE})
    assert len(fetched(again)) == BLOCKS
    assert again.manager.wait(60)
    assert {unpack_header(value[: SPEC.header_bytes]).generation for value in values()} == {0, 1}


@pytest.mark.parametrize("device", [False, True], ids=["cpu", "gpu"])
def test_memory_above_may_be_encoded(opened: Any, device: bool) -> None:
    """Blocks that shrank in memory are decoded on their way out, and say what they are."""
    memory = GPUBackend(device="cpu", size_gb=16 * MIB) if device else CPUBackend(size_gb=16 * MIB, huge_pages=False)
    policy = CompressionPolicy(method="int8", threshold_step=0, keep_recent=0)
    writer = opened(None, memory, policy, ingestion="hot", hot_hits=2)
    writer.save(TOKENS)
    assert writer.tier()["encoded_blocks"] == BLOCKS - 1
    assert values_after(writer, 2) == BLOCKS
    headers = [unpack_header(value[: SPEC.header_bytes]) for value in values()]
    assert {h.codec for h in headers} == {"raw"}
    assert sorted(h.fidelity for h in headers) == [Fidelity.EXACT] + [Fidelity.BOUNDED] * (BLOCKS - 1)
    reader = opened(None, memory, policy)
    assert all(error < 0.01 for error in fetched(reader))
    assert reader.count("hit") >= BLOCKS


def test_what_a_write_held_is_encoded_in_memory_after_it(opened: Any) -> None:
    """Blocks are on their way out when they could be encoded; they are, once the last batch has ended."""
    memory = CPUBackend(size_gb=16 * MIB, huge_pages=False)
    writer = opened(None, memory, CompressionPolicy(method="int8", threshold_step=0, keep_recent=0))
    flow, level = writer.manager._chain.flow, writer.manager._chain.remote
    put, encode, tried = level.writes._put, flow._encode, threading.Event()

    def late(*args: Any) -> Any:
        assert tried.wait(60)
        return put(*args)

    def try_first(number: int) -> None:
        encode(number)
        tried.set()

    level.writes._put, flow._encode = late, try_first
    writer.save(TOKENS)
    assert writer.tier()["encoded_blocks"] == BLOCKS - 1
    assert len(values()) == BLOCKS


def values_after(cache: Cache, loads: int) -> int:
    for _ in range(loads):
        cache.load(TOKENS)
    assert cache.manager.wait(60)
    return len(values())


def test_what_leaves_is_encoded_on_its_way(opened: Any) -> None:
    """EVICTED: copied while the engine waits, encoded afterwards."""
    cache = opened("bf16x", ingestion="evicted")
    cache.save(TOKENS)
    assert cache.manager.evict(5) == 5
    assert cache.manager.wait(60)
    assert [unpack_header(value[: SPEC.header_bytes]).codec for value in values()] == ["bf16x"] * 5
    assert fetched(cache) == [0.0] * BLOCKS


def test_gdr_gives_way_to_a_codec(opened: Any) -> None:
    """An image in two places has one length: it is encoded in host memory, and read there by whoever has no GDR."""
    memory = GPUBackend(device="cpu", size_gb=16 * MIB)
    gdr = {"share": SHARE, "use_gdr_put": True, "use_gdr_get": True}
    opened("bf16x", memory, options=gdr).save(TOKENS)
    assert max(map(len, values())) < SPEC.slot_bytes
    assert fetched(opened(None, memory, options=gdr)) == []
    assert len(values()) == BLOCKS, "it could not be read here, which says nothing against it"
    assert fetched(opened(None, memory)) == [0.0] * BLOCKS


def test_a_damaged_encoded_value_is_a_miss_and_deleted(opened: Any) -> None:
    """Cut off or changed: what comes before it is used."""
    opened("bf16x").save(TOKENS)
    names = list(mock._shared[SHARE])
    kept = mock._shared[SHARE][names[7]]
    mock._shared[SHARE][names[7]] = kept[:-8192] + bytes(4096)
    cache = opened("bf16x")
    assert fetched(cache) == [0.0] * 7
    assert cache.count("load_failed", "payload_checksum") == BLOCKS - 7
    assert cache.manager.wait(60)
    assert names[7] not in mock._shared[SHARE]


def test_a_connector_whose_values_have_one_length_takes_no_codec(opened: Any) -> None:
    """Said when it is opened, with what to use instead."""
    for name in ("OneLength", "Lending"):
        with pytest.raises(ConfigError, match="one length"):
            opened("bf16x", connector=f"{HERE}:{name}")
