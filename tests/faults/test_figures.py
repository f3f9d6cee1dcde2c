"""Every figure adds up: under concurrency and after faults, per tier, per session and per reason."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.faults.conftest import DiskOpener
from tests.faults.harness import BLOCK, DiskCache, tokens_of

from kvcache_factory.engine.ledger import MANAGER, Event
from kvcache_factory.testing import FakeEngine, Opener

THREADS, ROUNDS = 6, 40


def violations(manager: Any) -> list[str]:
    """Identities of the ledger that do not hold, as sentences; no request is at work."""
    ledger, problems = manager.ledger, manager.check()
    for tier in manager._chain.tiers:
        came = sum(ledger.total(event, tier.name).nbytes for event in (Event.STORED, Event.FOUND))
        left = sum(ledger.total(event, tier.name).nbytes for event in (Event.EVICTED, Event.DROPPED))
        held = tier.index.ready * tier.block_bytes
        if came != held + left:
            problems.append(f"{tier.name}: {came} bytes came, {held} are held and {left} left")
        if ledger.total(Event.UNUSED, tier.name).blocks > ledger.total(Event.EVICTED, tier.name).blocks:
            problems.append(f"{tier.name}: more blocks left unused than left")
    sessions = manager.state()["sessions"]
    for event, key in ((Event.ASKED, "asked_tokens"), (Event.HIT, "reused_tokens")):
        counted = ledger.total(event, MANAGER).blocks * BLOCK
        if sum(row[key] // BLOCK * BLOCK for row in sessions) != counted:
            problems.append(f"sessions: their {key} are not the {counted} that were counted")
    reasons: Counter[tuple[str, str]] = Counter()
    for row in ledger.rows():
        reasons[str(row["tier"]), str(row["event"])] += int(row["blocks"])
    for (tier, event), blocks in reasons.items():
        if ledger.total(Event(event), tier).blocks != blocks:
            problems.append(f"{tier}: the reasons of {event} are not its sum")
    return problems


def use(cache: DiskCache, session: str, seed: int) -> None:
    """A user who saves and loads conversations that others have, too."""
    engine, random = FakeEngine(cache.space.spec, 64), np.random.default_rng(seed)
    for turn in range(ROUNDS):
        chain = cache.space.chain(tokens_of(int(random.integers(5)), int(random.integers(1, 9))))
        name = f"{session}-{turn}"
        match = cache.space.match(chain, name, session=session)
        loaded = cache.space.load(match, engine.region, engine.positions(match.blocks))
        assert engine.versions(chain, loaded) == [0] * loaded
        cache.space.save(chain, engine.region, engine.compute(chain), session=session)
        cache.space.release(name)


@pytest.mark.parametrize("kind", ["cpu", "three"])
def test_figures_add_up_under_concurrency(over: DiskOpener, kind: Any) -> None:
    """Six users on tiers that are too small for them: nothing is counted twice or not at all."""
    cache = over(kind=kind, dram=12, manager_options={"enable_metrics": True})
    names = [f"user-{number}" for number in range(THREADS)]
    for name in names:
        cache.manager.create_session(name)
    threads = [threading.Thread(target=use, args=(cache, name, seed)) for seed, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.manager.wait(60)
    assert violations(cache.manager) == []
    state = cache.manager.state()
    assert sum(row["requests"] for row in state["sessions"]) == THREADS * ROUNDS
    assert 0 < state["served_tokens"] <= state["reusable_tokens"]
    assert {row["operation"] for row in state["durations"]} >= {"match", "save", "load", "demote"}


def test_figures_add_up_after_faults(over: DiskOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot be read: hits that were not served are history that was found and not loaded."""
    cache = over()
    cache.manager.create_session("one")
    cache.save(tokens_of(1, 6), session="one")
    cache.forget_above()

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with cache.manager.use_session("one"):
            assert cache.load(tokens_of(1, 6)) == 0
    assert cache.counted("store_error")["eio"] >= 1
    assert cache.counted("load_failed") == {"eio": 6}
    assert cache.counted("reusable", MANAGER) == {"": 6}
    assert cache.counted("recomputed", MANAGER) == {"not_loaded": 6}
    with cache.manager.use_session("one"):
        cache.load(tokens_of(1, 6))
    assert cache.manager.wait(60)
    assert violations(cache.manager) == []
    assert cache.counted("recomputed", MANAGER) == {"not_loaded": 6, "gone": 6}


