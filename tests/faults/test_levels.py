"""What goes down when, what comes up when, and who leaves: exact counts, and a budget that is never exceeded."""

from __future__ import annotations

from typing import Any

import pytest
from tests.faults.conftest import DiskOpener
from tests.faults.harness import SEGMENT_SLOTS, DiskCache, Gate, tokens_of, used_bytes
from tests.faults.worker import Child, children, read_all, work

CHAIN = tokens_of(1, 6)


def at_once(cache: DiskCache, tokens: Any) -> int:
    """Blocks that the first level holds."""
    index = cache.manager._chain.tiers[0].index
    return int((index.rows_of(cache.space.chain(tokens).keys) >= 0).sum())


def test_all_goes_down_when_it_is_stored(over: DiskOpener) -> None:
    """One copy of each block, and none of what is there already."""
    cache = over(ingestion="all")
    cache.save(CHAIN)
    cache.save(CHAIN)
    cache.save(CHAIN + tokens_of(2, 2))
    assert cache.counted("stored") == cache.counted("demoted") == {"": 8}


@pytest.mark.parametrize("filled", [2, 1, 0])
def test_what_was_stored_on_top_of_unfinished_blocks_goes_down_after_them(over: DiskOpener, filled: int) -> None:
    """The second request ends before the first, whose blocks it builds on; where they never come, nothing is left."""
    cache = over()
    chain = cache.space.chain(CHAIN)
    positions = cache.engine.compute(chain)
    plan = cache.space.plan_save(cache.space.chain(CHAIN[:8]), first=0, count=2, tag=cache.engine.region.tag)
    assert plan is not None
    assert cache.space.save(chain, cache.engine.region, positions) == 4
    assert cache.manager.wait(60)
    assert cache.counted("stored") == {}
    memory = cache.manager._chain.tiers[0]
    cache.space._context.chain.mover.gather(memory, plan.rows, cache.engine.region, positions[:2])
    cache.space.finish_save(plan, filled)
    assert cache.manager.wait(60)
    assert cache.counted("stored") == ({"": 6} if filled == 2 else {"": filled} if filled else {})
    cache.forget_above()
    assert cache.load(CHAIN) == (6 if filled == 2 else filled)


def test_what_is_hot_goes_down(over: DiskOpener) -> None:
    """Not before it has been hit often enough, and once."""
    cache = over(ingestion="hot", hot_hits=3)
    cache.save(CHAIN)
    for _ in range(2):
        cache.matched(CHAIN)
    assert cache.manager.wait(60)
    assert cache.counted("stored") == {}
    cache.matched(CHAIN[:8])
    assert cache.manager.wait(60)
    assert cache.counted("stored") == {"": 2}
    for _ in range(5):
        cache.matched(CHAIN)
    assert cache.manager.wait(60)
    assert cache.counted("stored") == {"": 6}


def test_what_leaves_goes_down(over: DiskOpener) -> None:
    """Above the mark, the least recently used move down until the level is as empty as it should be."""
    cache = over(ingestion="evicted", marks=(0.8, 0.5), dram=16)
    for conversation in range(3):
        cache.save(tokens_of(conversation, 4))
    assert cache.counted("stored") == {}
    cache.save(tokens_of(3, 4))
    assert cache.counted("stored") == {"": 8}
    assert cache.counted("evicted", "cpu") == {"kept_below": 8}
    assert [cache.load(tokens_of(n, 4)) for n in range(4)] == [4] * 4


def test_a_hit_comes_up_once(over: DiskOpener) -> None:
    """What is loaded from below is in the first level afterwards, and served from there."""
    cache = over()
    cache.save(CHAIN)
    cache.forget_above()
    assert cache.load(CHAIN) == 6
    assert cache.counted("promoted", "cpu") == {"": 6}
    asked = cache.counted("asked")
    assert cache.load(CHAIN) == 6
    assert cache.counted("asked") == asked
    assert cache.counted("loaded", "cpu") == {"": 6}
    assert cache.counted("stored") == {"": 6}, "what came up went down again"


def test_three_levels_pass_it_up(over: DiskOpener) -> None:
    """From disk to DRAM with the first hit, to the device with the second."""
    cache = over(kind="three")
    cache.save(CHAIN)
    cache.forget_above()
    assert cache.load(CHAIN) == 6
    assert cache.counted("promoted", "cpu") == {"": 6}
    assert cache.load(CHAIN) == 6
    assert cache.manager.wait(60)
    assert cache.counted("promoted", "gpu") == {"": 6}
    assert at_once(cache, CHAIN) == 6


def test_part_of_a_chain_is_in_each_level(over: DiskOpener) -> None:
    """The beginning from above, the rest from below, all of it right."""
    cache = over()
    cache.save(CHAIN)
    cache.forget_above()
    assert cache.load(CHAIN[:8]) == 2
    assert at_once(cache, CHAIN) == 2
    assert cache.load(CHAIN) == 6
    assert cache.counted("loaded") == {"": 6}
    assert cache.counted("loaded", "cpu") == {"": 2}


