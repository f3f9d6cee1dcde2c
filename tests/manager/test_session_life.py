"""Forks, pins, times to live, labels, logs: how sessions begin and end."""

from __future__ import annotations

import logging
import threading
import time
from itertools import permutations

import pytest

from kvcache_factory import (
    CacheManager,
    ClosedError,
    CPUBackend,
    LRUEvictionPolicy,
    SessionExistsError,
    SessionSettings,
    UnknownSessionError,
)
from kvcache_factory.testing import Opener, SmallCache

A = list(range(16))
B = [*range(8), 91, 92, 93, 94]


class Clock:
    """The time of a manager's sessions, in a test's hands."""

    def __init__(self, manager: CacheManager) -> None:
        self.now = 0.0
        manager._sessions.clock = self

    def __call__(self) -> float:
        return self.now


def used(cache: SmallCache) -> int:
    return cache.manager._chain.tiers[0].index.used


def names(cache: SmallCache) -> list[str]:
    return [row["session"] for row in cache.manager.state()["sessions"]]


# -- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_blocks_until_it_diverges(open_cache: Opener) -> None:
    """No block more when it is made; what each adds is its own, and what is shared lives as long as one of them."""
    cache = open_cache(32)
    cache.manager.create_session("main", labels={"tenant": "acme"}).data["said"] = [1, 2]
    cache.save(A, session="main")
    fork = cache.manager.fork_session("main", "try")
    assert used(cache) == 4
    assert fork.labels == {"tenant": "acme"}
    assert fork.data == {"said": [1, 2]}
    fork.data["said"].append(3)
    assert cache.manager.session("main").data == {"said": [1, 2]}
    cache.save([*A, 50, 51, 52, 53], session="try")
    assert [cache.manager.session(n).stats()["blocks"] for n in ("main", "try")] == [4, 5]
    assert used(cache) == 5
    cache.manager.destroy_session("main")
    assert used(cache) == 5
    cache.manager.destroy_session("try")
    assert used(cache) == 0


