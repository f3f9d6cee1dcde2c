"""Encoded blocks of memory are decoded by background threads, ahead or while a load waits, and the copies go again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.manager.test_compression import BLOCKS, MIB, TOKENS, Cache, close_sound, gpu, levels

from kvcache_factory import CompressionPolicy, CPUBackend, HierarchicalBackend
from kvcache_factory.engine import packed
from kvcache_factory.engine.ledger import Event
from kvcache_factory.engine.packed import PackedTier

ENCODED = BLOCKS - 2


class Decoded:
    """Who decoded, and how often; a test may hold decoding up."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()

    @property
    def count(self) -> int:
        return len(self.threads)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    seen, decode = Decoded(), PackedTier.decode

    def watched(tier: PackedTier, row: int, out: Any) -> str | None:
        seen.threads.append(threading.current_thread().name)
        assert seen.may_go.wait(60)
        return decode(tier, row, out)

    monkeypatch.setattr(PackedTier, "decode", watched)
    return seen


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[Cache] = []

    def make(backend: Any = None, method: str = "int8") -> Cache:
        policy = CompressionPolicy(method, threshold_step=50)
        made.append(Cache(backend or gpu(), compression_policy=policy))
        return made[-1]

    yield make
    close_sound(made)


def saved(cache: Cache, tokens: Any = TOKENS) -> Any:
    assert cache.save(tokens) == len(tokens) // 64
    return cache.space.chain(tokens)


def brought(cache: Cache, chain: Any) -> None:
    ticket = cache.space.prefetch(chain)
    assert ticket is not None
    assert ticket.wait(60)


def memory_of(cache: Cache) -> PackedTier:
    tier = cache.manager._chain.tiers[0]
    assert isinstance(tier, PackedTier)
    return tier


def test_no_engine_decodes_on_its_own_thread(opened: Any, decoded: Decoded) -> None:
    """A load that nobody prefetched waits for the background threads."""
    cache = opened()
    saved(cache)
    errors = cache.load(TOKENS)
    assert len(errors) == BLOCKS
    assert errors[0] == errors[-1] == 0
    assert all(0 < error < 0.01 for error in errors[1:-1])
    assert decoded.count == ENCODED
    assert all(name.startswith("kvcache-factory-io") for name in decoded.threads)


@pytest.mark.parametrize("method", ["int8", "bf16x"])
def test_after_a_prefetch_a_load_only_copies(opened: Any, decoded: Decoded, method: str) -> None:
    """What was decoded ahead takes slots until the request ends; what is encoded stays as it is all the while."""
    cache = opened(method=method)
    chain = saved(cache)
    held = cache.tier()["held_bytes"]
    brought(cache, chain)
    assert decoded.count == ENCODED
    assert cache.tier()["held_bytes"] == held + ENCODED * memory_of(cache).slots.slot_bytes
    assert len(cache.load(TOKENS)) == BLOCKS
    assert decoded.count == ENCODED
    assert cache.manager.wait(60)
    assert cache.tier()["held_bytes"] == held
    assert cache.tier()["encoded_blocks"] == ENCODED
    assert cache.count("encoded") == ENCODED
    assert cache.count("kept_raw") == 0


def test_plans_of_loads_have_what_need_not_be_decoded(opened: Any, decoded: Decoded) -> None:
    """An engine that copies by itself is told that encoded blocks are deeper, until they were prefetched."""
    cache = opened()
    chain = saved(cache)
    for ready in (1, BLOCKS):
        match = cache.space.match(chain, "r")
        assert match.blocks == BLOCKS
        assert cache.space.ready_in_memory(chain) == ready
        assert cache.space.held_in_memory(chain) == BLOCKS
        before = decoded.count
        plan = cache.space.plan_load(match, BLOCKS)
        assert len(plan.rows) == len(set(plan.rows.tolist())) == ready
        assert decoded.count == before
        cache.space.release("r")
        if ready == 1:
            brought(cache, chain)
    assert threading.current_thread().name not in decoded.threads
    assert cache.space.prefetch(chain) is None or cache.manager.wait(60)


def test_readers_share_what_was_decoded(opened: Any, decoded: Decoded) -> None:
    """One decode for all that hold a block; the copy goes with the last of them."""
    cache = opened()
    chain = saved(cache)
    held = cache.tier()["held_bytes"]
    matches = [cache.space.match(chain, request) for request in ("a", "b")]
    for match in matches:
        assert cache.space.load(match, cache.there.region, cache.there.positions(BLOCKS)) == BLOCKS
    assert decoded.count == ENCODED
    cache.space.release("a")
    assert cache.manager.wait(60)
    assert cache.tier()["held_bytes"] > held
    assert cache.space.load(matches[1], cache.there.region, cache.there.positions(BLOCKS)) == BLOCKS
    assert decoded.count == ENCODED
    cache.space.release("b")
    assert cache.manager.wait(60)
    assert cache.tier()["held_bytes"] == held


def test_a_release_during_a_load_lets_go_afterwards(opened: Any, decoded: Decoded) -> None:
    cache = opened()
    chain = saved(cache)
    held = cache.tier()["held_bytes"]
    match = cache.space.match(chain, "r")
    decoded.may_go.clear()
    loader = threading.Thread(target=cache.space.load, args=(match, cache.there.region, cache.there.positions(BLOCKS)))
    loader.start()
    while not decoded.count:
        loader.join(0.01)
    cache.space.release("r")
    decoded.may_go.set()
    loader.join()
    assert cache.manager.wait(60)
    assert cache.tier()["held_bytes"] == held