def test_prefetch_brings_it_up_ahead(over: DiskOpener) -> None:
    """A ticket says when it is there; what is there already needs none."""
    cache = over()
    cache.save(CHAIN)
    cache.forget_above()
    ticket = cache.space.prefetch(cache.space.chain(CHAIN))
    assert ticket is not None
    assert ticket.wait(60)
    assert at_once(cache, CHAIN) == 6
    assert cache.counted("promoted", "cpu") == {"": 6}
    assert cache.space.prefetch(cache.space.chain(CHAIN)) is None
    assert cache.manager.state()["leases"] == 0


def test_blocks_pass_through_where_memory_is_leased(over: DiskOpener) -> None:
    """No slot above can be had: the load goes by way of transit slots, which come back."""
    cache = over(dram=16)
    cache.save(CHAIN)
    cache.forget_above()
    cache.save(tokens_of(2, 16))
    assert cache.space.match(cache.space.chain(tokens_of(2, 16)), "holder").blocks == 16
    assert cache.load(CHAIN) == 6
    assert cache.counted("promoted", "cpu") == {}
    transit = cache.manager._chain.flow.transit
    assert len(transit._free) == transit._slots
    cache.space.release("holder")
    assert cache.load(CHAIN) == 6
    assert cache.counted("promoted", "cpu") == {"": 6}


def test_blocks_that_are_on_their_way_up_are_read_once(over: DiskOpener) -> None:
    """A second request for the same blocks finds them reserved: it passes them through, without a second copy."""
    cache = over()
    cache.save(CHAIN)
    cache.forget_above()
    gate = Gate(cache.store, "read", "after")
    ticket = cache.space.prefetch(cache.space.chain(CHAIN))
    gate.wait()
    assert cache.load(CHAIN) == 6
    gate.open()
    assert ticket is not None
    assert ticket.wait(60)
    assert cache.counted("promoted", "cpu") == {"": 6}


def test_the_least_recently_used_leave_the_disk(over: DiskOpener) -> None:
    """By policy, whole chains from their ends, and within the budget at any time."""
    cache = over(disk_mb=2)
    room = 2 * SEGMENT_SLOTS
    conversations = [tokens_of(n, 12) for n in range(30)]
    for tokens in conversations:
        cache.save(tokens)
        assert used_bytes(over.path) <= 2 << 20
    cache.forget_above()
    assert cache.counted("stored") == {"": 360}
    assert cache.counted("evicted") == {"capacity": 360 - room}
    kept = [cache.load(tokens) for tokens in conversations]
    assert sum(kept) == room
    assert kept[-19:] == [12] * 19
    assert kept == sorted(kept)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "three"])
def test_leased_blocks_do_not_leave_the_disk(over: DiskOpener, kind: Any) -> None:
    """What a request holds stays readable, however much is stored meanwhile."""
    cache = over(disk_mb=1, kind=kind)
    cache.save(CHAIN)
    cache.forget_above()
    chain = cache.space.chain(CHAIN)
    match = cache.space.match(chain, "holder")
    for n in range(2, 30):
        cache.save(tokens_of(n, 8))
    assert cache.space.load(match, cache.engine.region, cache.engine.positions(6)) == 6
    assert cache.engine.versions(chain, 6) == [0] * 6
    cache.space.release("holder")


def test_what_earlier_runs_left_counts(over: DiskOpener) -> None:
    """The budget is of the directory: a second run replaces blocks of the first, a smaller budget removes some."""
    for run in range(3):
        cache = over(disk_mb=2)
        for n in range(20):
            cache.save(tokens_of(100 * run + n, 12))
            assert used_bytes(over.path) <= 2 << 20
        cache.manager.close()
    cache = over(disk_mb=2)
    assert cache.counted("found") == {"": 2 * SEGMENT_SLOTS}
    cache.manager.close()
    cache = over(disk_mb=1)
    assert used_bytes(over.path) <= 1 << 20
    assert 0 < cache.counted("found")[""] <= SEGMENT_SLOTS


def test_processes_keep_one_budget_together(over: DiskOpener) -> None:
    """Three processes write three times what fits: the directory is never larger, and what is in it is right."""
    options = {"disk_mb": 4, "dram": 16}
    with children() as started:
        for number in range(3):
            started.append(Child(work, over.path, number, 90, 10, **options))
        for child in started:
            assert child.answer() == "ready"
        for _ in range(300):
            assert used_bytes(over.path) <= 4 << 20
        for child in started:
            said = child.stop()
            assert not isinstance(said, str), said
            assert said["problems"] == []
            assert said["errors"] == {}
        assert used_bytes(over.path) <= 4 << 20
        started.append(Child(read_all, over.path, 90, 10, **options))
        said = started[-1].answer()
        assert not isinstance(said, str), said
        assert said["done"] > 0
