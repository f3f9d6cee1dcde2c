"""Movement between tiers: what is copied down and up, and what must not be."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvcache_factory.engine.io import Lane
from kvcache_factory.engine.ledger import MANAGER, Event
from kvcache_factory.engine.table import Keys, Rows
from kvcache_factory.manager import CacheManager
from kvcache_factory.testing import Fail, FaultyStore, Flip, Opener, Short, Slow, SmallCache, at

A = list(range(32))
"""Eight blocks."""


@contextmanager
def background_stopped(cache: SmallCache) -> Iterator[None]:
    """Copies between tiers wait until the end of the block."""
    gate = threading.Event()
    cache.manager._chain.flow.io.submit(Lane.LOAD, gate.wait)
    yield
    gate.set()
    assert cache.manager.wait(60)


def used(cache: SmallCache) -> list[int]:
    """Blocks in each tier."""
    return [tier.index.used for tier in cache.manager._chain.tiers]


def counted(cache: SmallCache, event: Event, tier: str, reason: str | None = None) -> int:
    """Blocks in the ledger."""
    return cache.manager._ledger.total(event, tier, reason).blocks


def faulty(number: int, sleep: Callable[[float], object] = lambda seconds: None) -> Callable[[CacheManager], None]:
    """Wraps the store of one tier before anything is opened."""

    def wrap(manager: CacheManager) -> None:
        tier = manager._chain.tiers[number]
        tier.store = FaultyStore(tier.store, sleep=sleep)

    return wrap


def store_of(cache: SmallCache, number: int) -> FaultyStore:
    """The wrapped store."""
    store = cache.manager._chain.tiers[number].store
    assert isinstance(store, FaultyStore)
    return store


@pytest.mark.parametrize("levels", [(20, 20), (20, 20, 20)])
def test_what_is_saved_reaches_every_tier(open_cache: Opener, levels: tuple[int, ...]) -> None:
    """Write-behind goes on from tier to tier, so that eviction above is a drop and the last tier is not for show."""
    cache = open_cache(*levels)
    cache.save(A)
    cache.manager.wait()
    assert used(cache) == [8] * len(levels)
    for number in range(len(levels) - 1):
        assert cache.manager._chain.evict(20, number) == 8
    assert counted(cache, Event.EVICTED, "gpu", "kept_below") == 8
    assert cache.load(A) == [0] * 8


def test_what_is_used_below_comes_up_again(open_cache: Opener) -> None:
    """A load from the second tier answers at once, and its blocks are in the first for the next turn."""
    cache = open_cache(20, 20)
    cache.save(A)
    cache.manager.wait()
    assert cache.manager.evict(20) == 8
    assert cache.load(A) == [0] * 8
    cache.manager.wait()
    assert used(cache) == [8, 8]
    assert counted(cache, Event.PROMOTED, "gpu") == 8


def test_prefetch_brings_blocks_up_before_they_are_asked_for(open_cache: Opener) -> None:
    """A ticket to wait for; nothing to do is None."""
    cache = open_cache(20, 20)
    cache.save(A)
    cache.manager.wait()
    assert cache.space.prefetch(cache.space.chain(A)) is None
    cache.manager.evict(5)
    ticket = cache.space.prefetch(cache.space.chain(A))
    assert ticket is not None
    assert ticket.wait(60)
    cache.manager.wait()
    assert used(cache) == [8, 8]
    assert len(cache.manager._chain.leases) == 0


def test_a_match_is_put_together_from_tiers(open_cache: Opener) -> None:
    """The first tier serves the beginning, the second what has left it; bytes and order are right."""
    cache = open_cache(20, 20)
    cache.save(A)
    cache.manager.wait()
    cache.manager.evict(3)
    match = cache.space.match(cache.space.chain(A), "r")
    assert [(s.tier, s.first, len(s.rows)) for s in match.segments] == [(0, 0, 5), (1, 5, 3)]
    cache.space.release("r")
    assert cache.load(A) == [0] * 8


def test_a_tier_that_fills_up_makes_room_ahead_of_time(open_cache: Opener) -> None:
    """Above its mark a tier lets its oldest blocks go, down to the lower mark, and the next tier has them."""
    cache = open_cache(20, 100)
    for start in range(5):
        cache.save([1000 * start + i for i in range(16)])
        cache.manager.wait()
    assert used(cache) == [18, 20]
    assert all(cache.load([1000 * start + i for i in range(16)]) == [0] * 4 for start in range(5))


def test_nothing_is_copied_down_before_it_is_whole(open_cache: Opener) -> None:
    """A request builds on blocks that another is still writing: only whole blocks reach the next tier.

    The writer fails in the end.  Its half-written blocks must not be found anywhere.
    """
    cache = open_cache(20, 20)
    chain, first = cache.space.chain(A), cache.manager._chain.tiers[0]
    writing = first.reserve(chain, cache.space.root, 0, 4)
    assert cache.save(A) == 4
    cache.manager.wait()
    assert used(cache)[1] == 0
    first.abort(writing.rows)
    assert cache.load(A) == []
    assert cache.save(A) == 8
    cache.manager.wait()
    assert used(cache) == [8, 8]


def test_what_was_dropped_does_not_come_back_from_below(open_cache: Opener) -> None:
    """drop() while its copy waits in the queue: the copy finds nothing to do."""
    cache = open_cache(20, 20)
    with background_stopped(cache):
        cache.save(A)
        assert cache.space.drop(cache.space.chain(A), 2) == 6
    assert used(cache) == [2, 2]
    assert cache.load(A) == [0, 0]


def test_what_is_dropped_in_the_middle_of_a_copy_does_not_come_back(open_cache: Opener) -> None:
    """drop() cannot see a copy that is being written; the copier looks back when it has finished."""
    drops: list[int] = []
    cache = open_cache(20, 20, prepare=faulty(1, lambda _: drops.append(cache.space.drop(cache.space.chain(A), 5))))
    store_of(cache, 1).schedule = at({("write", 0): Slow()})
    cache.save(A)
    cache.manager.wait()
    assert drops == [3]
    assert used(cache) == [5, 5]
    assert counted(cache, Event.DROPPED, "cpu", "dropped_above") == 3


def test_what_is_dropped_on_its_way_up_does_not_come_back(open_cache: Opener) -> None:
    """The same for promotion: the second look of drop() finds what arrived above meanwhile."""
    cache = open_cache(20, 20, prepare=faulty(0, lambda _: cache.space.drop(cache.space.chain(A))))
    cache.save(A)
    cache.manager.wait()
    cache.manager.evict(20)
    store_of(cache, 0).schedule = at({("write", 0): Slow()})
    assert cache.load(A) == [0] * 8
    cache.manager.wait()
    assert used(cache) == [0, 0]


def test_a_copy_that_arrives_above_while_the_tier_below_is_searched_does_not_stay(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """drop() has looked above and not yet below when a promotion ends: that is why it looks above once more."""
    cache = open_cache(20, 20)
    cache.save(A)
    cache.manager.wait()
    cache.manager.evict(20)
    below = cache.manager._chain.tiers[1].index
    look, gate = below.rows_of, threading.Event()
    cache.manager._chain.flow.io.submit(Lane.LOAD, gate.wait)
    assert cache.load(A) == [0] * 8

    def late(keys: Keys) -> Rows:
        gate.set()
        assert cache.manager.wait(60)
        return look(keys)

    monkeypatch.setattr(below, "rows_of", late)
    assert cache.space.drop(cache.space.chain(A)) == 16
    assert used(cache) == [0, 0]


def test_a_slow_tier_that_fails_costs_the_fast_one_nothing(open_cache: Opener) -> None:
    """Write errors below are counted; the blocks stay above, demotion or not."""
    cache = open_cache(20, 40, prepare=faulty(1))
    store_of(cache, 1).schedule = lambda op, call: Fail() if op == "write" else None
    prompts = [[1000 * start + i for i in range(16)] for start in range(5)]
    for tokens in prompts:
        cache.save(tokens)
        cache.manager.wait()
    assert used(cache) == [20, 0]
    assert all(cache.load(tokens) == [0] * 4 for tokens in prompts)
    assert cache.manager._ledger.total(Event.ERROR, MANAGER, "background:StoreError").times > 0


@pytest.mark.parametrize("blocks", [0, 3])
def test_a_write_that_ends_early_keeps_what_was_written(open_cache: Opener, blocks: int) -> None:
    """A store that runs out of room: the leading part is there, the rest is not, and no pin is lost."""
    cache = open_cache(20, 20, prepare=faulty(1))
    store_of(cache, 1).schedule = at({("write", 0): Short(blocks)})
    cache.save(A)
    cache.manager.wait()
    assert used(cache) == [8, blocks]
    assert cache.manager.evict(20) == 8
    assert cache.load(A) == [0] * blocks


def test_a_bit_that_flips_on_the_way_down_is_found(open_cache: Opener) -> None:
    """The checksum travels with the block: what arrived damaged is a miss below."""
    cache = open_cache(20, 20, integrity="full", prepare=faulty(1))
    store_of(cache, 1).schedule = at({("write", 0): Flip(bit=777, block=4)})
    cache.save(A)
    cache.manager.wait()
    cache.manager.evict(20)
    assert cache.load(A) == [0] * 4
    assert counted(cache, Event.LOAD_FAILED, "cpu", "checksum") == 4
    cache.manager.wait()
    assert used(cache) == [4, 4]


def test_a_full_lane_is_counted_and_nothing_stays_pinned(open_cache: Opener) -> None:
    """More saves than jobs may wait: what does not fit stays above, and can leave."""
    cache = open_cache(40, 40)
    cache.manager._chain.flow.io._max_pending = 1
    with background_stopped(cache):
        for start in range(4):
            cache.save([1000 * start + i for i in range(16)])
        assert cache.space.prefetch(cache.space.chain(A)) is None
    assert counted(cache, Event.NOT_STORED, "cpu", "queue_full") > 0
    assert cache.manager.evict(40) == 16


def test_a_full_load_lane_leaves_no_lease_behind(open_cache: Opener) -> None:
    """A prefetch that cannot be queued gives back what it held."""
    cache = open_cache(20, 20)
    cache.save(A)
    cache.manager.wait()
    cache.manager.evict(20)
    cache.manager._chain.flow.io._max_pending = 0
    assert cache.space.prefetch(cache.space.chain(A)) is None
    assert len(cache.manager._chain.leases) == 0


def test_a_second_tier_that_raises_leaves_nothing_pinned_in_the_first(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up that fails half way is a miss, and what it had found is free again."""
    cache = open_cache(20, 20)
    cache.save(A)
    cache.manager.wait()
    cache.manager.evict(2)
    with monkeypatch.context() as patch:
        patch.setattr(cache.manager._chain.tiers[1].index, "match", None)
        assert cache.space.match(cache.space.chain(A), "r").reason == "error"
    assert cache.manager.evict(20) == 6
