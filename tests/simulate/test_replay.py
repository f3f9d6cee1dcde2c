"""A replay goes through the engine's own tiers, and agrees with the plainest caches there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache_factory.errors import CapacityError, ConfigError
from kvcache_factory.policy.base import RequestHint, Rows
from kvcache_factory.policy.order import FIFOEvictionPolicy, LRUEvictionPolicy
from kvcache_factory.simulate.cost import CostModel
from kvcache_factory.simulate.flat import replay_flat
from kvcache_factory.simulate.optimum import optimum
from kvcache_factory.simulate.replay import Outcome, Replay, Service, Settings, Size, reuse_hints
from kvcache_factory.simulate.workload import Workload, read_trace

from . import plain
from .conftest import Write, mooncake

Make = Callable[[Iterable[list[int]]], Workload]

CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


def run(read: Workload, *blocks: int, policy: Any = None, **options: Any) -> Outcome:
    """Replay on tiers of so many blocks."""
    sizes = [Size(name, count) for name, count in zip(("dram", "nvme"), blocks, strict=False)]
    return Replay(read, policy or LRUEvictionPolicy(), sizes, Settings(**options)).run()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHAINS, st.integers(1, 12))
def test_leaf_first_lru_is_what_it_says(workload: Make, chains: list[list[int]], capacity: int) -> None:
    """Request by request, the engine finds what a plain set of prefixes finds."""
    with workload(chains) as read:
        outcome = run(read, capacity)
        assert outcome.hits[0].tolist() == plain.leaf_lru(chains, capacity)
        assert outcome.stored[0] == outcome.evicted[0] + outcome.held[0]
        assert outcome.usable_hit == outcome.block_hit


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHAINS, st.integers(1, 12))
def test_the_optimum_is_what_it_says(workload: Make, chains: list[list[int]], capacity: int) -> None:
    """The heap of the optimum finds what a search through all leaves finds, and no policy finds more."""
    with workload(chains) as read:
        best = optimum(read, capacity)
        assert best * read.blocks == pytest.approx(plain.clairvoyant(chains, capacity))
        assert run(read, capacity).usable_hit <= best + 1e-12


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHAINS, st.integers(1, 12))
def test_flat_semantics_is_a_cache_of_unrelated_objects(workload: Make, chains: list[list[int]], capacity: int) -> None:
    """Block by block, flat LRU is an ordered dict."""
    with workload(chains) as read:
        outcome = replay_flat(read, LRUEvictionPolicy(), capacity)
        assert outcome.block_hits == plain.flat_lru(chains, capacity)
        assert outcome.hits.sum() <= read.blocks


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHAINS, st.integers(1, 6), st.integers(2, 12))
def test_two_tiers_find_what_either_holds(workload: Make, chains: list[list[int]], fast: int, slow: int) -> None:
    """What leaves the fast tier is found in the slow one: never less than the fast one alone, books in order."""
    with workload(chains) as read:
        outcome = run(read, fast, slow)
        assert outcome.hits.sum() <= read.blocks
        for tier in range(2):
            assert outcome.stored[tier] == outcome.evicted[tier] + outcome.held[tier]
            assert outcome.held[tier] <= outcome.sizes[tier].blocks


def test_a_hit_in_the_slow_tier_is_promoted(workload: Make) -> None:
    """A conversation that was pushed out of DRAM is read from below once, and is above again for the next turn."""
    others = [[100 + i, 200 + i, 300 + i] for i in range(4)]
    chain = [1, 2, 3]
    with workload([chain, *others, chain, chain]) as read:
        outcome = run(read, 6, 100)
        assert outcome.hits[:, 5].tolist() == [0, 3]
        assert outcome.hits[:, 6].tolist() == [3, 0]
        assert outcome.moved[0] >= 3


def test_requests_of_one_moment_keep_their_order(write: Write) -> None:
    """Timestamps repeat in real traces; who came later is younger all the same."""
    rows = mooncake([[1], [2], [1], [3], [1]], step_ms=0)
    with read_trace(write(rows)) as read:
        assert run(read, 2).hits[0].tolist() == plain.leaf_lru([[1], [2], [1], [3], [1]], 2)


def test_a_request_in_flight_holds_what_it_found(write: Write) -> None:
    """While it decodes, others cannot push its blocks out, and what they bring is not kept."""
    rows = mooncake([[1, 2], [1, 2], [5, 6], [1, 2]], step_ms=10_000, output=0)
    rows[1]["output_length"] = 400  # from 10 s to 50 s at 10 tokens a second
    service = Service(CostModel.from_rate(1e9), decode_tokens_per_s=10.0)
    with read_trace(write(rows)) as read:
        assert run(read, 2).hits[0].tolist() == [0, 2, 0, 0]
        assert run(read, 2, service=service).hits[0].tolist() == [0, 2, 0, 2]


def test_blocks_in_flight_are_not_there_yet(write: Write) -> None:
    """Prefill takes time: a second request for the same prompt comes too early to find it."""
    rows = mooncake([[1, 2], [1, 2], [1, 2]], step_ms=1000, output=0)
    service = Service(CostModel.from_rate(1024 / 1.5))
    with read_trace(write(rows)) as read:
        assert run(read, 10, service=service).hits[0].tolist() == [0, 0, 2]


class Listener(LRUEvictionPolicy):
    """LRU that notes what it was told."""

    heard: list[tuple[str, RequestHint]]
    ends: list[tuple[int, int]]

    def clone(self) -> Listener:
        return self

    def bind(self, rows: int, keys: Any) -> None:
        super().bind(rows, keys)
        self.heard, self.ends = [], []

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        super().on_request(now, rows, hit_len, hint)
        self.heard.append((hint.reuse, hint))

    def on_finish(self, rows: Rows, output_tokens: int) -> None:
        self.ends.append((len(rows), output_tokens))


def test_policies_are_told_what_the_future_holds_if_asked(workload: Make) -> None:
    """With the oracle, a request says whether more than half of its prompt comes again."""
    with workload([[1, 2, 3], [7, 8, 9], [1, 2, 4]]) as read:
        policy = Listener()
        run(read, 10, policy=policy, hints="oracle")
        assert [reuse for reuse, _ in policy.heard] == ["returns", "ended", "ended", "ended"]
        assert reuse_hints(read, "none").tolist() == [0, 0, 0]


def test_policies_hear_the_end_of_a_request_with_all_its_blocks(workload: Make) -> None:
    """Found or new, the whole chain ends with the tokens that were generated."""
    with workload([[1, 2], [1, 2, 3]]) as read:
        policy = Listener()
        run(read, 10, policy=policy)
        assert policy.ends == [(2, 10), (3, 10)]


@pytest.mark.parametrize("blocks", [0, -1])
def test_a_capacity_of_nothing_is_refused(workload: Make, blocks: int) -> None:
    """Not an empty cache but a mistake."""
    with workload([[1]]) as read:
        with pytest.raises(CapacityError):
            run(read, blocks)
        with pytest.raises(CapacityError):
            replay_flat(read, LRUEvictionPolicy(), blocks)


def test_a_replay_is_the_same_every_time(workload: Make) -> None:
    """Background copies have no threads here: nothing depends on timing."""
    rng = np.random.default_rng(3)
    chains = [rng.integers(0, 3, rng.integers(1, 9)).tolist() for _ in range(300)]
    with workload(chains) as read:
        first, second = (run(read, 20, 60, policy=FIFOEvictionPolicy()) for _ in range(2))
        assert (first.hits == second.hits).all()
        assert first.moved == second.moved


def test_progress_is_told(tmp_path: Path, write: Write) -> None:
    """A long read and a long run say how far they are."""
    told: list[tuple[float, float]] = []
    with read_trace(write(mooncake([[1]] * 600)), progress=lambda *at: told.append(at)) as read:
        Replay(read, LRUEvictionPolicy(), [Size("dram", 1)]).run(lambda *at: told.append(at))
    assert len(told) >= 4
    assert all(done <= total for done, total in told)


def test_a_policy_with_a_target_decides_in_its_tier(workload: Make) -> None:
    """Names of tiers say which level of a hierarchy they stand for, as in a manager."""
    with workload([[1, 2, 3], [4, 5, 6]]) as read:
        with pytest.raises(ConfigError, match="no such level"):
            run(read, 2, policy=LRUEvictionPolicy(target="disk"))
        policy = FIFOEvictionPolicy(target="disk")
        replay = Replay(read, policy, [Size("dram", 2), Size("nvme", 4)])
        assert [tier.policy.name for tier in replay.tiers.tiers] == ["lru", "fifo"]
        replay.run()
