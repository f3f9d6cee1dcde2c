"""Blocks that shrink in memory and on their way to a disk: fewer bytes, known error, and marked for everybody."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache_factory import (
    CacheManager,
    CompressionPolicy,
    CPUBackend,
    DiskBackend,
    GPUBackend,
    HierarchicalBackend,
    LFUEvictionPolicy,
    LRUEvictionPolicy,
)
from kvcache_factory.backend import RemoteBackend
from kvcache_factory.block.key import KeyChain
from kvcache_factory.block.spec import BlockSpec, KVDtype, Layout
from kvcache_factory.codec import calibration, names
from kvcache_factory.codec.values import from_bf16, narrow
from kvcache_factory.engine.ledger import Event
from kvcache_factory.errors import ConfigError
from kvcache_factory.testing import FakeEngine, tiny_identity

SPEC = BlockSpec(KVDtype.BF16, num_layers=2, num_kv_heads=2, head_dim=64, block_tokens=64)
MIB = 1 / 1024
BLOCKS = 12
NAN, INFINITY = 0x7FC0, 0x7F80
TOKENS = list(range(BLOCKS * 64))


class Engine(FakeEngine):
    """KV that looks like KV: seeded by the tokens, some channels larger than others."""

    def compute(self, chain: KeyChain, version: int = 0, bad: int = -1, odd: int = NAN) -> Any:
        for i, tokens in enumerate(chain.token_blocks):
            payload = np.empty(SPEC.payload_bytes, np.uint8)
            narrow(kv_of(tokens, version), SPEC, Layout.LCND, payload)
            self._block(i)[:] = payload.reshape(self._block(i).shape)
            if i == bad:
                self._block(i).view(np.uint16)[0, 0, 0, 0, 0] = odd
        return self.positions(chain.num_blocks)

    def block(self, i: int) -> Any:
        """float32 [layers, 2, tokens, heads, head_dim]"""
        return from_bf16(np.ascontiguousarray(self._block(i)).view(np.uint16))


def kv_of(tokens: Any, version: int = 0) -> Any:
    seed = int.from_bytes(hashlib.blake2b(tokens.tobytes() + bytes([version])).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    shape = (SPEC.num_layers, 2, SPEC.num_kv_heads, SPEC.block_tokens, SPEC.head_dim)
    return (rng.normal(0, 1, shape) * np.exp(rng.normal(0, 1, (*shape[:3], 1, shape[-1])))).astype(np.float32)


class Cache:
    """A manager, its key space and two engines: one that computes and one that loads."""

    def __init__(self, backend: Any, **options: Any) -> None:
        self.manager = CacheManager(backend, **options)
        self.space = self.manager.register(SPEC, tiny_identity(SPEC))
        self.here, self.there = Engine(SPEC, 64), Engine(SPEC, 64)

    def save(self, tokens: Any, session: str | None = None, **options: Any) -> int:
        chain = self.space.chain(tokens)
        stored = self.space.save(chain, self.here.region, self.here.compute(chain, **options), session=session)
        assert self.manager.wait(60)
        return stored

    def load(self, tokens: Any) -> list[float]:
        """Error of each block that came back, relative to the largest element of its plane."""
        chain = self.space.chain(tokens)
        self.here.compute(chain)
        match = self.space.match(chain, "r")
        self.there.erase()
        count = self.space.load(match, self.there.region, self.there.positions(match.blocks))
        self.space.release("r")
        assert count == match.blocks
        return [relative_error(self.here.block(i), self.there.block(i)) for i in range(count)]

    def count(self, event: str, reason: str | None = None, tier: str | None = None) -> int:
        rows = [r for r in self.manager.state()["events"] if tier in (None, r["tier"])]
        return sum(r["blocks"] for r in rows if r["event"] == event and reason in (None, r["reason"]))

    def tier(self, number: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.manager.state()["tiers"][number]
        return found


def close_sound(caches: list[Cache]) -> None:
    """Close them; none may have broken an invariant."""
    for cache in caches:
        assert cache.manager.wait(60)
        problems = cache.manager.check()
        cache.manager.close()
        assert problems == []


def relative_error(before: Any, after: Any) -> float:
    axes = (2, 3, 4)
    return float((np.abs(before - after).max(axis=axes) / np.abs(before).max(axis=axes)).max())


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A memory level leaves its table in the user's cache, where every reader looks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens caches; none may have broken an invariant when the test ends."""
    caches: list[Cache] = []

    def make(backend: Any, **options: Any) -> Cache:
        caches.append(Cache(backend, **options))
        return caches[-1]

    yield make
    close_sound(caches)


