"""In the engine's path nothing raises: whatever is wrong is a miss, and counted; and bytes are never wrong."""

import itertools
import logging
import threading

import numpy as np
import pytest
import torch

from kvcache_factory import BlockSpec
from kvcache_factory.block.envelope import Fidelity
from kvcache_factory.block.key import KeyChain
from kvcache_factory.block.spec import KVDtype
from kvcache_factory.engine.ledger import MANAGER, Event
from kvcache_factory.engine.tier import SAMPLE_EVERY
from kvcache_factory.errors import TokenError
from kvcache_factory.memory.region import BlockPositions, SequenceRegion
from kvcache_factory.testing import FakeEngine, Opener, SmallCache, tiny_identity, tiny_spec

A = list(range(16))


def errors(cache: SmallCache) -> dict[str, int]:
    """How often each kind of failure was counted."""
    rows = cache.manager.state()["events"]
    return {row["reason"]: row["times"] for row in rows if row["event"] == "error"}


# -- bad input --------------------------------------------------------------------------------------------------------


def test_tensors_of_another_model_do_not_touch_a_slot(open_cache: Opener) -> None:
    """Blocks larger than a slot would overrun the next one: refused for loads and saves, and counted."""
    cache = open_cache(16)
    cache.save(A)
    other = FakeEngine(tiny_spec(num_layers=40), 4)
    chain = cache.space.chain(A[:8])
    assert cache.space.save(cache.space.chain([7] * 8), other.region, other.positions(2)) == 0
    match = cache.space.match(chain, "r")
    assert cache.space.load(match, other.region, other.positions(2)) == 0
    cache.space.release("r")
    assert errors(cache) == {"save:LayoutError": 1, "load:LayoutError": 1}
    assert cache.load(A) == [0] * 4


def test_a_chain_of_another_model_costs_no_rows(open_cache: Opener) -> None:
    """Another block size or another identity: a miss each, and every row is still there afterwards."""
    cache = open_cache(4)
    wide, foreign = tiny_spec(8), tiny_identity(tiny_spec(), "another")
    for identity in (tiny_identity(wide), foreign):
        chain = KeyChain(identity)
        chain.extend(A)
        engine = FakeEngine(tiny_spec(identity.block_tokens), 4)
        assert cache.space.save(chain, engine.region, engine.compute(chain)) == 0
        assert cache.space.match(chain, "r").blocks == 0
    assert errors(cache) == {"save:ConfigError": 2, "match:ConfigError": 2}
    assert cache.save(A) == 4


@pytest.mark.parametrize("start", [-4, 1000])
def test_positions_out_of_range_are_a_miss(open_cache: Opener, start: int) -> None:
    """The copy is refused as a whole, the reserved rows come back, the error names the range once in the log."""
    cache = open_cache(4)
    chain = cache.space.chain(A)
    cache.engine.compute(chain)
    wrong = BlockPositions(np.zeros((4, 1), np.int64), np.full((4, 1), start))
    assert cache.space.save(chain, cache.engine.region, wrong) == 0
    assert cache.manager._ledger.total(Event.NOT_STORED, "cpu", "copy_failed").blocks == 4
    assert cache.save(A) == 4
    match = cache.space.match(chain, "r")
    assert cache.space.load(match, cache.engine.region, wrong) == 0
    assert errors(cache) == {"save:LayoutError": 1, "load:LayoutError": 1}


def test_expanded_tensors_are_not_written_to(open_cache: Opener) -> None:
    """Several elements that share memory cannot be restored: a counted miss."""
    cache = open_cache(4)
    spec = cache.space.spec
    cache.save(A)
    shared = torch.zeros(1, 1, 16, spec.head_dim).expand(1, spec.num_kv_heads, 16, spec.head_dim)
    region = SequenceRegion.from_layers([shared] * 2, [shared] * 2, spec)
    match = cache.space.match(cache.space.chain(A), "r")
    assert cache.space.load(match, region, region.positions([0] * 4, [0, 4, 8, 12])) == 0
    assert errors(cache) == {"load:LayoutError": 1}


def test_a_hint_that_does_not_exist_is_a_counted_miss(open_cache: Opener) -> None:
    """Also what is merely silly does not stop generation."""
    cache = open_cache(4)
    assert cache.save(A, reuse_hint="maybe") == 0
    assert errors(cache) == {"save:ConfigError": 1}


def test_bad_tokens_are_an_error_before_the_engines_path(open_cache: Opener) -> None:
    """Whoever makes a chain of nonsense is told; nothing was asked of the cache yet."""
    space = open_cache(4).space
    for tokens in ([-1], [1.5], [2**32], [[1]], "text"):
        with pytest.raises(TokenError):
            space.chain(tokens)


