"""A disk that hangs: loads end in time, what hangs keeps what it fills, and afterwards everything works again."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.faults.conftest import DiskOpener
from tests.faults.harness import DiskCache, Gate, Kind, in_background, tokens_of

from kvcache_factory.engine import fetch
from kvcache_factory.engine.tree import PENDING
from kvcache_factory.errors import StoreError

CHAIN = tokens_of(1, 6)
LONG = tokens_of(2, 10)
FOREVER_S = 30.0
"""Far more than any load here may take, and less than the gate of a hanging read would."""


def below(cache: DiskCache, *conversations: list[int]) -> None:
    """Have *conversations* on the disk and nowhere else."""
    for tokens in conversations:
        cache.save(tokens)
        cache.forget_above()


@pytest.mark.parametrize("kind", ["cpu", "gpu", "three"])
def test_a_load_ends_in_time(over: DiskOpener, kind: Kind) -> None:
    """A store that hangs costs a miss; when it has come to itself, the same blocks are loaded."""
    cache = over(kind=kind)
    below(cache, CHAIN)
    gate = Gate(cache.store, "read")
    begun = time.monotonic()
    assert cache.load_in_vain(CHAIN) == 0
    assert time.monotonic() - begun < FOREVER_S
    assert cache.counted("load_failed") == {"deadline": 6}
    gate.open()
    assert cache.manager.wait(60)
    assert cache.load(CHAIN) == 6


def test_slots_are_not_reused_under_a_read_that_was_given_up(over: DiskOpener) -> None:
    """Whatever needs room meanwhile finds other slots: a late read spoils nobody's block."""
    cache = over(dram=16)
    below(cache, CHAIN)
    gate = Gate(cache.store, "read")
    assert cache.load_in_vain(CHAIN) == 0
    first = cache.manager._chain.tiers[0].index
    landing = np.flatnonzero(first.state == PENDING)
    assert len(landing) == 6
    others = [tokens_of(n, 5) for n in range(10, 14)]
    for tokens in others:
        cache.space.save(
            cache.space.chain(tokens), cache.engine.region, cache.engine.compute(cache.space.chain(tokens))
        )
    assert (first.state[landing] == PENDING).all()
    held = [tokens for tokens in others if cache.space.peek(cache.space.chain(tokens)) == 5]
    assert held
    gate.open()
    assert cache.manager.wait(60)
    assert [cache.load(tokens) for tokens in held] == [5] * len(held)
    assert cache.load(CHAIN) == 6


def test_transit_slots_are_not_reused_either(over: DiskOpener) -> None:
    """The same for slots of blocks that pass through."""
    cache = over(kind="gpu", device=16)
    below(cache, CHAIN, LONG)
    transit = cache.manager._chain.flow.transit
    cache.load(LONG)
    free = len(transit._free)
    gate = Gate(cache.store, "read")
    assert cache.load_in_vain(CHAIN) == 0
    assert len(transit._free) == free - 6
    assert cache.load(LONG) == 10
    gate.open()
    assert cache.manager.wait(60)
    assert len(transit._free) == free


def test_a_disk_with_too_many_given_up_reads_is_out_of_service(over: DiskOpener) -> None:
    """At the cap nothing is asked of it any more, until the reads have ended."""
    cache = over()
    below(cache, CHAIN, LONG)
    gate = Gate(cache.store, "read")
    assert cache.load_in_vain(LONG) == 0
    calls = Gate(cache.store, "read")  # would hold the next
    assert cache.load_in_vain(CHAIN) == 0
    assert not calls.reached.is_set()
    assert cache.counted("load_failed") == {"deadline": 10, "out_of_service": 6}
    calls.open()
    gate.open()
    assert cache.manager.wait(60)
    assert cache.load(CHAIN) == 6
    assert cache.load(LONG) == 10