def gpu(size_mb: float = 16) -> GPUBackend:
    return GPUBackend(device="cpu", size_gb=size_mb * MIB)


def levels(path: Path, codec: str | None = None, size_mb: int = 8, **more: Any) -> HierarchicalBackend:
    disk = DiskBackend(str(path / "disk"), size_gb=size_mb * MIB, segment_mb=1, codec=codec, **more)
    return HierarchicalBackend([CPUBackend(size_gb=16 * MIB, huge_pages=False), disk])


# -- in memory --------------------------------------------------------------------------------------------------------


def test_bytes_held_fall_as_documented(opened: Any) -> None:
    """Part 4.4 on a single device: after 50 steps a block is int8; the first and the most recent stay exact."""
    policy = CompressionPolicy(method="int8", threshold_step=50)
    exact = opened(gpu(), eviction_policy=LFUEvictionPolicy(max_size_gb=1.5))
    small = opened(gpu(), eviction_policy=LFUEvictionPolicy(max_size_gb=1.5), compression_policy=policy)
    for cache in (exact, small):
        assert cache.save(TOKENS) == BLOCKS
    assert small.manager.state()["compression"] == "int8"
    assert small.tier()["encoded_blocks"] == BLOCKS - 2
    held = [cache.tier()["held_bytes"] for cache in (exact, small)]
    assert held[1] < 0.65 * held[0]
    errors = small.load(TOKENS)
    assert len(errors) == BLOCKS
    assert errors[0] == errors[-1] == 0
    assert all(0 < error < 0.01 for error in errors[1:-1])
    assert small.load(TOKENS) == errors
    assert exact.load(TOKENS) == [0] * BLOCKS


def test_blocks_become_small_as_the_chain_grows(opened: Any) -> None:
    """What was recent is not any more; what follows a lossy block is marked; nothing is encoded twice."""
    cache = opened(gpu(), compression_policy=CompressionPolicy(threshold_step=50))
    cache.save(TOKENS[: 3 * 64])
    assert cache.tier()["encoded_blocks"] == 1
    chain = cache.space.chain(TOKENS[: 3 * 64])
    match = cache.space.match(chain, "r")
    chain.extend(TOKENS[3 * 64 :])
    assert cache.space.save(chain, cache.here.region, cache.here.compute(chain)) == BLOCKS - 3
    cache.space.release(match.request_id)
    assert cache.manager.wait(60)
    index = cache.manager.first_index
    rows = index.rows_of(chain.keys)
    assert index.fidelity[rows[:3]].tolist() == [0, 1, 0] or index.fidelity[rows[:3]].tolist() == [0, 1, 1]
    assert (index.fidelity[rows[3:]] == 1).all()
    cache.save(TOKENS)  # nobody holds them now
    assert cache.tier()["encoded_blocks"] == BLOCKS - 2
    assert cache.count("encoded") == BLOCKS - 2


@pytest.mark.parametrize("hurried", ["encode", "copy"])
def test_what_a_copy_to_the_disk_held_is_encoded_after_it(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurried: str
) -> None:
    """Whichever of the two jobs is first: each copy is made small once, from what was exact, and none is left over."""
    cache = opened(levels(tmp_path), compression_policy=CompressionPolicy(threshold_step=50))
    flow, tried, left = cache.manager._chain.flow, threading.Event(), threading.Event()
    copy, encode = flow.copy_chain, flow._encode

    def late_copy(*args: Any) -> None:
        assert hurried == "copy" or tried.wait(60)
        copy(*args)
        left.set()

    def late_encode(number: int) -> None:
        assert hurried == "encode" or left.wait(60)
        encode(number)
        tried.set()

    monkeypatch.setattr(flow, "copy_chain", late_copy)
    monkeypatch.setattr(flow, "_encode", late_encode)
    cache.save(TOKENS)
    assert [cache.count("encoded", "int8", tier) for tier in ("cpu", "disk")] == [BLOCKS - 2] * 2
    assert [tier.index.codings.max() for tier in cache.manager._chain.tiers] == [1, 1]
    assert cache.count("kept_raw") == 0


