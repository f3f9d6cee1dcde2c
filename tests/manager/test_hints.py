"""What sessions and requests say about their return, and how important blocks are, reaches the policy of every tier."""

from __future__ import annotations

import pytest

from kvcache_factory import ConfigError, HeuristicEvictionPolicy, LRUEvictionPolicy
from kvcache_factory.policy.base import REUSE_HINTS, RequestHint, Rows
from kvcache_factory.testing import Opener, SmallCache

A = list(range(16))
"""Four blocks."""


class Listener(LRUEvictionPolicy):
    """Remembers what it hears."""

    name = "listener"
    heard: list[RequestHint]

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self.__dict__.setdefault("heard", []).append(hint)
        super().on_request(now, rows, hit_len, hint)


def said(cache: SmallCache, number: int = 0) -> list[str]:
    """Reuse hints that the policy of one tier has heard, once each."""
    policy = cache.manager._chain.tiers[number].policy
    assert isinstance(policy, Listener)
    return list(dict.fromkeys(hint.reuse for hint in policy.__dict__.pop("heard", [])))


def test_a_request_says_it(open_cache: Opener) -> None:
    """To the first tier at once, and to the next with the copy."""
    cache = open_cache(8, 8, eviction_policy=Listener())
    for number, hint in enumerate(REUSE_HINTS):
        cache.save([1000 * number + t for t in A[:4]], reuse_hint=hint)
        cache.manager.wait()
        assert said(cache) == [hint]
        assert said(cache, 1) == [hint]


def test_a_session_says_it_for_its_requests(open_cache: Opener) -> None:
    """Until it says something else, and unless the request itself does; outside of it nothing is said."""
    cache = open_cache(8, eviction_policy=Listener())
    session = cache.manager.create_session("talk")
    assert session.reuse_hint == "unknown"
    session.reuse_hint = "tool_pending"
    with cache.manager.use_session("talk"):
        cache.save(A)
        cache.load(A)
        assert said(cache) == ["tool_pending"]
        session.reuse_hint = "ended"
        cache.load(A)
        assert said(cache) == ["ended"]
        cache.space.match(cache.space.chain(A), "r", reuse_hint="returns")
        cache.space.release("r")
        assert said(cache) == ["returns"]
    cache.load(A)
    assert said(cache) == ["unknown"]
    cache.space.match(cache.space.chain(A), "r", session="talk")
    cache.space.release("r")
    assert said(cache) == ["ended"]


def test_a_word_that_is_none_is_refused() -> None:
    """With those that are."""
    from kvcache_factory.session import Session

    with pytest.raises(ConfigError, match="unknown, returns, ended, tool_pending"):
        Session("talk").reuse_hint = "perhaps"  # type: ignore[assignment]


def test_what_an_ended_session_used_leaves_first(open_cache: Opener) -> None:
    """The default policy uses the word."""
    cache = open_cache(8, eviction_policy=LRUEvictionPolicy())
    session = cache.manager.create_session("talk")
    cache.save(A)
    session.reuse_hint = "ended"
    with cache.manager.use_session("talk"):
        cache.save([500 + t for t in A])
    cache.save([900 + t for t in A])
    assert cache.load(A) == [0] * 4


@pytest.mark.parametrize("importance", [[0.9, 0.8], [0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1]])
def test_importance_may_be_shorter_or_longer_than_the_chain(open_cache: Opener, importance: list[float]) -> None:
    """Blocks that it does not reach have the default."""
    cache = open_cache(8, eviction_policy=HeuristicEvictionPolicy())
    assert cache.save(A, importance=importance) == 4
    assert cache.load(A) == [0] * 4
