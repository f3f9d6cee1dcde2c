"""From variables to blocks that come back: every connector that is real here, each with its own variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.servers import redis_server

from kvcache_factory import OffloadingManager
from kvcache_factory.environment import PREFIX
from kvcache_factory.manager import CacheManager
from kvcache_factory.testing import tiny_identity, tiny_spec

SPEC = tiny_spec()
SHAPE = (SPEC.num_layers, 2, 4, SPEC.num_kv_heads, SPEC.head_dim)
BLOCKS = [torch.arange(192.0).reshape(SHAPE) + i for i in range(10)]
COMMON = {
    "L1_CACHE_CAPACITY_GB": "0.01",
    "L2_CACHE_INGESTION_TYPE": "ALL",
    "L2_CACHE_OP_BATCH": "4",
    "L2_CACHE_PER_TOKEN_TIMEOUT_MS": "60000",  # a busy machine must not lose a write by its deadline
}


@contextmanager
def variables(backend: str, directory: Path) -> Iterator[dict[str, str]]:
    """What a deployment of this backend sets."""
    if backend == "REDIS":
        with redis_server() as server:
            yield {"L2_CACHE_BACKEND": "REDIS", "REDIS_URL": server.url}
    else:
        yield {"L2_CACHE_BACKEND": backend.lower(), f"{backend}_ROOT": str(directory / "kv")}


@pytest.mark.parametrize("builder", ["ROLLING_HASH", "SIMPLE_HASH", "RAW"])
@pytest.mark.parametrize("backend", ["REDIS", "ROCKSDB", "SHFS"])
def test_what_one_manager_wrote_another_one_reads(backend: str, builder: str, tmp_path: Path) -> None:
    """Ten blocks, in batches of four, under each key builder; a namespace keeps others' blocks apart."""
    if backend == "ROCKSDB":
        pytest.importorskip("rocksdict", reason="rocksdict is not installed (pip install 'kvcache-factory[rocksdb]')")
    with variables(backend, tmp_path) as own:
        given = {**COMMON, "L2_CACHE_KEY_BUILDER": builder, **own}

        def cache(**more: str) -> OffloadingManager:
            environ = {PREFIX + name: value for name, value in {**given, **more}.items()}
            return OffloadingManager(SPEC, tiny_identity(SPEC), CacheManager.from_env(environ), max_wait_s=60)

        with cache() as writer, writer.manager:
            assert writer.put(None, range(40), BLOCKS).get() == 40
            assert writer.flush(60).is_ok()
        with cache() as reader, reader.manager:
            landing = [torch.zeros(SHAPE) for _ in BLOCKS]
            assert reader.get(None, range(40), landing).get() == 40
            assert all(map(torch.equal, landing, BLOCKS))
        with cache(L2_CACHE_NAMESPACE="others") as stranger, stranger.manager:
            assert stranger.exists(None, range(40)).is_not_found()


def test_noop_accepts_everything_and_has_nothing() -> None:
    """MOCK_USE_NOOP: puts are accepted, gets miss; memory above serves on."""
    given = {**COMMON, "L2_CACHE_BACKEND": "MOCK", "MOCK_USE_NOOP": "1"}
    environ = {PREFIX + name: value for name, value in given.items()}
    with CacheManager.from_env(environ) as manager:
        cache = OffloadingManager(SPEC, tiny_identity(SPEC), manager)
        assert cache.put(None, range(40), BLOCKS).get() == 40
        assert cache.flush(60).is_ok()
        assert cache.exists(None, range(40)).get() == 40
        assert manager.evict(10) == 10
        assert cache.exists(None, range(40)).is_not_found()
