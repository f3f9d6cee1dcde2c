"""What a tier does not admit: counted, left alone above, and offered to the tiers below."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.engine.test_flow import background_stopped, counted, used

from kvcache_factory import CacheManager, HybridPolicy, LRUEvictionPolicy
from kvcache_factory.engine.ledger import Event
from kvcache_factory.policy.base import EvictionPolicy, Keys, RequestHint
from kvcache_factory.testing import Opener

A, B = list(range(32)), list(range(1000, 1032))
"""Eight blocks each."""


class Doorman(LRUEvictionPolicy):
    """Lets *admitted* newcomers in at a time, once it is full."""

    name = "doorman"

    def __init__(self, admitted: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.admitted = admitted

    def options(self) -> dict[str, Any]:
        return {**super().options(), "admitted": self.admitted}

    def admit(self, now: float, keys: Keys, hint: RequestHint) -> int:
        return min(self.admitted, len(keys))


def keep(manager: CacheManager) -> None:
    """No room is made ahead of need: a full tier stays full."""
    flow = manager._chain.flow
    flow.settings = replace(flow.settings, demote_at=1.0, demote_to=1.0)


def doors(gpu: int, cpu: int | None = None) -> EvictionPolicy:
    """Doormen of two levels; LRU where there is none."""
    members = [Doorman(gpu, target="gpu")] + ([] if cpu is None else [Doorman(cpu, target="cpu")])
    return HybridPolicy(members)


def test_what_is_refused_is_counted_and_changes_nothing(open_cache: Opener) -> None:
    """One tier: what is there stays."""
    cache = open_cache(8, eviction_policy=Doorman())
    cache.save(A)
    assert cache.save(B) == 0
    assert counted(cache, Event.NOT_STORED, "cpu", "not_admitted") == 8
    assert cache.load(A) == [0] * 8


@pytest.mark.parametrize("admitted", [0, 3])
def test_the_next_tier_is_offered_what_the_first_refuses(open_cache: Opener, admitted: int) -> None:
    """Also behind blocks that the first tier took a moment ago, and were not below yet; bytes are right."""
    cache = open_cache(8, 20, eviction_policy=doors(admitted), prepare=keep)
    cache.save(A)
    cache.manager.wait()
    assert cache.save(B) == admitted
    cache.manager.wait()
    assert used(cache) == [8, 16]
    assert counted(cache, Event.NOT_STORED, "gpu", "not_admitted") == 8 - admitted
    assert cache.load(B) == [0] * 8
    assert cache.load(A) == [0] * 8


def test_a_conversation_that_the_first_tier_refuses_goes_on_below(open_cache: Opener) -> None:
    """Its next turn builds on blocks that the first tier does not have: they come up, or the rest is not stored."""
    cache = open_cache(8, 40, eviction_policy=doors(0), prepare=keep)
    cache.save(A)
    cache.manager.wait()
    cache.save(B)
    cache.manager.wait()
    assert cache.load(B) == [0] * 8
    cache.manager.wait()
    assert used(cache) == [8, 16]


def test_what_the_last_tier_refuses_is_not_stored(open_cache: Opener) -> None:
    """It is counted in both."""
    cache = open_cache(8, 8, eviction_policy=doors(0, 0), prepare=keep)
    cache.save(A)
    cache.manager.wait()
    cache.save(B)
    cache.manager.wait()
    assert used(cache) == [8, 8]
    assert [counted(cache, Event.NOT_STORED, tier, "not_admitted") for tier in ("gpu", "cpu")] == [8, 8]
    assert cache.load(B) == []


def test_nothing_waits_for_a_slot_in_transit(open_cache: Opener) -> None:
    """What finds none is counted; a full lane gives the slots back."""
    cache = open_cache(8, 40, eviction_policy=doors(0), prepare=keep)
    cache.save(A)
    cache.manager.wait()
    pool = cache.manager._chain.flow.passing
    everything = pool.take(1 << 30)
    cache.save(B)
    pool.give_back(everything[:2])
    cache.save(B)
    cache.manager.wait()
    assert used(cache) == [8, 10]
    assert counted(cache, Event.NOT_STORED, "cpu", "transit_full") == 8 + 6
    cache.manager._chain.flow.io._max_pending = 0
    cache.save(list(range(2000, 2032)))
    assert counted(cache, Event.NOT_STORED, "cpu", "queue_full") == 2
    assert len(pool.take(1 << 30)) == 2
    pool.give_back(everything)


def test_what_it_builds_on_may_leave_before_it_goes_down(open_cache: Opener) -> None:
    """Then it is not stored, for a tier is closed under prefix."""
    cache = open_cache(8, 40, eviction_policy=doors(3), prepare=keep)
    cache.save(A)
    cache.manager.wait()
    with background_stopped(cache):
        cache.save(B)
        cache.space.drop(cache.space.chain(B))
    assert used(cache) == [5, 8]
    assert counted(cache, Event.NOT_STORED, "cpu", "parent_absent") == 5
