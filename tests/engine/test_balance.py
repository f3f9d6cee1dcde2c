"""Tiers re-balance while running: what is used comes up, what is not makes room in the background, within bounds."""

from __future__ import annotations

from tests.engine.test_flow import counted, used

from kvcache_factory.engine.ledger import Event
from kvcache_factory.testing import Opener, SmallCache


def prompt(number: int) -> list[int]:
    """Four blocks."""
    return list(range(1000 * number, 1000 * number + 16))


def at_the_top(cache: SmallCache, numbers: range) -> int:
    """Blocks of these prompts in the first tier."""
    first = cache.manager._chain.tiers[0].index
    return sum(int((first.rows_of(cache.space.chain(prompt(n)).keys) >= 0).sum()) for n in numbers)


def test_the_first_tier_follows_the_hot_set(open_cache: Opener) -> None:
    """Ten prompts, room for four above: three are hot, then three others; nothing is lost on the way."""
    cache = open_cache(16, 60)
    before, after = range(3), range(6, 9)
    for number in range(10):
        cache.save(prompt(number))
        cache.manager.wait()
    for hot, cold in ((before, after), (after, before)):
        for _ in range(3):
            for number in hot:
                assert cache.load(prompt(number)) == [0] * 4
                cache.manager.wait()
        assert at_the_top(cache, hot) == 12
        assert at_the_top(cache, cold) <= 4
    assert used(cache)[1] == 40
    assert counted(cache, Event.PROMOTED, "gpu") >= 24


def test_making_room_in_the_background_stays_within_its_marks(open_cache: Opener) -> None:
    """Between the marks nothing moves; above the upper one, as much as leads to the lower one, and each block once."""
    cache = open_cache(20, 100)
    for number in range(4):
        cache.save(prompt(number))
        cache.manager.wait()
    assert used(cache) == [16, 16]
    assert counted(cache, Event.EVICTED, "gpu") == 0
    cache.save(prompt(4))
    cache.manager.wait()
    assert used(cache) == [18, 20]
    assert counted(cache, Event.EVICTED, "gpu", "kept_below") == 2
    assert counted(cache, Event.DEMOTED, "cpu") == 20