def test_a_failure_is_logged_once_and_counted_every_time(open_cache: Opener, caplog: pytest.LogCaptureFixture) -> None:
    """A broken engine path writes one line a minute, not one a request."""
    cache = open_cache(4)
    with caplog.at_level(logging.WARNING, "kvcache_factory"):
        for _ in range(5):
            cache.save(A, reuse_hint="maybe")
    assert len(caplog.records) == 1
    assert errors(cache) == {"save:ConfigError": 5}


def test_edges_of_a_match_are_no_errors(open_cache: Opener) -> None:
    """No blocks, no tokens allowed, more allowed than there are, more saved than there is."""
    cache = open_cache(8)
    empty = cache.space.chain([1, 2, 3])
    assert cache.space.match(empty, "r").blocks == 0
    assert cache.space.save(empty, cache.engine.region, cache.engine.positions(3)) == 0
    cache.save(A)
    chain = cache.space.chain(A)
    found = [cache.space.match(chain, "r", max_tokens=n).tokens for n in (-5, 0, 3, 4, 15, 16, 10**9, None)]
    assert found == [0, 0, 0, 4, 12, 16, 16, 16]
    match = cache.space.match(chain, "r")
    assert cache.space.load(match, cache.engine.region, cache.engine.positions(0)) == 0
    assert cache.space.load(match, cache.engine.region, cache.engine.positions(9)) == 4
    assert cache.space.save(chain, cache.engine.region, cache.engine.positions(9)) == 0
    assert cache.space.save(chain, cache.engine.region, cache.engine.positions(2), first=9) == 0
    assert errors(cache) == {}


# -- integrity --------------------------------------------------------------------------------------------------------


def flip(cache: SmallCache, block: int, tokens: list[int]) -> None:
    """Invert one bit of a resting block."""
    tier = cache.manager._chain.tiers[0]
    payload = tier.store.payload(int(tier.index.rows_of(cache.space.chain(tokens).keys)[block]))
    assert payload is not None
    payload[17] ^= 4


def test_full_integrity_finds_a_flipped_bit_in_dram(open_cache: Opener) -> None:
    """The load ends before the damaged block, which leaves with what was built on it; saving it again heals."""
    cache = open_cache(8, integrity="full")
    cache.save(A)
    flip(cache, 2, A)
    assert cache.load(A) == [0, 0]
    assert cache.manager._ledger.total(Event.LOAD_FAILED, "cpu", "checksum").blocks == 2
    assert cache.space.peek(cache.space.chain(A)) == 2
    assert cache.save(A) == 2
    assert cache.load(A) == [0] * 4


def test_integrity_off_trusts_memory(open_cache: Opener) -> None:
    """Without checksums a flipped bit is served: that is what the setting says."""
    cache = open_cache(8)
    cache.save(A)
    flip(cache, 2, A)
    assert cache.load(A) == [0, 0, None, 0]


def test_sampling_checks_one_key_in_so_many_and_always_the_same(open_cache: Opener) -> None:
    """A block is in the sample or not by its key, when it is stored and when it is loaded."""
    cache = open_cache(200, integrity="sample")
    prompts = [[1000 * i + t for t in range(4)] for i in range(128)]
    sampled = []
    for tokens in prompts:
        cache.save(tokens)
        flip(cache, 0, tokens)
        sampled.append(int(cache.space.chain(tokens).keys[0, 0]) % SAMPLE_EVERY == 0)
    assert 0 < sum(sampled) < 32
    assert [cache.load(tokens) == [] for tokens in prompts] == sampled


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [(16,), (16, 16)])
@pytest.mark.parametrize("dtype", list(KVDtype))
@pytest.mark.parametrize(("writer", "reader"), list(itertools.product(["sequence", "paged"], repeat=2)))
def test_engines_read_what_other_engines_wrote(
    open_cache: Opener, levels: tuple[int, ...], dtype: KVDtype, writer: str, reader: str
) -> None:
    """Transformers' order and a paged one, every dtype, out of the first tier and the second: the same bytes."""
    spec = BlockSpec(dtype, num_layers=2, num_kv_heads=3, head_dim=8, block_tokens=4)
    cache = open_cache(*levels, spec=spec)
    source, target = FakeEngine(spec, 8, kind=writer), FakeEngine(spec, 8, kind=reader)  # type: ignore[arg-type]
    chain = cache.space.chain(list(range(32)))
    assert cache.space.save(chain, source.region, source.compute(chain)) == 8
    cache.manager.wait()
    if len(levels) > 1:
        cache.manager.evict(4)
    match = cache.space.match(chain, "r")
    assert cache.space.load(match, target.region, target.positions(8)) == 8
    assert target.versions(chain, 8) == [0] * 8


