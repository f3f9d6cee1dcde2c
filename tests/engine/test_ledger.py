"""One ledger, from which every figure is derived."""

import threading

from kvcache_factory.engine.ledger import Event, Ledger
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


def test_what_ended_threads_counted_stays_and_their_shards_do_not_pile_up() -> None:
    """A process that starts a thread for each request keeps one sum, not one for each thread that ever was."""
    ledger = Ledger()
    for _ in range(50):
        thread = threading.Thread(target=ledger.add, args=("cpu", Event.HIT, 1, 10))
        thread.start()
        thread.join()
    assert ledger.total(Event.HIT) == (50, 50, 500)
    assert len(ledger._shards) <= 2


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