def test_history_that_has_left_is_told_from_what_was_never_there(open_cache: Opener) -> None:
    """The hit rate knows what could have been served: a new prompt is no miss, an evicted one is."""
    cache = open_cache(8)
    cache.load(list(range(16)))
    assert cache.manager.state()["hit_rate"] is None
    cache.save(list(range(16)))
    cache.load(list(range(20)))
    assert cache.manager.state()["hit_rate"] == 1.0
    cache.manager.evict(2)
    cache.load(list(range(16)))
    state = cache.manager.state()
    assert (state["reusable_tokens"], state["served_tokens"]) == (32, 24)
    assert cache.manager.ledger.total(Event.RECOMPUTED, MANAGER, "gone").blocks == 2


def test_a_request_counts_once_however_often_it_looks(open_cache: Opener) -> None:
    """The last look is what the request got; one that loads nothing was served nothing."""
    cache = open_cache(8)
    cache.save(list(range(16)))
    chain = cache.space.chain(list(range(16)))
    for _ in range(3):
        match = cache.space.match(chain, "r")
    assert cache.space.load(match, cache.engine.region, cache.engine.positions(2)) == 2
    cache.space.release("r")
    cache.space.release("r")
    counted = {event: cache.manager.ledger.total(event, MANAGER).blocks for event in (Event.REUSABLE, Event.SERVED)}
    assert counted == {Event.REUSABLE: 4, Event.SERVED: 2}


def test_what_was_found_and_computed_by_choice_is_counted_apart(open_cache: Opener) -> None:
    """An engine that plans its loads itself says how much it uses, and why not more."""
    cache = open_cache(8)
    cache.save(list(range(16)))
    for declined in (True, False):
        match = cache.space.match(cache.space.chain(list(range(16))), "r")
        cache.space.serve(match, 1, declined=declined)
        assert len(cache.space.plan_load(match, 1).rows) == 1
        cache.space.release("r")
    reasons = {row["reason"]: row["blocks"] for row in cache.manager.ledger.rows() if row["event"] == "recomputed"}
    assert reasons == {"chosen": 3, "not_loaded": 3}


def test_what_leaves_before_its_first_reuse_is_counted(open_cache: Opener) -> None:
    """Two of four blocks were found before all of them had to leave."""
    cache = open_cache(8)
    cache.save(list(range(16)))
    cache.load(list(range(8)))
    cache.manager.evict(4)
    assert cache.manager.ledger.total(Event.UNUSED, "cpu").blocks == 2


def test_waiting_for_the_index_is_measured(open_cache: Opener) -> None:
    """Only where somebody had to wait."""
    cache = open_cache(8, enable_metrics=True)
    index = cache.manager.first_index
    chain = cache.space.chain(list(range(16)))
    assert "lock_wait" not in {row["operation"] for row in cache.manager.state()["durations"]}
    with index._lock:
        thread = threading.Thread(target=cache.space.peek, args=(chain,))
        thread.start()
        while not (thread.is_alive() and cache.manager.ledger.timed and thread.ident):
            pass
        thread.join(0.2)  # it cannot end while the lock is held
        assert thread.is_alive()
    thread.join()
    waits = [row for row in cache.manager.state()["durations"] if row["operation"] == "lock_wait"]
    assert [(row["tier"], row["count"]) for row in waits] == [("cpu", 1)]


def test_what_a_codec_stores_is_counted(over: DiskOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encryption keeps the size, so its ratio is 1; the metric says which codec it was."""
    pytest.importorskip("cryptography")
    monkeypatch.setenv("KEY_OF_THE_TEST", "ab" * 32)
    cache = over(key_env="KEY_OF_THE_TEST")
    cache.save(tokens_of(1, 6))
    (codec,) = cache.counted("encoded")
    samples = {s.name: s.value for f in cache.manager.registry.collect() for s in f.samples if s.labels.get("codec")}
    assert codec == cache.disk.codec.name  # type: ignore[union-attr]
    assert samples == {"kvcache_factory_encoded_blocks_total": 6, "kvcache_factory_codec_ratio": 1.0}
