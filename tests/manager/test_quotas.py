"""Quotas: of a session, of sessions with a label, of all, in every tier or in one."""

from __future__ import annotations

import pytest

from kvcache_factory import CacheManager, ConfigError, CPUBackend, SessionSettings
from kvcache_factory.backend import GIB
from kvcache_factory.engine.ledger import Event
from kvcache_factory.testing import Opener, SmallCache, sized_level, tiny_spec


def tokens(start: int, blocks: int = 4) -> list[int]:
    """A conversation of *blocks* blocks that begins like no other."""
    return [1000 * start + i for i in range(4 * blocks)]


def gib(blocks: int, *, device: bool = False) -> float:
    """GiB of so many blocks of the tiny geometry, and of nothing more."""
    return float(sized_level(blocks, tiny_spec(), device=device).size_gb or 0)


def bytes_of(cache: SmallCache, name: str) -> dict[str, int]:
    return dict(cache.manager.session(name).stats()["tier_bytes"])


def held(cache: SmallCache, *starts: int) -> list[int]:
    """Blocks of each of these conversations that are stored."""
    return [cache.space.peek(cache.space.chain(tokens(start))) for start in starts]


def refused(cache: SmallCache) -> int:
    return cache.manager._ledger.total(Event.NOT_STORED, reason="quota").blocks


def test_at_its_quota_a_session_gives_up_its_oldest_ends_of_chains_first(open_cache: Opener) -> None:
    """Room for six blocks: the third conversation takes the place of the first, from its end on."""
    cache = open_cache(32)
    session = cache.manager.create_session("s", quota_gb=gib(6))
    cache.save(tokens(9))  # somebody else's
    for start in (1, 2):
        cache.save(tokens(start), session="s")
    assert held(cache, 1, 2, 9) == [2, 4, 4]
    cache.load(tokens(1))  # outside of the session: does not count as its use
    with cache.manager.use_session("s"):
        cache.load(tokens(1))
    cache.save(tokens(3, 3), session="s")
    assert held(cache, 1, 2, 3, 9) == [2, 1, 3, 4]  # what it has used since is younger
    assert session.stats()["blocks"] == 6
    assert session.stats()["dropped_blocks"] == 5
    assert session.stats()["bytes"] == 6 * cache.manager.state()["tiers"][0]["block_bytes"]


def test_a_conversation_longer_than_the_quota_is_kept_from_its_beginning(open_cache: Opener) -> None:
    """What is behind is computed again each time, and counted."""
    cache = open_cache(32)
    session = cache.manager.create_session("s", quota_gb=gib(3))
    cache.save(tokens(1, 5), session="s")
    assert held(cache, 1) == [3]
    assert (session.refused_blocks, refused(cache)) == (2, 2)
    assert cache.load(tokens(1, 5)) == [0, 0, 0]


@pytest.mark.parametrize("where", ["session", "settings"])
def test_who_refuses_keeps_what_it_has(open_cache: Opener, where: str) -> None:
    """on_quota="refuse", given to the session or to all of them: nothing leaves, the new is not stored."""
    settings = SessionSettings(on_quota="refuse" if where == "settings" else "evict")
    cache = open_cache(32, sessions=settings)
    given = {"on_quota": "refuse"} if where == "session" else {}
    session = cache.manager.create_session("s", quota_gb=gib(5), **given)  # type: ignore[arg-type]
    cache.save(tokens(1), session="s")
    assert cache.save(tokens(2), session="s") == 1
    assert held(cache, 1, 2) == [4, 1]
    assert session.stats()["refused_blocks"] == refused(cache) == 3
    cache.manager.clear_session("s")
    assert cache.save(tokens(2), session="s") == 4


def test_a_quota_of_next_to_nothing_is_one(open_cache: Opener) -> None:
    """Less than a block: nothing is kept, and the figures say 0 bytes and not that there is no quota."""
    cache = open_cache(32)
    session = cache.manager.create_session("s", quota_gb=1e-12)
    assert cache.save(tokens(1), session="s") == 0
    assert (session.stats()["quota_bytes"], session.stats()["bytes"], refused(cache)) == (0, 0, 4)
    assert cache.manager.create_session("free").stats()["quota_bytes"] is None


def test_blocks_that_were_lost_do_not_count(open_cache: Opener) -> None:
    """References to evicted blocks make room before anything that is there does."""
    cache = open_cache(32)
    cache.manager.create_session("s", quota_gb=gib(4), on_quota="refuse")
    cache.save(tokens(1), session="s")
    cache.space.drop(cache.space.chain(tokens(1)), 1)
    assert cache.save(tokens(2, 3), session="s") == 3
    assert held(cache, 1, 2) == [1, 3]


def test_a_shared_block_is_charged_to_each_and_counted_once(open_cache: Opener) -> None:
    """Giving it up does not drop it while somebody else references it."""
    cache = open_cache(32)
    for name in ("a", "b"):
        cache.manager.create_session(name, quota_gb=gib(4))
    cache.save(tokens(1), session="a")
    cache.save(tokens(1), session="b")
    one = cache.manager.state()["tiers"][0]["block_bytes"]
    assert bytes_of(cache, "a") == bytes_of(cache, "b") == {"cpu": 4 * one}
    state = cache.manager.state()
    assert state["tiers"][0]["held_bytes"] == 4 * one
    assert state["session_groups"] == [{"group": "total", "quota_gb": None, "tier_bytes": {"cpu": 4 * one}}]
    cache.save(tokens(2), session="a")
    assert held(cache, 1, 2) == [4, 4]
    cache.save(tokens(2), session="b")
    assert held(cache, 1, 2) == [0, 4]


