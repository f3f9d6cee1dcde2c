"""Leases: by request id, idempotent, with a maximum age, and never pulled from under a copy."""

import pytest

from kvcache_factory.engine.ledger import MANAGER, Event
from kvcache_factory.manager import CacheManager
from kvcache_factory.testing import Opener

A, B = list(range(16)), list(range(100, 116))


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The time of the leases."""
    return Clock()


def with_clock(clock: Clock) -> object:
    """Injects the clock before anything is opened."""

    def inject(manager: CacheManager) -> None:
        manager._chain.leases._clock = clock

    return inject


def test_a_lost_request_does_not_hold_memory_for_ever(open_cache: Opener, clock: Clock) -> None:
    """Pins of a request that never ended go with the first look-up after its time, and are counted."""
    cache = open_cache(4, lease_max_age_s=60, prepare=with_clock(clock))
    cache.save(A)
    lost = cache.space.match(cache.space.chain(A), "lost")
    assert cache.save(B) == 0
    clock.now = 61
    cache.space.match(cache.space.chain(B), "other")
    assert cache.save(B) == 4
    assert cache.manager._ledger.total(Event.LEASE_EXPIRED, MANAGER).times == 1
    assert cache.space.load(lost, cache.engine.region, cache.engine.positions(4)) == 0
    assert cache.manager._ledger.total(Event.LOAD_FAILED, MANAGER, "lease_gone").blocks == 4
    assert cache.space.release("lost") is False


def test_a_new_look_up_of_a_request_replaces_its_lease(open_cache: Opener, clock: Clock) -> None:
    """A request that is scheduled again holds its new match only, and starts to age anew."""
    cache = open_cache(8, lease_max_age_s=60, prepare=with_clock(clock))
    cache.save(A)
    cache.save(B)
    old = cache.space.match(cache.space.chain(A), "r")
    clock.now = 50
    new = cache.space.match(cache.space.chain(B), "r")
    assert cache.space.load(old, cache.engine.region, cache.engine.positions(4)) == 0
    clock.now = 100
    cache.space.match(cache.space.chain(A[:4]), "other")
    assert cache.space.load(new, cache.engine.region, cache.engine.positions(4)) == 4
    assert cache.space.release("r") is True
    assert cache.space.release("r") is False


def test_a_copy_in_flight_owns_its_rows_whatever_happens_to_the_lease(open_cache: Opener, clock: Clock) -> None:
    """Released and out of time in the middle of a load: the last one out gives the pins back."""
    cache = open_cache(4, lease_max_age_s=60, prepare=with_clock(clock))
    cache.save(A)
    match = cache.space.match(cache.space.chain(A), "r")
    leases = cache.manager._chain.leases
    lease = leases.enter("r", match.lease)
    assert lease is not None
    clock.now = 1000
    leases.expire()
    assert len(leases) == 1
    assert cache.space.release("r") is True
    assert cache.manager.evict(4) == 0
    leases.leave(lease)
    assert cache.manager.evict(4) == 4


def test_requests_share_what_they_hold(open_cache: Opener) -> None:
    """Two leases on one chain: it stays until both are gone."""
    cache = open_cache(8)
    cache.save(A)
    for request in ("one", "two"):
        cache.space.match(cache.space.chain(A), request)
    cache.space.release("one")
    assert cache.manager.evict(8) == 0
    cache.space.release("two")
    assert cache.manager.evict(8) == 4


def test_a_request_holds_what_it_has_stored(open_cache: Opener) -> None:
    """With its id given, a save makes new blocks part of the lease; without a lease it holds nothing."""
    cache = open_cache(4)
    cache.space.match(cache.space.chain(A), "r")
    assert cache.save(A, request_id="r") == 4
    assert cache.save(B) == 0
    cache.space.release("r")
    assert cache.save(B, request_id="ended long ago") == 4
    assert cache.save(A) == 4
