"""What the caller says about a session's return, and what policies make of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache_factory import ConfigError, HeuristicEvictionPolicy, LRUEvictionPolicy, TTLEvictionPolicy
from kvcache_factory.policy.base import NO_HINT, EvictionPolicy, RequestHint
from kvcache_factory.policy.importance import attention, headings, keywords
from kvcache_factory.testing.forest import Forest

ENDED, RETURNS = RequestHint(reuse="ended"), RequestHint(reuse="returns")


def forest(policy: EvictionPolicy, rows: int = 12) -> Forest:
    return Forest(policy, rows)


def test_what_an_ended_session_used_leaves_first() -> None:
    """It was used last, and is needed least."""
    made = forest(LRUEvictionPolicy())
    old = made.grow(-1, 2)
    made.tick()
    ended = made.grow(-1, 2, ENDED)
    assert made.evict(2) == ended[::-1].tolist()
    assert made.evict(2) == old[::-1].tolist()


def test_a_prefix_that_others_use_again_is_not_ended() -> None:
    """The end of one session says nothing about what a later request uses."""
    made = forest(LRUEvictionPolicy())
    shared = made.grow(-1, 1)
    made.use(int(shared[0]), ENDED)
    made.tick()
    other = made.grow(-1, 1)
    made.tick()
    made.use(int(shared[0]))
    assert made.evict(1) == other.tolist()


def stay(hint: RequestHint) -> int:
    """How many later blocks a block sees come and go in a cache of four."""
    made, turns = forest(LRUEvictionPolicy(), 4), 0
    for _ in range(8):
        made.tick()
        if len(made.rows) == 4:
            made.evict(1)
        made.grow(-1, 1)
    made.evict(1)
    made.tick()
    kept = int(made.grow(-1, 1, hint)[0])
    while made.evict(1) != [kept]:
        turns += 1
        made.tick()
        made.grow(-1, 1)
    return turns


def test_what_returns_stays_about_twice_as_long() -> None:
    """Long enough to matter, not for ever: a promise may be broken."""
    usual = stay(NO_HINT)
    assert usual < stay(RETURNS) <= 2 * usual + 1
    assert stay(RequestHint(reuse="tool_pending")) == stay(RETURNS)
    assert stay(ENDED) == 0


def test_the_least_important_leaves_first() -> None:
    """Importance comes with the request: one number, or one for each block of the chain."""
    made = forest(HeuristicEvictionPolicy())
    dear = made.grow(-1, 2, RequestHint(importance=0.9))
    made.tick()
    cheap = made.grow(-1, 2, RequestHint(importance=[0.8, 0.1]))
    made.tick()
    unknown = made.grow(-1, 1)
    assert made.evict(5) == [*cheap[1:], *unknown, *cheap[:1], *dear[::-1]]


def test_time_to_live_ends_also_when_there_is_room() -> None:
    """The policy says how many are overdue; leased ones are not."""
    policy = TTLEvictionPolicy(ttl_s=10)
    made = forest(policy)
    old = made.grow(-1, 2)
    made.tick(6)
    young = made.grow(-1, 1)
    assert policy.overdue(9.0) == 0
    assert policy.overdue(11.0) == 1  # its parent can leave when it has left
    assert made.evict(2) == old[::-1].tolist()
    made.pin(int(young[0]))
    assert policy.overdue(99.0) == 0


def test_scorers_find_sections_words_and_what_was_looked_at() -> None:
    """Four blocks of eight tokens, and the text they came from."""
    tokens = np.arange(32, dtype=np.uint32).reshape(4, 8)
    text = "x" * 30 + "\n# Part two\n" + "y" * 30 + "\n\n" + "z" * 30
    assert headings(tokens, text).tolist() == [1.0, 1.0, 0.75, 0.25]
    words = ("alpha beta " * 2).ljust(60, ".") + "gamma".ljust(60, ".")
    found = keywords(tokens, words)
    assert found[0] == 1.0
    assert found[3] == 0.0
    assert attention([1.0] * 8 + [3.0] * 8 + [9.0], block_tokens=8).tolist() == [1 / 3, 1.0]
    for scorer in (headings, keywords):  # from tokens alone
        scores = scorer(np.array([[1, 1, 2, 9], [1, 1, 1, 1]], np.uint32), None)
        assert scores.shape == (2,)
        assert 0 <= scores.min() <= scores.max() <= 1


@pytest.mark.parametrize("wrong", ["headlines", 3, [1]])
def test_an_unknown_scorer_is_refused(wrong: object) -> None:
    """Names are checked when a policy is described."""
    with pytest.raises(ConfigError, match=r"headings|scorer"):
        HeuristicEvictionPolicy(importance=wrong)  # type: ignore[arg-type]