def test_blocks_are_encoded_by_one_job_at_a_time(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would each hold what the other is about to encode, and both leave it."""
    policy = CompressionPolicy(threshold_step=50, tiers=("cpu",))
    cache = opened(levels(tmp_path, ingestion="evicted"), compression_policy=policy)
    flow, memory = cache.manager._chain.flow, cache.manager._chain.tiers[0]
    encode, inside, most = memory.encode, 0, 0
    second = threading.Thread(target=flow._encode, args=(0,))

    def watched(rows: Any) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if second.ident is None:
            second.start()
            second.join(0.2)  # as long as this job lasts, that one waits
        done: int = encode(rows)
        inside -= 1
        return done

    monkeypatch.setattr(memory, "encode", watched)
    cache.save(TOKENS)
    second.join()
    assert most == 1
    assert cache.tier()["encoded_blocks"] == BLOCKS - 2


def test_what_somebody_holds_stays_where_it_is(opened: Any) -> None:
    """A lease promises its bytes: blocks under it are encoded after it has ended, not before."""
    cache = opened(gpu(), compression_policy=CompressionPolicy(threshold_step=50))
    chain = cache.space.chain(TOKENS)
    space, engine = cache.space, cache.here
    positions = engine.compute(chain)
    assert space.save(chain, engine.region, positions[:2]) == 2
    assert cache.manager.wait(60)
    assert space.match(chain, "holder").blocks == 2
    assert space.save(chain, engine.region, positions, request_id="holder") == BLOCKS - 2
    assert cache.manager.wait(60)
    assert cache.tier()["encoded_blocks"] == 0
    space.release("holder")
    assert cache.manager.wait(60)
    assert cache.tier()["encoded_blocks"] == BLOCKS - 2


def test_more_blocks_fit_into_the_same_bytes(opened: Any) -> None:
    """With rot4 a tier holds more than twice the blocks that it has slots for, within its budget; nothing is wrong."""
    policy = CompressionPolicy(method="rot4", threshold_step=50)
    counts = []
    for chosen in (None, policy):
        cache = opened(gpu(3), compression_policy=chosen)
        for first in range(8):
            cache.save([first, *TOKENS[1:]])
        state = cache.tier()
        assert state["held_bytes"] <= state["budget_bytes"]
        counts.append(state["held_blocks"])
        for first in range(8):
            errors = cache.load([first, *TOKENS[1:]])
            assert all(error < 0.3 for error in errors)
    assert counts[1] > 1.8 * counts[0]


def test_age_place_and_levels_decide_too(opened: Any) -> None:
    for policy, encoded in (
        (CompressionPolicy(min_age_s=3600), 0),
        (CompressionPolicy(tiers=("disk",)), 0),
        (CompressionPolicy(keep_first=4), BLOCKS - 5),
        (CompressionPolicy(keep_recent=256), BLOCKS - 5),
        (CompressionPolicy(method="bf16x", keep_first=0), BLOCKS - 1),
    ):
        cache = opened(gpu(), compression_policy=policy)
        cache.save(TOKENS)
        assert cache.tier().get("encoded_blocks", 0) == encoded, policy


def test_blocks_are_encoded_once_they_are_old_enough(opened: Any) -> None:
    """The age is that since they were stored or used, whatever else is stored in the meantime."""
    cache = opened(gpu(), compression_policy=CompressionPolicy(min_age_s=60))
    memory = cache.manager._chain.tiers[0]
    begun = memory._clock()
    cache.save(TOKENS)
    for seconds, encoded in ((59, 0), (100_000, BLOCKS - 2)):
        memory._clock = lambda later=begun + seconds: later
        cache.save([seconds, *TOKENS[1:64]])
        assert cache.tier()["encoded_blocks"] == encoded


def test_hot_blocks_stay_exact(opened: Any) -> None:
    """Blocks that were hit, while they were held and so not encoded, are not encoded after that either."""
    cache = opened(gpu(), compression_policy=CompressionPolicy(max_hits=0))
    chain = cache.space.chain(TOKENS)
    positions = cache.here.compute(chain)
    cache.space.save(chain, cache.here.region, positions[:1])
    assert cache.space.match(chain, "holder").blocks == 1
    cache.space.save(chain, cache.here.region, positions, request_id="holder")
    for request, tokens in (("again", TOKENS[: 6 * 64]), ("holder", [])):
        if tokens:
            assert cache.space.match(cache.space.chain(tokens), request).blocks == 6
        cache.space.release(request)
    assert cache.manager.wait(60)
    assert cache.tier()["encoded_blocks"] == BLOCKS - 7


def test_policies_can_have_blocks_encoded_before_they_leave(opened: Any) -> None:
    """``action="compress"``: nothing is touched while there is room; then what the policy chooses becomes small."""
    cache = opened(gpu(3), eviction_policy=LRUEvictionPolicy(action="compress"))
    assert cache.manager.state()["compression"] == "int8"
    cache.save(TOKENS)
    assert cache.tier()["encoded_blocks"] == 0
    for first in range(4):
        cache.save([first + 100, *TOKENS[1:]])
    assert cache.tier()["encoded_blocks"] > 0
    assert cache.tier()["held_bytes"] <= cache.tier()["budget_bytes"]
    assert all(error < 0.01 for error in cache.load([103, *TOKENS[1:]]))


def test_what_cannot_be_encoded_stays_and_is_counted(opened: Any) -> None:
    """NaN in one block, and a bound that nothing keeps: raw, counted, and not tried again."""
    cache = opened(gpu(), compression_policy=CompressionPolicy())
    cache.save(TOKENS, bad=3)
    assert cache.tier()["encoded_blocks"] == BLOCKS - 3
    assert cache.count("kept_raw", "not_finite") == 1
    strict = opened(gpu(), compression_policy=CompressionPolicy(options={"max_rel_error": 1e-4}))
    for _ in range(2):
        strict.save(TOKENS)
    assert strict.count("kept_raw", "bound_exceeded") == BLOCKS - 2
    assert strict.load(TOKENS) == [0] * BLOCKS


def test_lossless_codecs_leave_blocks_exact(opened: Any) -> None:
    """bf16x in memory: fewer bytes, the same bits, and exact for whoever asks."""
    cache = opened(gpu(), compression_policy=CompressionPolicy(method="bf16x"))
    cache.save(TOKENS)
    assert cache.tier()["encoded_blocks"] == BLOCKS - 2
    assert cache.load(TOKENS) == [0] * BLOCKS
    assert not cache.manager.first_index.fidelity.any()


def test_encoded_blocks_move_down_as_they_are(opened: Any, tmp_path: Path) -> None:
    """To a disk that takes what leaves: encoded once, never a second time, and small there too."""
    disk = DiskBackend(str(tmp_path), size_gb=8 * MIB, segment_mb=1, ingestion="evicted")
    cache = opened(HierarchicalBackend([gpu(), disk]), compression_policy=CompressionPolicy(method="int8"))
    cache.save(TOKENS)
    memory, lower = cache.manager._chain.tiers
    tip = int(memory.index.rows_of(cache.space.chain(TOKENS).keys)[-1])
    memory.index.pin(tip)
    cache.manager._chain.flow.copy_chain(0, tip, 1, Event.DEMOTED)
    assert cache.count("kept_raw", "coded_already") == BLOCKS - 2
    assert lower.index.codings.max() == 1
    assert lower.held_bytes < 0.7 * BLOCKS * SPEC.slot_bytes
    cache.manager.evict(BLOCKS)
    errors = cache.load(TOKENS)
    assert len(errors) == BLOCKS
    assert errors[0] == errors[-1] == 0
    assert all(0 < error < 0.01 for error in errors[1:-1])


@pytest.mark.parametrize("odd", [NAN, INFINITY, INFINITY | 0x8000])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_what_is_no_number_comes_back_as_it_was(opened: Any, tmp_path: Path, on_disk: bool, odd: int) -> None:
    """The block that holds it is stored raw, bit for bit, and counted once; the others are encoded."""
    policy = None if on_disk else CompressionPolicy()
    cache = opened(levels(tmp_path, "int8") if on_disk else gpu(), compression_policy=policy)
    cache.save(TOKENS, bad=3, odd=odd)
    wanted = cache.here.block(3).copy()
    assert cache.count("kept_raw", "not_finite") == 1
    assert cache.count("encoded", "int8") == BLOCKS - 3
    if on_disk:
        assert cache.manager.evict(BLOCKS) == BLOCKS
    chain = cache.space.chain(TOKENS)
    match = cache.space.match(chain, "r")
    assert cache.space.load(match, cache.there.region, cache.there.positions(match.blocks)) == BLOCKS
    cache.space.release("r")
    assert np.array_equal(cache.there.block(3), wanted, equal_nan=True)


def test_a_bound_that_is_exceeded_keeps_blocks_raw_on_a_disk_too(opened: Any, tmp_path: Path) -> None:
    """Stored as they are, exact, and counted with the reason."""
    cache = opened(levels(tmp_path, "int8:max_rel_error=0.0001"))
    cache.save(TOKENS)
    assert cache.count("kept_raw", "bound_exceeded") == BLOCKS - 2
    cache.manager.close()
    assert opened(levels(tmp_path)).load(TOKENS) == [0] * BLOCKS


# -- on a disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"key_env": "KVCACHE_TEST_KEY"}], ids=["clear", "encrypted"])
def test_a_disk_holds_encoded_blocks(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    """Smaller slots; a restart reads them within the bound; a manager that wants exact blocks sees a miss."""
    monkeypatch.setenv("KVCACHE_TEST_KEY", "07" * 32)
    writer = opened(levels(tmp_path, "int8", **more))
    writer.save(TOKENS)
    held = writer.tier(1)["held_bytes"]
    assert held < 0.7 * BLOCKS * SPEC.slot_bytes
    assert writer.count("encoded", "int8") == BLOCKS - 2
    assert writer.load(TOKENS) == [0] * BLOCKS  # memory still has what was computed
    writer.manager.close()
    reader = opened(levels(tmp_path, "int8", **more))
    errors = reader.load(TOKENS)
    assert errors[0] == errors[-1] == 0
    assert all(0 < error < 0.01 for error in errors[1:-1])
    assert len(errors) == BLOCKS
    assert reader.save(TOKENS) == 0  # lossy ones stay: this manager is content with them
    reader.manager.close()
    purist = opened(levels(tmp_path, None, **more))
    assert purist.load(TOKENS) == [0]
    assert purist.save(TOKENS) == BLOCKS - 1  # exact replaces lossy
    purist.manager.close()
    again = opened(levels(tmp_path, None, **more))
    assert again.load(TOKENS) == [0] * BLOCKS


@pytest.mark.parametrize(("keep_recent", "encoded"), [(0, BLOCKS - 1), (64, BLOCKS - 2), (256, BLOCKS - 5)])
@pytest.mark.parametrize("own", [True, False], ids=["codec", "policy"])
def test_the_end_of_a_chain_stays_exact_on_a_disk(
    opened: Any, tmp_path: Path, keep_recent: int, encoded: int, own: bool
) -> None:
    """As long as it is the end: once enough tokens follow, a block is written again, encoded, and once only."""
    policy = CompressionPolicy(threshold_step=0, keep_recent=keep_recent, tiers=("disk",))
    how = {"codec": "int8", "keep_recent": keep_recent} if own else {}
    cache = opened(levels(tmp_path / "grown", **how), compression_policy=None if own else policy)
    for blocks in (1, 3, 4, 9, BLOCKS, BLOCKS):
        cache.save(TOKENS[: blocks * 64])
        assert cache.count("encoded", "int8", "disk") == max(blocks - BLOCKS + encoded, 0)
    assert cache.count("kept_raw") == 0
    at_once = opened(levels(tmp_path / "at once", **how), compression_policy=None if own else policy)
    at_once.save(TOKENS)
    assert cache.tier(1)["held_bytes"] == at_once.tier(1)["held_bytes"]
    cache.manager.close()
    again = opened(levels(tmp_path / "grown", **how), compression_policy=None if own else policy)
    assert [error > 0 for error in again.load(TOKENS)] == [False] + [True] * encoded + [False] * (BLOCKS - 1 - encoded)
    assert again.count("found", tier="disk") == BLOCKS


@pytest.mark.parametrize("purged", [False, True])
def test_exact_bytes_do_not_outlive_their_encoding(opened: Any, tmp_path: Path, purged: bool) -> None:
    """Where a block was before it was written again, encoded, nothing exact is left: a purge knows one place only."""
    cache = opened(levels(tmp_path / "kv", "int8"))
    cache.manager.create_session("mine")
    tokens = TOKENS[: 6 * 64]

    def exact_ones() -> list[int]:
        cache.here.compute(cache.space.chain(tokens))
        data = b"".join(file.read_bytes() for file in (tmp_path / "kv").rglob("*.data"))
        return [data.count(cache.here._block(i)[0, 0, 0, 0].tobytes()) for i in range(6)]

    cache.manager.create_session("before")
    cache.save(range(9000, 9000 + 6 * 64), session="before")
    cache.save(tokens[: 3 * 64], session="mine")
    assert exact_ones() == [1, 0, 1, 0, 0, 0]
    assert cache.manager.destroy_session("before", purge=True)  # room for what comes
    assert cache.manager.wait(60)
    cache.save(tokens, session="mine")
    assert exact_ones() == [1, 0, 0, 0, 0, 1]
    if purged:
        assert cache.manager.destroy_session("mine", purge=True)
        assert cache.manager.wait(60)
        assert exact_ones() == [0] * 6


def test_a_chain_that_grows_after_a_restart_is_encoded_too(opened: Any, tmp_path: Path) -> None:
    writer = opened(levels(tmp_path, "int8"))
    writer.save(TOKENS[: 3 * 64])
    writer.manager.close()
    again = opened(levels(tmp_path, "int8"))
    assert [error > 0 for error in again.load(TOKENS[: 3 * 64])] == [False, True, False]
    assert again.save(TOKENS) == BLOCKS - 3
    assert again.count("encoded", "int8", "disk") == BLOCKS - 3
    again.manager.close()
    assert [error > 0 for error in opened(levels(tmp_path, "int8")).load(TOKENS)] == [False, *[True] * 10, False]


def test_what_a_codec_has_refused_is_not_tried_again(opened: Any, tmp_path: Path) -> None:
    """A block with NaN was recent, is not any more, and stays as it is however the chain grows."""
    cache = opened(levels(tmp_path, "int8"))
    for blocks in (3, 4, 9, BLOCKS):
        cache.save(TOKENS[: blocks * 64], bad=2)
    assert cache.count("kept_raw", "not_finite") == 1
    assert cache.count("encoded", "int8") == BLOCKS - 3
    cache.manager.close()
    disk = opened(levels(tmp_path)).manager
    disk.register(SPEC, tiny_identity(SPEC))
    index = disk._chain.tiers[1].index
    rows = index.rows_of(cache.space.chain(TOKENS).keys)
    assert index.fidelity[rows].tolist() == [0, 1, 0, *[1] * (BLOCKS - 4), 0]


def test_what_is_held_on_a_disk_is_encoded_when_the_chain_grows_again(opened: Any, tmp_path: Path) -> None:
    """A match that said *exact* must find exact bytes: the block is left alone until nobody holds it."""
    cache = opened(levels(tmp_path, "int8"))
    cache.save(TOKENS[: 3 * 64])
    disk = cache.manager._chain.tiers[1].index
    held = int(disk.rows_of(cache.space.chain(TOKENS).keys)[2])
    disk.pin(held)
    cache.save(TOKENS[: 6 * 64])
    assert disk.fidelity[held] == 0
    assert cache.count("encoded", "int8") == 3
    disk.unpin(held)
    cache.save(TOKENS)
    assert disk.fidelity[held] == 1
    assert cache.count("encoded", "int8") == BLOCKS - 2


def test_what_could_not_be_written_again_is_tried_with_the_next_growth(opened: Any, tmp_path: Path) -> None:
    """The disk was full for a moment: the block stays exact, is said to be, and is encoded later."""
    cache = opened(levels(tmp_path, "int8"))
    cache.save(TOKENS[: 3 * 64])
    disk, flow = cache.manager._chain.tiers[1].index, cache.manager._chain.flow
    row, again = int(disk.rows_of(cache.space.chain(TOKENS).keys)[2]), flow._copy_again
    flow._copy_again = lambda *_: 0
    cache.save(TOKENS[: 4 * 64])
    assert disk.fidelity[row] == 0
    assert disk.pins[row] == 0
    flow._copy_again = again
    cache.save(TOKENS)
    assert disk.fidelity[row] == 1
    assert cache.count("encoded", "int8") == BLOCKS - 2


def test_other_processes_follow_what_is_encoded_later(opened: Any, tmp_path: Path) -> None:
    """A block that has another place now is not gone for them, nor is what was built on it."""
    writer, reader = (opened(levels(tmp_path, "int8")) for _ in range(2))
    other = [*TOKENS[: 3 * 64], *range(5000, 5000 + 64)]
    for tokens in (TOKENS[: 3 * 64], other):
        writer.save(tokens)
    disk = reader.manager._chain.tiers[1].index
    reader.manager.refresh()
    assert reader.space.peek(reader.space.chain(other)) == 4
    row = int(disk.rows_of(reader.space.chain(other).keys)[2])
    assert disk.fidelity[row] == 1  # four blocks: the third was encoded when the fourth came
    writer.save(TOKENS)
    writer.save([*other, *range(9000, 9000 + 128)])
    reader.manager.refresh()
    assert reader.space.peek(reader.space.chain(TOKENS)) == BLOCKS
    assert reader.space.peek(reader.space.chain([*other, *range(9000, 9000 + 128)])) == 6
    assert reader.count("dropped", "owner_freed") == 0
    assert len(reader.load(TOKENS)) == BLOCKS
    assert len(reader.load(other)) == 4
    purist = opened(levels(tmp_path))
    assert purist.load(TOKENS) == [0]


def test_no_codec_reaches_into_what_it_may_not_follow(opened: Any, tmp_path: Path) -> None:
    """A request of another process holds the exact block: after it has moved it is a miss there, and nothing else."""
    writer, reader = (opened(levels(tmp_path, "int8")) for _ in range(2))
    writer.save(TOKENS[: 3 * 64])
    reader.manager.refresh()
    match = reader.space.match(reader.space.chain(TOKENS[: 3 * 64]), "r")
    assert match.blocks == 3
    writer.save(TOKENS)
    reader.manager.refresh()
    assert reader.space.load(match, reader.there.region, reader.there.positions(3)) < 3
    reader.space.release("r")


def test_any_process_reads_lossless_blocks(opened: Any, tmp_path: Path) -> None:
    """Written with bf16x, read by a manager that has never heard of it in its configuration."""
    writer = opened(levels(tmp_path, "bf16x"))
    writer.save(TOKENS)
    assert writer.tier(1)["held_bytes"] < 0.95 * BLOCKS * SPEC.slot_bytes
    writer.manager.close()
    assert opened(levels(tmp_path)).load(TOKENS) == [0] * BLOCKS


def test_what_is_built_on_a_lossy_prefix_is_never_sold_as_exact(opened: Any, tmp_path: Path) -> None:
    """A request loads lossy blocks and computes on: what it stores is marked, here and on the disk."""
    opened(levels(tmp_path, "int8")).save(TOKENS[: 4 * 64])
    reader = opened(levels(tmp_path, "int8"))
    chain = reader.space.chain(TOKENS)
    match = reader.space.match(chain, "r")
    assert match.blocks == 4
    reader.space.load(match, reader.there.region, reader.there.positions(4))
    assert reader.space.save(chain, reader.here.region, reader.here.compute(chain)) == BLOCKS - 4
    reader.space.release("r")
    assert reader.manager.wait(60)
    reader.manager.close()
    assert len(opened(levels(tmp_path)).load(TOKENS)) == 1


def test_a_small_disk_with_slots_of_several_sizes(opened: Any, tmp_path: Path) -> None:
    """Many chains through a disk of a few segments: exact first blocks and encoded others get their room in turn."""
    cache = opened(levels(tmp_path, "int4g", size_mb=4))
    for first in range(24):
        assert cache.save([first, *TOKENS[1:]]) == BLOCKS
    used = sum(f.stat().st_size for f in (tmp_path / "disk").iterdir())
    assert used <= 4 << 20
    assert cache.count("encoded") > 100
    cache.manager.close()
    reader = opened(levels(tmp_path, "int4g", size_mb=4))
    found = [reader.load([first, *TOKENS[1:]]) for first in range(24)]
    assert all(error < 0.1 for errors in found for error in errors)
    assert sum(map(len, found)) > 40


def test_a_codec_that_this_process_lacks_is_a_miss(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, and the block stays for those who can read it."""
    opened(levels(tmp_path, "bf16x")).save(TOKENS)
    monkeypatch.delitem(names._CODECS, "bf16x")
    reader = opened(levels(tmp_path))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            chain = reader.space.chain(TOKENS)
            match = reader.space.match(chain, "r")
            assert reader.space.load(match, reader.there.region, reader.there.positions(match.blocks)) < BLOCKS
            reader.space.release("r")
    assert len([r for r in caplog.records if "bf16x" in r.getMessage()]) == 1
    assert reader.count("load_failed", "no_codec") > 0
    reader.manager.close()
    monkeypatch.undo()
    assert opened(levels(tmp_path)).load(TOKENS) == [0] * BLOCKS


def test_a_calibration_that_the_reader_lacks_is_a_miss(
    opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found beside the blocks, where the writer has left it; gone from there, one line in the log that names it."""
    window = kv_of(np.arange(300), 0).repeat(4, axis=3)
    table = calibration.fit([window], np.zeros(32), "small", tmp_path / "tables")
    codec = f"low_rank:table={table},max_rel_error=1"
    writer = opened(levels(tmp_path, codec))
    writer.save(TOKENS)
    assert writer.count("encoded", "low_rank") > BLOCKS // 2  # random keys and values exceed any bound now and then
    other = calibration.fit([window * 2], np.zeros(32), "small", tmp_path / "others")
    lossy = f"low_rank:table={other},max_rel_error=1"
    assert len(opened(levels(tmp_path, lossy)).load(TOKENS)) == BLOCKS
    (left,) = (tmp_path / "disk").glob(table.name)
    left.unlink()
    reader = opened(levels(tmp_path, lossy))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            match = reader.space.match(reader.space.chain(TOKENS), "r")
            assert reader.space.load(match, reader.there.region, reader.there.positions(match.blocks)) < BLOCKS
            reader.space.release("r")
    lines = [r.getMessage() for r in caplog.records if "'low_rank'" in r.getMessage()]
    assert len(lines) == 1
    assert calibration.load(table).digest.hex() in lines[0]
    assert reader.count("load_failed", "no_calibration") > 0


# -- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"method": "zip"},
        {"method": 8},
        {"options": None},
        {"threshold_step": -1},
        {"keep_recent": "many"},
        {"tiers": ("tape",)},
        {"tiers": "cpu"},
        {"max_hits": -1},
    ],
)
def test_policies_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="CompressionPolicy"):
        CompressionPolicy(**options)


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "many"])
def test_windows_that_cannot_be_are_refused(tmp_path: Path, tokens: Any) -> None:
    with pytest.raises(ConfigError, match="keep_recent"):
        DiskBackend(str(tmp_path), size_gb=1, keep_recent=tokens)
    with pytest.raises(ConfigError, match="keep_recent"):
        RemoteBackend(connector="MOCK", keep_recent=tokens)


def test_codecs_that_cannot_work_are_refused_early(tmp_path: Path) -> None:
    """When the manager is made: names and parameters; when a model comes: what depends on it."""
    for backend, policy in (
        (levels(tmp_path, "zip"), None),
        (levels(tmp_path, "int8:bits=3"), None),
        (gpu(), CompressionPolicy(options={"bits": 3})),
    ):
        with pytest.raises(ConfigError, match="codec"):
            CacheManager(backend, compression_policy=policy)
    manager = CacheManager(gpu(), compression_policy=CompressionPolicy(method="pca"))
    with manager, pytest.raises(ConfigError, match="kvcache-factory calibrate"):
        manager.register(SPEC, tiny_identity(SPEC))


def test_memory_that_blocks_leave_for_a_remote_level_is_not_encoded() -> None:
    """The engine would have to wait for decoding: refused, not ignored."""
    remote = RemoteBackend(connector="MOCK", ingestion="evicted")
    backend = HierarchicalBackend([CPUBackend(size_gb=16 * MIB), remote])
    with pytest.raises(ConfigError, match="evicted"):
        CacheManager(backend, compression_policy=CompressionPolicy())


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_only_a_range_of_layers_is_encoded(opened: Any, tmp_path: Path, on_disk: bool) -> None:
    """The other layer comes back bit for bit."""
    policy = CompressionPolicy(threshold_step=0, keep_recent=0, layers=(1, 2))
    cache = opened(levels(tmp_path) if on_disk else gpu(), compression_policy=policy)
    cache.save(TOKENS)
    for tier in ("cpu", "disk") if on_disk else ("gpu",):
        assert cache.count("encoded", "layers", tier) == BLOCKS - 1
    if on_disk:
        assert cache.manager.evict(BLOCKS) == BLOCKS
    errors = cache.load(TOKENS)
    assert len(errors) == BLOCKS
    assert errors[0] == 0.0
    assert all(0 < error < 0.01 for error in errors[1:])
    assert np.array_equal(cache.here.block(3)[0], cache.there.block(3)[0])


@pytest.mark.parametrize("method", ["pca", "pca|zstd"])
def test_a_calibration_of_another_model_is_refused(opened: Any, tmp_path: Path, method: str) -> None:
    """Of the same geometry, but other weights; one that does not say whose it is serves whoever names it."""
    window = kv_of(np.arange(300), 0).repeat(4, axis=3)
    mine = tiny_identity(SPEC).model
    for fingerprint, refused in ((mine, False), ("", False), ("0" * 32, True)):
        table = calibration.fit([window], np.zeros(32), "small", tmp_path / (fingerprint or "any"), fingerprint)
        policy = CompressionPolicy(method, options={"table": str(table)}, threshold_step=0)
        manager = CacheManager(gpu(), compression_policy=policy)
        if refused:
            with pytest.raises(ConfigError, match="another model"):
                manager.register(SPEC, tiny_identity(SPEC))
        else:
            manager.register(SPEC, tiny_identity(SPEC))
        manager.close()


def test_descriptions_make_the_trip_through_data(tmp_path: Path) -> None:
    policy = CompressionPolicy("int4g", options={"group": 16}, tiers=("cpu",), keep_first=2)
    manager = CacheManager(levels(tmp_path, "bf16x"), compression_policy=policy)
    again = CacheManager.from_config(manager.to_config())
    assert again.config == manager.config
    assert again.state()["compression"] == "int4g,bf16x"
