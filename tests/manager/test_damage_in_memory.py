"""Damage in memory, between a save and the way down: no new checksum and no new coding makes it good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.manager.test_compression import BLOCKS, MIB, SPEC, TOKENS, Cache, close_sound, gpu, relative_error

from kvcache_factory import CompressionPolicy, CPUBackend, DiskBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.connector import mock

SHARE = "damage"
BAD = 5


class DamagedCache(Cache):
    """One in whose memory a bit of block :data:`BAD` flips right after it was filled."""

    def __init__(self, backend: Any, **options: Any) -> None:
        super().__init__(backend, **options)
        tier = self.manager._chain.tiers[0]
        seal = tier.seal

        def damaging(rows: Any, integrity: str) -> None:
            seal(rows, integrity)
            payload = tier.store.payload(int(tier.slots_of(rows)[BAD]))
            assert payload is not None
            payload[17] ^= 4

        tier.seal = damaging  # type: ignore[method-assign]


@pytest.fixture
def opened() -> Iterator[Any]:
    made: list[Cache] = []

    def make(kind: type[Cache], backend: Any, **options: Any) -> Cache:
        made.append(kind(backend, **options))
        return made[-1]

    yield make
    close_sound(made)
    mock.forget(SHARE)


def loaded(cache: Cache) -> int:
    """Blocks that a request gets, which a match may have promised more of; they are what was saved, within 1 %."""
    chain = cache.space.chain(TOKENS)
    cache.here.compute(chain)
    match = cache.space.match(chain, "r")
    count: int = cache.space.load(match, cache.there.region, cache.there.positions(match.blocks))
    cache.space.release("r")
    errors = [relative_error(cache.here.block(i), cache.there.block(i)) for i in range(count)]
    assert max(errors) < 0.01
    return count


def remote(codec: str | None, **options: Any) -> RemoteBackend:
    return RemoteBackend(
        connector="MOCK", options={"share": SHARE}, per_token_timeout_ms=60_000.0, max_wait_s=60.0, codec=codec,
        **{"ingestion": "all", **options},
    )  # fmt: skip


def memory() -> CPUBackend:
    return CPUBackend(size_gb=64 * SPEC.slot_bytes / 2**30, huge_pages=False)


@pytest.mark.parametrize("codec", [None, "bf16x", "int8"])
@pytest.mark.parametrize("way", ["remote", "leaving", "device", "disk"])
def test_what_memory_damaged_is_a_miss_for_everybody_below(
    opened: Any, tmp_path: Path, way: str, codec: str | None
) -> None:
    """Images have the checksums of what was saved: readers use what is before the block, and not the block."""
    options: dict[str, Any] = {"integrity": "full"}
    disk = DiskBackend(str(tmp_path / "disk"), size_gb=8 * MIB, segment_mb=1, codec=codec)
    above = {
        "remote": [memory(), remote(codec)],
        "leaving": [memory(), remote(codec, ingestion="evicted")],
        "device": [gpu(), remote(codec)],
        "disk": [memory(), disk],
    }[way]
    writer = opened(DamagedCache, HierarchicalBackend(above), **options)
    assert writer.save(TOKENS) == BLOCKS
    if way == "leaving":
        writer.manager.evict(BLOCKS)
        assert writer.manager.wait(60)
    if way == "disk":
        writer.manager.close()
        reader = opened(Cache, HierarchicalBackend([memory(), disk]))
    else:
        reader = opened(Cache, HierarchicalBackend([memory(), remote(codec)]))
    ticket = reader.space.prefetch(reader.space.chain(TOKENS))
    assert ticket is None or ticket.wait(60)
    assert loaded(reader) == BAD
    assert reader.count("load_failed", "payload_checksum") >= 1


def test_what_memory_damaged_is_not_encoded_there(opened: Any) -> None:
    """It stays as it is, and the next load finds it."""
    policy = CompressionPolicy(method="int8", threshold_step=50)
    cache = opened(DamagedCache, gpu(), compression_policy=policy, integrity="full")
    assert cache.save(TOKENS) == BLOCKS
    assert cache.tier()["encoded_blocks"] == BLOCKS - 3
    assert cache.count("kept_raw", "checksum") == 1
    assert loaded(cache) == BAD
    assert cache.count("load_failed", "checksum") >= 1