def test_a_load_waits_no_longer_than_for_a_disk(opened: Any, decoded: Decoded) -> None:
    """Past the deadline the request computes; what was begun ends by itself and gives back what it held."""
    cache = opened()
    chain = saved(cache)
    held = cache.tier()["held_bytes"]
    fetcher = cache.manager._chain.flow.fetcher(0)
    fetcher._max_wait_s = 0.01
    decoded.may_go.clear()
    match = cache.space.match(chain, "r")
    assert cache.space.load(match, cache.there.region, cache.there.positions(BLOCKS)) == 1
    assert cache.count("load_failed", "deadline") == ENCODED
    assert fetcher.abandoned == ENCODED
    cache.space.release("r")
    decoded.may_go.set()
    assert cache.manager.wait(60)
    assert fetcher.abandoned == 0
    memory_of(cache).fold(everything=True)
    assert cache.tier()["held_bytes"] == held
    fetcher._max_wait_s = 60
    assert len(cache.load(TOKENS)) == BLOCKS


@pytest.mark.parametrize("ahead", [False, True], ids=["load", "prefetch"])
def test_what_cannot_be_decoded_is_a_miss(opened: Any, ahead: bool) -> None:
    """A damaged block leaves with what is built on it; those before it are served."""
    cache = opened()
    chain = saved(cache)
    memory = memory_of(cache)
    row = int(memory.index.rows_of(chain.keys)[4])
    chunk = int(memory._chunks[row][0])
    memory.slots.view[
        chunk // packed.PER_SLOT, chunk % packed.PER_SLOT * memory.slots.slot_bytes // packed.PER_SLOT
    ] ^= 1
    if ahead:
        brought(cache, chain)
        assert len(cache.load(TOKENS)) == 4
    else:
        match = cache.space.match(chain, "r")
        assert cache.space.load(match, cache.there.region, cache.there.positions(BLOCKS)) == 4
        cache.space.release("r")
    assert cache.count("load_failed", "checksum") > 0
    assert cache.manager.wait(60)
    assert cache.space.peek(chain) == 4
    assert memory._staged == 0 or memory.fold(everything=True)
    assert memory._staged == 0


def test_copies_take_half_of_the_slots_at_most(opened: Any, decoded: Decoded) -> None:
    """In a tier that is full of encoded blocks, some leave for them; the rest of a long chain is loaded by way of
    transit."""
    cache = opened(gpu(4), "rot4")
    for first in range(8):
        cache.save([first, *TOKENS[1:]])
    memory = memory_of(cache)
    chain = cache.space.chain([7, *TOKENS[1:]])
    for number in (5, 6, 7):
        ticket = cache.space.prefetch(cache.space.chain([number, *TOKENS[1:]]))
        assert ticket is None or ticket.wait(60)
        assert memory._staged <= memory._most_staged < memory._slab_slots
        assert cache.tier()["held_bytes"] <= cache.tier()["budget_bytes"]
    match = cache.space.match(chain, "r")
    assert cache.space.load(match, cache.there.region, cache.there.positions(BLOCKS)) == match.blocks > 1
    cache.space.release("r")


def test_what_nobody_came_for_goes_after_a_while(opened: Any, decoded: Decoded) -> None:
    """The end of another request leaves it, the end of its time does not; and whoever needs a slot takes it."""
    cache = opened()
    chain = saved(cache)
    saved(cache, [9, *TOKENS[1:64]])
    held, memory = cache.tier()["held_bytes"], memory_of(cache)
    brought(cache, chain)
    cache.load([9, *TOKENS[1:64]])
    assert cache.manager.wait(60)
    assert memory._staged == ENCODED
    begun = memory._clock()
    memory._clock = lambda: begun + packed.STAGED_S + 1
    cache.load([9, *TOKENS[1:64]])
    assert cache.manager.wait(60)
    assert memory._staged == 0
    assert cache.tier()["held_bytes"] == held
    brought(cache, chain)
    assert memory.fold(everything=True) == ENCODED


def test_a_disk_gets_the_encoded_bytes_of_what_is_decoded(opened: Any, tmp_path: Path, decoded: Decoded) -> None:
    """A copy beside a block does not make it larger on its way down, nor is it encoded again."""
    cache = opened(levels(tmp_path, ingestion="evicted"))
    chain = saved(cache)
    brought(cache, chain)
    memory, disk = cache.manager._chain.tiers
    before = decoded.count
    tip = int(memory.index.rows_of(chain.keys)[-1])
    memory.index.pin(tip)
    cache.manager._chain.flow.copy_chain(0, tip, 1, Event.DEMOTED)
    assert decoded.count == before
    assert disk.held_bytes < 0.7 * BLOCKS * disk.spec.slot_bytes
    cache.manager.evict(BLOCKS)
    errors = cache.load(TOKENS)
    assert len(errors) == BLOCKS
    assert all(error < 0.01 for error in errors)


def test_memory_below_a_device_is_decoded_in_the_background_too(opened: Any, decoded: Decoded) -> None:
    """A hit in the second level: decoded beside its blocks, copied, and then brought to the first level."""
    backend = HierarchicalBackend([gpu(4), CPUBackend(size_gb=16 * MIB, huge_pages=False)])
    cache = opened(backend)
    saved(cache)
    for tier in cache.manager._chain.tiers:
        assert isinstance(tier, PackedTier)
    cache.manager.evict(BLOCKS)
    match = cache.space.match(cache.space.chain(TOKENS), "r")
    assert {segment.tier for segment in match.segments} == {1}
    assert cache.space.load(match, cache.there.region, cache.there.positions(BLOCKS)) == BLOCKS
    cache.space.release("r")
    assert cache.manager.wait(60)
    assert decoded.count >= ENCODED
    assert all(name.startswith("kvcache-factory-io") for name in decoded.threads)
    assert np.isfinite(cache.there.block(5)).all()
