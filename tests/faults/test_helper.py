"""A level whose client freezes and crashes: its helper dies, the engine goes on, and no buffer is lost.

With a STAND-IN for the package priskv, which misbehaves as the real one was seen to do.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.connector.conftest import standins  # noqa: F401  # a fixture
from tests.engine.remote_harness import RemoteCache
from tests.faults.test_redis import Load, closed, hits, opened, state
from tests.servers import until

from kvcache_factory import CPUBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.engine.ledger import Event
from kvcache_factory.manager import CacheManager
from kvcache_factory.memory.shared import SharedSlab
from kvcache_factory.testing import FakeEngine, sized_level, tiny_identity, tiny_spec

SPEC = tiny_spec()


def cache_over_helper(shared: bool, **options: Any) -> RemoteCache:
    """A cache above PRISKV with a deadline of half a second, in memory that the helper maps, or does not."""
    size_gb = sized_level(64, SPEC).size_gb  # type: ignore[union-attr]
    remote = RemoteBackend(
        connector="PRISKV",
        options={"timeout_s": 0.5, **options},
        ingestion="all",
        per_token_timeout_ms=60_000.0,
        max_wait_s=2.0,
        double_get_blocks=0,
        double_get_ratio=0.0,
    )
    manager = CacheManager(HierarchicalBackend([CPUBackend(size_gb=size_gb, shared=shared), remote]))
    return RemoteCache(manager, manager.register(SPEC, tiny_identity(SPEC)), FakeEngine(SPEC, 64))


def connector_of(cache: RemoteCache) -> Any:
    store: Any = cache.level.store
    return store._connector


def running_helper(cache: RemoteCache) -> int:
    """Process id of the helper, as soon as there is one."""
    seen: list[int] = []
    until(lambda: seen.extend(filter(None, [connector_of(cache).helper_pid])) or bool(seen), "a helper")
    return seen[0]


def ended(cache: RemoteCache) -> None:
    """Nothing is lost, nothing is left."""
    assert cache.manager.wait(60)
    until(lambda: state(cache)["abandoned_blocks"] == 0, "every buffer is given back")
    assert cache.manager.check() == []
    cache.manager.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "private memory"])
def test_blocks_pass_through_a_helper(standins: Path, shared: bool) -> None:  # noqa: F811
    """Stored by one engine and loaded by another; shared memory is used in place."""
    first, second = cache_over_helper(shared), cache_over_helper(shared)
    assert isinstance(first.level.reads.source.slots, SharedSlab) is shared
    assert bool(connector_of(first)._shared) is shared
    tokens = list(range(32))
    assert first.save(tokens) == 8
    assert first.manager.wait(60)
    second.fetch(tokens)
    assert second.load(tokens) == [0] * 8
    assert second.total(Event.HIT) == 8
    for cache in (first, second):
        ended(cache)


def test_engines_go_on_while_the_client_is_frozen(standins: Path) -> None:  # noqa: F811
    """Each call freezes a helper with its interpreter's lock; later all is as before."""
    cache = cache_over_helper(shared=True)
    with Load([cache]) as load:
        load.goes_on(10)
        until(lambda: hits([cache]) > 0, "blocks come from the store")
        (standins / "FROZEN").touch()
        until(lambda: opened([cache]), "the breaker opens")
        load.goes_on(20)
        (standins / "FROZEN").unlink()
        until(lambda: closed([cache]), "the breaker closes by itself")
        before = hits([cache])
        until(lambda: hits([cache]) > before, "blocks come from the store again")
    ended(cache)


def test_a_helper_that_is_killed_is_replaced(standins: Path) -> None:  # noqa: F811
    """kill -9 of the helper under load, three times."""
    cache = cache_over_helper(shared=True)
    with Load([cache]) as load:
        for _ in range(3):
            with suppress(ProcessLookupError):  # it may be one that is being replaced
                os.kill(running_helper(cache), signal.SIGKILL)
            load.goes_on(10)
        until(lambda: closed([cache]), "the breaker is closed")
        before = hits([cache])
        until(lambda: hits([cache]) > before, "blocks come from the store again")
    ended(cache)