def test_exact_blocks_replace_lossy_ones(open_cache: Opener) -> None:
    """Lossy blocks are never taken for exact ones, and give way to them with all that was built on them."""
    cache = open_cache(16, 16)
    assert cache.save(A, version=1, fidelity=Fidelity.APPROXIMATE) == 4
    cache.manager.wait()
    match = cache.space.match(cache.space.chain(A), "r")
    assert (match.blocks, match.reason) == (0, "not_exact")
    assert cache.save(A[:8], version=2) == 2
    assert cache.save(A, version=3, fidelity=Fidelity.BOUNDED) == 2
    assert cache.load(A, known=range(4)) == [2, 2]
    cache.manager.wait()
    cache.manager.evict(16)
    assert cache.load(A, known=range(4)) == [2, 2]


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [(12,), (8, 16), (400,)])
def test_requests_in_many_threads_get_their_own_bytes(open_cache: Opener, levels: tuple[int, ...]) -> None:
    """Threads that save, load, drop and evict in a cache that is too small: right bytes or a miss, and a sound end."""
    cache = open_cache(*levels, integrity="full")
    prompts = [[*range(8 * (i % 3), 8 * (i % 3) + 8), *range(100 * i, 100 * i + 12)] for i in range(8)]
    wrong: list[object] = []

    def work(own: int) -> None:
        engine = FakeEngine(cache.space.spec, 8, kind="paged" if own % 2 else "sequence")
        for turn in range(30):
            request, chain = f"{own}-{turn}", cache.space.chain(prompts[(own * 3 + turn) % len(prompts)])
            match = cache.space.match(chain, request)
            engine.erase()
            loaded = cache.space.load(match, engine.region, engine.positions(match.blocks))
            if None in engine.versions(chain, loaded):
                wrong.append(request)
            positions = engine.compute(chain)
            cache.space.save(chain, engine.region, positions[loaded:], first=loaded)
            if turn % 7 == own:
                cache.space.drop(chain, 2)
            if turn % 5 == own:
                cache.manager.evict(3)
            if turn % 4:
                cache.space.release(request)
        for turn in range(30):
            cache.space.release(f"{own}-{turn}")

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    cache.manager.wait()
    assert cache.manager.check() == []
    for number in reversed(range(len(levels))):
        cache.manager._chain.evict(1000, number)
        assert cache.manager._chain.tiers[number].index.used == 0


def test_close_while_others_work_is_a_miss_for_them(open_cache: Opener) -> None:
    """The memory goes only after the last copy has ended; whoever comes later finds nothing, without an error."""
    for turn in range(5):
        cache = open_cache(64, 64)
        began, wrong = threading.Barrier(4), list[object]()

        def work(own: int, cache: SmallCache = cache, began: threading.Barrier = began, wrong: list = wrong) -> None:  # type: ignore[type-arg]
            engine = FakeEngine(cache.space.spec, 16)
            began.wait(60)
            for turn in range(60):
                chain = cache.space.chain([1000 * (turn % 4) + own + t for t in range(64)])
                cache.space.save(chain, engine.region, engine.compute(chain))
                match = cache.space.match(chain, f"{own}")
                engine.erase()
                loaded = cache.space.load(match, engine.region, engine.positions(match.blocks))
                if None in engine.versions(chain, loaded):
                    wrong.append((own, turn))

        threads = [threading.Thread(target=work, args=(own,)) for own in range(3)]
        for thread in threads:
            thread.start()
        began.wait(60)
        for _ in range(turn * 200):
            cache.space.peek(cache.space.chain(A))
        cache.manager.close()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_copy_that_begins_after_close_is_refused(open_cache: Opener) -> None:
    """Between looking whether the manager is open and copying it may close: the slab must not be touched then."""
    cache = open_cache(8)
    cache.save(A)
    match = cache.space.match(cache.space.chain(A), "r")
    cache.manager._chain.mover.close()
    assert cache.space.load(match, cache.engine.region, cache.engine.positions(4)) == 0
    assert cache.save([9] * 8) == 0
    assert errors(cache) == {"load:ClosedError": 1, "save:ClosedError": 1}
    assert cache.manager._ledger.total(Event.ERROR, MANAGER).times == 2


def test_metrics_measure_each_verb(open_cache: Opener) -> None:
    """Times are kept when asked for, counts always."""
    cache = open_cache(8, enable_metrics=True)
    cache.save(A)
    cache.load(A)
    calls = {row["verb"]: row["calls"] for row in cache.manager.state()["seconds"]}
    assert {verb: calls[verb] for verb in ("save", "match")} == {"save": 1, "match": 1}
    durations = {(row["tier"], row["operation"]): row["count"] for row in cache.manager.state()["durations"]}
    assert (durations["cpu", "save"], durations["cpu", "load"]) == (1, 1)
    plain = open_cache(8)
    plain.save(A)
    assert plain.manager.state()["seconds"] == []