def test_a_full_lane_does_not_make_the_engine_read(over: DiskOpener) -> None:
    """Where every thread hangs and the queue is full, a load is a miss at once."""
    cache = over(manager_options={"io_threads": 1})
    below(cache, CHAIN, LONG)
    cache.manager._chain.flow.io._max_pending = 1
    gate = Gate(cache.store, "refresh")
    refreshed = in_background(lambda: cache.manager._chain.flow.io.submit(0, cache.disk.refresh))
    gate.wait()
    refreshed()
    cache.manager._chain.flow.io.submit(0, lambda: None)
    assert cache.load_in_vain(CHAIN) == 0
    assert cache.counted("load_failed") == {"queue_full": 6}
    gate.open()
    assert cache.manager.wait(60)
    assert cache.load(CHAIN) == 6


def test_a_disk_that_hangs_gets_one_look_at_a_time(over: DiskOpener) -> None:
    """Look-ups go on, and do not pile up looks at the directory."""
    cache = over(manager_options={"io_threads": 1})
    flow = cache.manager._chain.flow
    flow.settings = msgspec.structs.replace(flow.settings, refresh_s=0.0)
    gate = Gate(cache.store, "refresh")
    for _ in range(20):
        cache.matched(CHAIN)
    gate.wait()
    assert flow.io.pending <= 1
    gate.open()
    assert cache.manager.wait(60)


@pytest.mark.parametrize("failure", ["short", "raises"])
def test_a_read_that_fails_late_hurts_nobody(over: DiskOpener, failure: str) -> None:
    """The blocks it read were dropped since; what was stored since is not blamed."""
    cache = over(dram=160)
    below(cache, CHAIN)
    real = cache.store.read

    def fail(*arguments: Any) -> int:
        if failure == "raises":
            raise StoreError("injected", "eio")
        return 0

    cache.store.read = fail
    gate = Gate(cache.store, "read")
    assert cache.load_in_vain(CHAIN) == 0
    cache.space.drop(cache.space.chain(CHAIN))
    others = [tokens_of(n, 10) for n in range(10, 20)]
    for tokens in others:
        cache.space.save(
            cache.space.chain(tokens), cache.engine.region, cache.engine.compute(cache.space.chain(tokens))
        )
    deadline = time.monotonic() + FOREVER_S
    while cache.counted("stored").get("", 0) < 6 + 100 and time.monotonic() < deadline:
        time.sleep(0.001)
    gate.open()
    assert cache.manager.wait(60)
    cache.store.read = real
    cache.forget_above()
    assert [cache.load(tokens) for tokens in others] == [10] * 10


def test_a_copy_that_fails_gives_everything_back(over: DiskOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that were started ahead let go of their slots when the copy before them has failed."""
    monkeypatch.setattr(fetch, "READ_BYTES", 1)
    cache = over()
    below(cache, LONG)
    mover = cache.manager._chain.mover
    real = mover.scatter

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    mover.scatter = fail
    assert cache.load_in_vain(LONG) == 0
    assert cache.errors() == {"load:RuntimeError": 1}
    mover.scatter = real
    assert cache.manager.wait(60)
    cache.forget_above()
    assert cache.manager._chain.tiers[0].index.used == 0
    assert cache.load(LONG) == 10


@pytest.mark.parametrize("bad", range(10))
def test_only_the_leading_run_of_many_reads_counts(over: DiskOpener, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """Block by block: what lies behind the first bad one is not given out, and its slots come back."""
    monkeypatch.setattr(fetch, "READ_BYTES", 1)
    cache = over()
    below(cache, LONG)
    real = cache.store.read
    row = int(cache.disk.index.rows_of(cache.space.chain(LONG).keys)[bad])

    def read(slots: Any, *rest: Any) -> int:
        return 0 if int(slots[0]) == row else real(slots, *rest)

    cache.store.read = read
    assert cache.load(LONG) == bad
    assert cache.manager.wait(60)
    cache.forget_above()
    assert cache.manager._chain.tiers[0].index.used == 0


def test_closing_waits_for_what_hangs(over: DiskOpener) -> None:
    """Memory is freed when nobody fills it any more."""
    cache = over()
    below(cache, CHAIN)
    gate = Gate(cache.store, "read")
    assert cache.load_in_vain(CHAIN) == 0
    closed = in_background(lambda: cache.manager.close() or True)
    assert cache.matched(CHAIN) >= 0
    gate.open()
    assert closed()
    cache.manager.close()
    assert cache.load_in_vain(CHAIN) == 0