def test_finding_what_others_stored_is_charged_as_far_as_the_quota_goes(open_cache: Opener) -> None:
    """A request may use what is there; its session references what fits."""
    cache = open_cache(32)
    session = cache.manager.create_session("s", quota_gb=gib(2))
    cache.save(tokens(1))
    with cache.manager.use_session("s"):
        assert cache.load(tokens(1)) == [0] * 4
    assert session.stats()["blocks"] == 2
    cache.manager.destroy_session("s")
    assert held(cache, 1) == [4]  # something is built on what it referenced


def test_sessions_of_a_label_share_a_quota(open_cache: Opener) -> None:
    """First the session gives up its own, then the longest idle of its tenant; other tenants are left alone."""
    settings = SessionSettings(label_gb={"tenant": {"acme": gib(8), "*": gib(4)}})
    cache = open_cache(64, sessions=settings)
    for name, tenant in (("a1", "acme"), ("a2", "acme"), ("b", "else"), ("c", "other")):
        cache.manager.create_session(name, labels={"tenant": tenant, "route": "chat"})
    cache.save(tokens(1), session="a1")
    cache.save(tokens(2), session="a2")
    cache.save(tokens(3), session="b")
    cache.save(tokens(4), session="c")
    assert held(cache, 1, 2, 3, 4) == [4, 4, 4, 4]
    cache.save(tokens(5, 3), session="a2")
    assert held(cache, 1, 2, 5) == [4, 1, 3]
    cache.save(tokens(6, 7), session="a2")
    assert held(cache, 1, 2, 5, 6) == [1, 0, 0, 4]  # peek of the first four of seven
    assert cache.manager.session("a1").stats()["dropped_blocks"] == 3
    assert held(cache, 3, 4) == [4, 4]


def test_all_sessions_share_the_total(open_cache: Opener) -> None:
    """Requests outside of sessions are not in it."""
    cache = open_cache(64, sessions=SessionSettings(total_gb=gib(6)))
    for name in ("a", "b"):
        cache.manager.create_session(name)
    cache.save(tokens(9))
    cache.save(tokens(1), session="a")
    cache.save(tokens(2), session="b")
    assert held(cache, 1, 2, 9) == [2, 4, 4]
    group = cache.manager.state()["session_groups"][0]
    assert group["tier_bytes"]["cpu"] <= group["quota_gb"] * GIB


def test_tiers_may_have_quotas_of_their_own(open_cache: Opener) -> None:
    """Two blocks in the first tier, all of them in the second: what leaves one stays in the other."""
    cache = open_cache(32, 32)
    names = [tier["tier"] for tier in cache.manager.state()["tiers"]]
    sizes = [tier["block_bytes"] for tier in cache.manager.state()["tiers"]]
    cache.manager.create_session("s", quota_gb={names[0]: gib(2, device=True)})
    for start in (1, 2):
        cache.save(tokens(start, 2), session="s")
        cache.manager.wait()
    assert bytes_of(cache, "s") == {names[0]: 2 * sizes[0], names[1]: 4 * sizes[1]}
    assert cache.load(tokens(1, 2)) == [0, 0]  # promotes what it found below, as far as the quota goes
    cache.manager.wait()
    assert bytes_of(cache, "s")[names[0]] == 2 * sizes[0]
    assert cache.manager.check() == []


def test_a_pinned_session_is_not_touched_by_others(open_cache: Opener) -> None:
    """Neither for a shared quota nor by the policy; at its own quota it refuses."""
    cache = open_cache(8, sessions=SessionSettings(total_gb=gib(6)))
    cache.manager.create_session("kept", pin=True, quota_gb=gib(4))
    cache.manager.create_session("s")
    cache.save(tokens(1), session="kept")
    assert cache.save(tokens(2), session="kept") == 0
    assert cache.save(tokens(3), session="s") == 2  # six in all
    for start in range(10, 16):
        cache.save(tokens(start))
    assert held(cache, 1) == [4]
    cache.manager.pin_session("kept", False)
    for start in range(20, 26):
        cache.save(tokens(start))
    assert held(cache, 1) == [0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"quota_gb": 0},
        {"quota_gb": "1"},
        {"quota_gb": {"cpu": -1}},
        {"total_gb": float("nan")},
        {"label_gb": {"tenant": {"acme": 0}}},
        {"on_quota": "wait"},
        {"ttl_s": 0},
        {"ttl_s": True},
    ],
)
def test_rules_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    """By name, when they are written down."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SessionSettings(**wrong)  # type: ignore[arg-type]


def test_a_quota_for_a_tier_that_is_not_there_is_refused() -> None:
    """A misspelt tier would otherwise be a quota that nobody keeps."""
    with pytest.raises(ConfigError, match=r"no tier 'ram'; this manager has cpu"):
        CacheManager(CPUBackend(size_gb=1), sessions=SessionSettings(total_gb={"ram": 1}))
    manager = CacheManager(CPUBackend(size_gb=1))
    for create in (
        lambda: manager.create_session("s", quota_gb={"ram": 1}),
        lambda: manager.create_session("s", labels={"tenant": 3}),  # type: ignore[dict-item]
    ):
        with pytest.raises(ConfigError):
            create()
    assert not manager.has_session("s")


def test_rules_survive_being_written_down() -> None:
    """to_config() and back, through JSON as well."""
    settings = SessionSettings(
        quota_gb={"cpu": 1.5}, total_gb=8.0, label_gb={"tenant": {"*": 2.0}}, on_quota="refuse", ttl_s=60.0
    )
    manager = CacheManager(CPUBackend(size_gb=1), sessions=settings)
    again = CacheManager.from_config(manager.to_config())
    assert again.config == manager.config
    assert again.config.sessions == settings
