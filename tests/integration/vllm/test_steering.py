"""What the process that attached a manager does to sessions happens in the engine's process: over the real socket."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.errors import ConfigError
from kvcache_factory.integration.vllm.control import Client, Door, Server
from kvcache_factory.integration.vllm.owner import Owner
from kvcache_factory.integration.vllm.remote import handlers
from kvcache_factory.integration.vllm.settings import Settings
from kvcache_factory.testing import SmallCache, small_cache

A = list(range(16))


@pytest.fixture
def engine() -> Iterator[tuple[SmallCache, Client]]:
    """A cache as an engine's process owns it, behind its socket."""
    cache = small_cache(64)
    connector: Any = SimpleNamespace(awake=True, scheduler=SimpleNamespace(owner=Owner(cache.manager, owned=True)))
    door = Door()
    server = Server(str(door.path), handlers(connector, Settings()))
    yield cache, Client(str(door.path))
    server.close()
    cache.manager.close()


@pytest.fixture
def parent(engine: tuple[SmallCache, Client]) -> Iterator[CacheManager]:
    """The manager that steers it, which has had a session before."""
    manager = CacheManager(CPUBackend(size_gb=1))
    manager.create_session("before", labels={"tenant": "acme"})
    manager.follow(engine[1])
    yield manager
    manager.close()


def test_sessions_are_made_under_the_same_rules(engine: tuple[SmallCache, Client], parent: CacheManager) -> None:
    """Those from before the engine came too; quota, time to live, labels, pin and what happens at the quota."""
    there = engine[0].manager
    assert there.session("before").labels == {"tenant": "acme"}
    parent.create_session("s", quota_gb=0.5, ttl_s=60, labels={"route": "chat"}, pin=True, on_quota="refuse")
    stats = there.session("s").stats()
    assert (stats["ttl_s"], stats["labels"], stats["pinned"], stats["on_quota"]) == (
        60,
        {"route": "chat"},
        True,
        "refuse",
    )
    assert stats["tier_quota_bytes"] == {"cpu": stats["quota_bytes"]} == {"cpu": 1 << 29}
    parent.pin_session("s", False)
    assert not there.session("s").pinned
    parent.destroy_session("s")
    assert not there.has_session("s")


def test_what_is_said_of_a_session_s_return_reaches_the_engine(engine: tuple[SmallCache, Client]) -> None:
    """Said before the engine came, and after; of a session that has ended, nothing is said any more."""
    there = engine[0].manager
    manager = CacheManager(CPUBackend(size_gb=1))
    manager.create_session("before").reuse_hint = "tool_pending"
    manager.follow(engine[1])
    assert there.session("before").reuse_hint == "tool_pending"
    session = manager.create_session("s")
    session.reuse_hint = "ended"
    assert there.session("s").reuse_hint == "ended"
    with pytest.raises(ConfigError, match="tool_pending"):
        session.reuse_hint = "perhaps"  # type: ignore[assignment]
    assert there.session("s").reuse_hint == "ended"
    manager.destroy_session("s")
    session.reuse_hint = "returns"
    assert not there.has_session("s")
    manager.close()


def test_a_fork_and_its_figures(engine: tuple[SmallCache, Client], parent: CacheManager) -> None:
    """The blocks are over there, and so are the figures."""
    cache, client = engine
    cache.save(A, session="before")
    parent.fork_session("before", "try")
    stats = client.ask("session_stats", "try")
    assert (stats["blocks"], stats["labels"]) == (4, {"tenant": "acme"})
    assert client.ask("session_stats", "nobody") is None
    parent.destroy_session("before")
    assert cache.load(A) == [0] * 4
    parent.destroy_session("try")
    assert cache.load(A) == []


def test_a_session_that_the_engine_still_uses_does_not_expire(
    engine: tuple[SmallCache, Client], parent: CacheManager
) -> None:
    """Clients of a server name a session in their requests: the parent does not see that, and asks."""
    cache, _ = engine
    now = [0.0]
    for manager in (parent, cache.manager):
        manager._sessions.clock = lambda: now[0]
    parent.create_session("s", ttl_s=100)
    now[0] = 90.0
    cache.save(A, session="s")
    now[0] = 150.0
    parent.state()
    assert parent.has_session("s")
    assert cache.manager.has_session("s")
    now[0] = 200.0
    parent.state()
    assert not parent.has_session("s")
    assert not cache.manager.has_session("s")


def test_a_session_that_a_request_names_exists_again_after_it_has_expired(engine: tuple[SmallCache, Client]) -> None:
    """Whoever comes back late is a new session, not nobody."""
    cache, _ = engine
    owner = Owner(cache.manager, owned=True)
    owner.know("visitor")
    cache.manager.destroy_session("visitor")
    owner.know("visitor")
    assert cache.manager.has_session("visitor")