@pytest.mark.parametrize("order", list(permutations(["main", "try", "again"])))
def test_forks_of_forks_share_along_the_whole_line(open_cache: Opener, order: tuple[str, ...]) -> None:
    """Whoever goes first takes along what no other has; both tiers are empty after the last one."""
    cache = open_cache(32, 32)
    said = {"main": A, "try": [*A, 50, 51, 52, 53], "again": [*A, 50, 51, 52, 53, 60, 61, 62, 63]}
    cache.manager.create_session("main", labels={"tenant": "acme"}).data["said"] = [1]
    for parent, name in (("", "main"), ("main", "try"), ("try", "again")):
        if parent:
            fork = cache.manager.fork_session(parent, name)
            assert (fork.labels, fork.data) == ({"tenant": "acme"}, {"said": [1]})
            assert fork.stats()["blocks"] == len(said[parent]) // 4
        cache.save(said[name], session=name)
    cache.save([900, 901, 902, 903], session="try")
    cache.manager.wait()
    left = dict(said)
    for name in order:
        assert cache.manager.destroy_session(name) is True
        cache.manager.wait()
        del left[name]
        longest = max((len(tokens) // 4 for tokens in left.values()), default=0)
        assert [tier.index.used for tier in cache.manager._chain.tiers] == [longest + ("try" in left)] * 2
        assert cache.manager.check() == []
        for tokens in left.values():
            assert cache.load(tokens) == [0] * (len(tokens) // 4)


def test_a_fork_with_a_smaller_quota_keeps_what_was_used_last(open_cache: Opener) -> None:
    """From the beginning of the latest chain on: leading blocks are the useful ones."""
    cache = open_cache(32)
    cache.manager.create_session("main")
    cache.save([700 + t for t in A], session="main")
    cache.save(A, session="main")
    one = cache.manager.state()["tiers"][0]["block_bytes"]
    fork = cache.manager.fork_session("main", "small", quota_gb=3 * one / (1 << 30))
    assert fork.stats()["blocks"] == 3
    cache.manager.destroy_session("main")
    assert cache.load(A) == [0, 0, 0]
    assert used(cache) == 3


def test_a_fork_needs_a_source_and_a_new_name(open_cache: Opener) -> None:
    """Typed errors, and nothing is left behind."""
    manager = open_cache(4).manager
    manager.create_session("s")
    with pytest.raises(UnknownSessionError):
        manager.fork_session("nobody", "t")
    with pytest.raises(SessionExistsError):
        manager.fork_session("s", "s")
    assert not manager.has_session("t")


# -- pins -------------------------------------------------------------------------------------------------------------


def test_pins_follow_what_a_session_stores_and_go_with_it(open_cache: Opener) -> None:
    """Whatever it adds is held; after clear, destroy or reset nothing is."""
    cache = open_cache(8)
    cache.manager.create_session("s", pin=True)
    cache.save(A[:8], session="s")
    cache.save(A, session="s")
    for start in range(2, 9):
        cache.save([100 * start + t for t in A])
    assert cache.load(A) == [0] * 4
    cache.manager.clear_session("s")
    cache.save(B, session="s")
    cache.manager.reset()
    assert used(cache) == 0
    cache.save(B, session="s")
    cache.manager.destroy_session("s")
    assert used(cache) == 0


def test_pins_beyond_what_there_is_room_for_refuse_and_hang_nobody(open_cache: Opener) -> None:
    """What is pinned stays, what comes on top is not stored, whoever it is; unpinning makes room again."""
    cache = open_cache(8)
    cache.manager.create_session("kept", pin=True)
    assert [cache.save([100 * n + t for t in A], session="kept") for n in range(1, 5)] == [4, 4, 0, 0]
    assert cache.save(B) == 0
    cache.manager.create_session("other", pin=True)
    assert cache.save(B, session="other") == 0
    cache.manager.pin_session("other", True)
    assert [cache.load([100 * n + t for t in A]) for n in range(1, 4)] == [[0] * 4, [0] * 4, []]
    assert used(cache) == 8
    assert cache.manager.check() == []
    cache.manager.pin_session("kept", False)
    assert cache.save(B, session="other") == 3
    assert cache.load(B) == [0] * 3


def test_pins_beyond_a_tier_hold_in_each_what_is_there(open_cache: Opener) -> None:
    """The faster of two tiers is full of pins: what follows goes where it can, and nothing that is pinned is lost."""
    cache = open_cache(4, 32)
    cache.manager.create_session("kept", pin=True)
    for n in range(1, 5):
        cache.save([100 * n + t for t in A], session="kept")
        cache.manager.wait()
    held = [cache.space.peek(cache.space.chain([100 * n + t for t in A])) for n in range(1, 5)]
    assert held[0] == 4
    assert cache.manager.check() == []
    for n in range(5, 20):
        cache.save([100 * n + t for t in A])
    cache.manager.wait()
    assert [cache.space.peek(cache.space.chain([100 * n + t for t in A])) for n in range(1, 5)] == held
    cache.manager.destroy_session("kept")
    cache.manager.wait()
    assert cache.space.peek(cache.space.chain([100 + t for t in A])) == 0


# -- time to live -----------------------------------------------------------------------------------------------------


def test_an_idle_session_is_destroyed_with_its_blocks(open_cache: Opener) -> None:
    """By the next call that looks, when its time is over; use, scopes and pins keep it."""
    cache = open_cache(64, sessions=SessionSettings(ttl_s=100.0))
    clock = Clock(cache.manager)
    for number, name in enumerate(("idle", "used", "inside", "kept")):
        cache.manager.create_session(name, pin=name == "kept")
        cache.save([1000 * number + t for t in A], session=name)
    cache.manager.create_session("longer", ttl_s=500)
    with cache.manager.use_session("inside"):
        clock.now = 60.0
        cache.save([1000 + t for t in A], session="used")
        clock.now = 120.0
        cache.manager.state()
        cache.manager.wait()
        assert names(cache) == ["used", "inside", "kept", "longer"]
        assert used(cache) == 12
    clock.now = 230.0
    cache.load([9])
    cache.manager.wait()
    assert names(cache) == ["kept", "longer"]
    cache.manager.pin_session("kept", False)
    clock.now = 700.0
    cache.manager.create_session("new")
    cache.manager.wait()
    assert names(cache) == ["new"]
    assert used(cache) == 0


def test_the_background_pool_ends_idle_sessions_when_nobody_calls(open_cache: Opener) -> None:
    """Real time, and no call at all in between."""
    cache = open_cache(16)
    session = cache.manager.create_session("s", ttl_s=0.05)
    cache.save(A, session="s")
    gone = threading.Event()
    deadline = time.monotonic() + 60
    while session.purged is None and time.monotonic() < deadline:
        gone.wait(0.01)
    assert session.purged is False
    cache.manager.wait()
    assert used(cache) == 0


def test_sessions_with_a_time_to_live_start_no_thread_before_a_model_is_there() -> None:
    """A description stays a description."""
    before = threading.active_count()
    manager = CacheManager(CPUBackend(size_gb=1), sessions=SessionSettings(ttl_s=1))
    manager.create_session("s")
    assert threading.active_count() == before
    manager.close()


# -- logs, figures, the end -------------------------------------------------------------------------------------------


def test_opening_and_closing_are_logged_with_bytes(open_cache: Opener, caplog: pytest.LogCaptureFixture) -> None:
    """As fields, for whoever collects logs: what was held, what became free."""
    caplog.set_level(logging.INFO, logger="kvcache_factory")
    cache = open_cache(16, name="m")
    cache.manager.create_session("one")
    cache.manager.create_session("two")
    cache.save(A, session="one")
    cache.save(A[:8], session="two")
    cache.manager.destroy_session("one")
    one = cache.manager.state()["tiers"][0]["block_bytes"]
    records = [vars(record) for record in caplog.records if "kv_session" in vars(record)]
    assert [(r["kv_event"], r["kv_session"]) for r in records] == [
        ("session_opened", "one"),
        ("session_opened", "two"),
        ("session_closed", "one"),
    ]
    assert (records[2]["kv_held_bytes"], records[2]["kv_freed_bytes"]) == (4 * one, 2 * one)
    assert (records[2]["kv_manager"], records[2]["kv_reason"]) == ("m", "destroyed")


def test_stats_are_those_of_the_state(open_cache: Opener) -> None:
    """One source: a session's own figures, and the row in the manager's."""
    cache = open_cache(16)
    session = cache.manager.create_session("s", labels={"route": "chat"}, ttl_s=1000)
    cache.save(A, session="s")
    with cache.manager.use_session("s"):
        cache.load(A)
    clock = Clock(cache.manager)
    session._clock, session.used_at = clock, 0.0
    row = cache.manager.state()["sessions"][0]
    stats = cache.manager.session("s").stats()
    assert {**stats, "age_s": 0} == {**row, "age_s": 0}
    assert (stats["requests"], stats["asked_tokens"], stats["reused_tokens"], stats["stored_blocks"]) == (1, 16, 16, 4)


def test_a_closed_manager_has_no_new_sessions(open_cache: Opener) -> None:
    """Whoever makes one finds out now, not by misses."""
    manager = open_cache(4).manager
    manager.create_session("s")
    manager.close()
    for call in (
        lambda: manager.create_session("t"),
        lambda: manager.fork_session("s", "t"),
        lambda: manager.pin_session("s"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert manager.destroy_session("s")


# -- with policies ----------------------------------------------------------------------------------------------------


def test_a_policy_about_sessions_lets_the_whole_idle_one_leave(open_cache: Opener) -> None:
    """target="session" moves what one session stored down a tier, also when it was stored in two steps."""
    cache = open_cache(12, 64, eviction_policy=LRUEvictionPolicy(target="session", action="swap_to_cpu"))
    cache.manager.create_session("idle", quota_gb=1)
    cache.manager.create_session("busy", quota_gb=1)
    chain = cache.space.chain(A)
    positions = cache.engine.compute(chain)
    tag = cache.engine.region.tag
    plan = cache.space.plan_save(chain, first=0, count=4, tag=tag, session="idle")
    assert plan is not None
    assert plan.session == "idle"
    tier = cache.manager._chain.tiers[0]
    cache.manager._chain.mover.gather(tier, plan.rows, cache.engine.region, positions)
    cache.space.finish_save(plan, 4)
    for start in (1, 2, 3):
        cache.save([100 * start + t for t in A][:12], session="busy")
        cache.manager.wait()
    first = {name: cache.manager.session(name).stats()["tier_bytes"]["gpu"] for name in ("idle", "busy")}
    assert first["idle"] == 0
    assert first["busy"] > 0
    assert cache.manager.session("idle").stats()["tier_bytes"]["cpu"] > 0
    assert cache.load(A) == [0] * 4


def test_routes_have_managers_of_their_own(open_cache: Opener) -> None:
    """Two policies in one process: the same prompt, session id and model, and nothing in common."""
    chat = open_cache(8, name="chat", eviction_policy=LRUEvictionPolicy(target="session"))
    documents = open_cache(16, name="documents", sessions=SessionSettings(ttl_s=60))
    for cache in (chat, documents):
        cache.manager.create_session("ada")
    with chat.manager.use_session("ada"), documents.manager.use_session("ada"):
        chat.save(A)
        documents.save(B)
    assert (used(chat), used(documents)) == (4, 3)
    assert chat.load(B) == [0, 0]
    chat.manager.destroy_session("ada")
    assert (used(chat), used(documents)) == (0, 3)
