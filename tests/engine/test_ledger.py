"""One ledger, from which every figure is derived."""

import sys
import threading
from bisect import bisect_left

import pytest

from kvcache_factory.engine.ledger import BOUNDS_S, MOST_FRESH, Event, Ledger
from kvcache_factory.testing import Opener


def test_entries_add_up_by_tier_event_and_reason() -> None:
    """Totals can be asked for at any grain; rows are flat and sorted."""
    ledger = Ledger()
    ledger.add("cpu", Event.MISS, 3, 30, "absent")
    ledger.add("cpu", Event.MISS, 1, 10, "record_differs")
    ledger.add("gpu", Event.MISS, 5, 50, "absent")
    assert ledger.total(Event.MISS) == (3, 9, 90)
    assert ledger.total(Event.MISS, "cpu") == (2, 4, 40)
    assert ledger.total(Event.MISS, reason="absent") == (2, 8, 80)
    assert ledger.total(Event.HIT) == (0, 0, 0)
    assert [row["reason"] for row in ledger.rows()] == ["absent", "record_differs", "absent"]


def test_threads_lose_no_count() -> None:
    """Sums are exact under any number of threads."""
    ledger = Ledger()

    def count() -> None:
        for _ in range(500):
            ledger.add("cpu", Event.HIT, 2, 3)
            ledger.observe("manager", "match", 0.5)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.total(Event.HIT) == (2000, 4000, 6000)
    assert ledger.seconds() == [{"verb": "match", "calls": 2000, "seconds": 1000.0}]


def test_what_ended_threads_counted_stays() -> None:
    """A process that starts a thread for each request has one sum of them all."""
    ledger = Ledger()
    for _ in range(50):
        thread = threading.Thread(target=ledger.add, args=("cpu", Event.HIT, 1, 10))
        thread.start()
        thread.join()
    assert ledger.total(Event.HIT) == (50, 50, 500)


def test_readers_and_counters_at_the_same_time_lose_nothing() -> None:
    """What is noted while somebody sums up is in the next sum, and none is in two."""
    ledger, calls = Ledger(), 5 * MOST_FRESH
    done = threading.Event()

    def count() -> None:
        for number in range(calls):
            ledger.pair("cpu", Event.ASKED, Event.HIT, 10).add(3, 2)
            ledger.observe("cpu", "load", (number % 2) * 1e-3)

    def read() -> None:
        while not done.is_set():
            ledger.rows()
            ledger.histograms()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        counters = [threading.Thread(target=count) for _ in range(3)]
        reader = threading.Thread(target=read)
        for thread in (reader, *counters):
            thread.start()
        for thread in counters:
            thread.join()
        done.set()
        reader.join()
    finally:
        sys.setswitchinterval(before)
    times = 3 * calls
    assert ledger.total(Event.ASKED) == (times, 3 * times, 30 * times)
    assert ledger.total(Event.HIT) == (times, 2 * times, 20 * times)
    load = ledger.histograms()["cpu", "load"]
    assert load.calls == sum(load.buckets) == times
    assert load.buckets[bisect_left(BOUNDS_S, 1e-3)] == load.buckets[0] == times / 2
    assert load.sum_s == pytest.approx(times / 2 * 1e-3)


def test_what_waits_to_be_summed_up_is_bounded() -> None:
    """Nobody reads for a long time: a counter keeps at most so many notes."""
    ledger = Ledger()
    for _ in range(3 * MOST_FRESH):
        ledger.add("cpu", Event.HIT, 1, 1)
        ledger.pair("cpu", Event.ASKED, Event.HIT).add(1, 1)
        ledger.observe("cpu", "load", 1.0)
        waiting = [*ledger._entries.values(), *ledger._pairs.values(), *ledger._durations.values()]
        assert max(len(notes.fresh) for notes in waiting) <= MOST_FRESH


def test_a_destructor_in_the_middle_of_a_sum_counts_too() -> None:
    """It finds the lists as they are between two steps: what it notes is neither lost nor counted twice."""
    ledger = Ledger()
    ledger.observe("cpu", "load", 1.0)
    notes = ledger._durations["cpu", "load"]

    class Ends:
        def __add__(self, other: int) -> int:
            ledger.observe("cpu", "load", 1.0)
            return ledger.total(Event.HIT).blocks + other

        __radd__ = __add__

    entry_key = ("cpu", Event.HIT, "")
    ledger.add("cpu", Event.HIT, Ends(), 0)  # type: ignore[arg-type]
    ledger.total(Event.HIT)
    assert ledger._entries[entry_key].fresh == []
    assert ledger.histograms()["cpu", "load"].calls == 2
    assert notes.fresh == []


def test_counting_inside_counting_does_not_wait_for_itself() -> None:
    """The collector may run a destructor inside a reader, which ends a session, which counts."""
    ledger = Ledger()
    with ledger._lock:
        ledger.add("cpu", Event.DROPPED, 1)
        assert ledger.total(Event.DROPPED).blocks == 1


def test_what_was_asked_is_hits_and_misses_and_the_rate_follows(open_cache: Opener) -> None:
    """hit_rate_blocks is neither always 0 nor always 1: it is hits over blocks asked for."""
    cache = open_cache(16)
    assert cache.manager.state()["hit_rate_blocks"] == 0.0
    cache.save(list(range(8)))
    cache.load(list(range(16)))
    assert cache.manager.state()["hit_rate_blocks"] == 0.5
    events = {(row["tier"], row["event"], row["reason"]): row["blocks"] for row in cache.manager.state()["events"]}
    assert (events["manager", "asked", ""], events["manager", "hit", ""], events["manager", "miss", "absent"]) == (
        4,
        2,
        2,
    )
