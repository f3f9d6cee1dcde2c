"""Sessions that requests name: accounted, and bounded in number."""

from __future__ import annotations

import pytest

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.integration.vllm import owner as module
from kvcache_factory.integration.vllm.owner import Owner


def ids(manager: CacheManager) -> set[str]:
    return {row["session"] for row in manager.state()["sessions"]}


def test_of_too_many_sessions_the_one_not_named_for_longest_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever clients name, the book does not grow beyond its bound, and who still asks is accounted."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    manager = CacheManager(backend=CPUBackend(size_gb=0.01))
    owner = Owner(manager, owned=True)
    assert [owner.know(name) for name in ("a", "b", "c", "a", "d")] == [0, 0, 0, 0, 1]
    assert ids(manager) == {"a", "c", "d"}
    assert owner.know("b") == 1
    assert ids(manager) == {"a", "b", "d"}


def test_sessions_of_a_manager_that_was_handed_over_are_its_owners() -> None:
    """Naming one makes none."""
    manager = CacheManager(backend=CPUBackend(size_gb=0.01))
    assert Owner(manager, owned=False).know("a") == 0
    assert ids(manager) == set()


def test_a_session_that_ended_can_be_named_again() -> None:
    """``destroy_session`` from the process that attached reaches it, and a later request makes it anew."""
    manager = CacheManager(backend=CPUBackend(size_gb=0.01))
    owner = Owner(manager, owned=True)
    owner.know("a")
    assert owner.forget("a")
    assert ids(manager) == set()
    owner.know("a")
    assert ids(manager) == {"a"}
