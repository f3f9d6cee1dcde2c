"""Known figures on real traces, to four digits: leaf-first LRU, flat LRU and FIFO, and the clairvoyant optimum."""

from __future__ import annotations

import time

import pytest
from tests.golden.traces import AGENTS, CONVERSATION, SYNTHETIC, GetTrace, blocks, flat, replay

from kvcache_factory import jit
from kvcache_factory.simulate.optimum import optimum

FACTS = {
    CONVERSATION: (12_031, 288_500, 182_790),
    SYNTHETIC: (3_993, 121_877, 43_924),
    AGENTS: (49_334, 11_767_283, 431_071),
}


@pytest.mark.parametrize("name", [CONVERSATION, SYNTHETIC, pytest.param(AGENTS, marks=pytest.mark.soak)])
def test_requests_and_blocks_are_counted_as_everybody_does(trace: GetTrace, name: str) -> None:
    """Requests, block accesses, and unique blocks by (parent, id)."""
    read = trace(name)
    assert (len(read), read.blocks, read.unique) == FACTS[name]


@pytest.mark.parametrize(
    ("name", "percent", "expected"),
    [
        (CONVERSATION, 1, 0.0525),
        (SYNTHETIC, 10, 0.2623),
        pytest.param(CONVERSATION, 5, 0.1958, marks=pytest.mark.soak),
        pytest.param(CONVERSATION, 10, 0.2789, marks=pytest.mark.soak),
        pytest.param(SYNTHETIC, 1, 0.0381, marks=pytest.mark.soak),
        pytest.param(CONVERSATION, 2, 0.0793, marks=pytest.mark.soak),
        pytest.param(CONVERSATION, 20, 0.3453, marks=pytest.mark.soak),
        pytest.param(SYNTHETIC, 2, 0.0778, marks=pytest.mark.soak),
        pytest.param(SYNTHETIC, 5, 0.1566, marks=pytest.mark.soak),
        pytest.param(SYNTHETIC, 20, 0.3931, marks=pytest.mark.soak),
        pytest.param(AGENTS, 0.2, 0.1833, marks=pytest.mark.soak),
        pytest.param(AGENTS, 0.5, 0.5345, marks=pytest.mark.soak),
        pytest.param(AGENTS, 1, 0.8182, marks=pytest.mark.soak),
        pytest.param(AGENTS, 2, 0.9317, marks=pytest.mark.soak),
        pytest.param(AGENTS, 5, 0.9585, marks=pytest.mark.soak),
    ],
)
def test_leaf_first_lru(trace: GetTrace, name: str, percent: float, expected: float) -> None:
    """Usable hits of leaf-first LRU through the engine's own index."""
    assert replay(trace(name), "lru", percent).usable_hit == pytest.approx(expected, abs=5.1e-5)


@pytest.mark.parametrize(
    ("name", "percents", "expected"),
    [
        (CONVERSATION, (1, 2, 5, 10, 20), (0.2464, 0.3142, 0.3664, 0.3664, 0.3664)),
        (SYNTHETIC, (1, 2, 5, 10, 20), (0.1854, 0.2613, 0.3956, 0.5063, 0.6080)),
        pytest.param(AGENTS, (0.2, 0.5, 1, 2, 5), (0.4852, 0.7542, 0.8983, 0.9543, 0.9634), marks=pytest.mark.soak),
    ],
)
def test_the_optimum(trace: GetTrace, name: str, percents: tuple[float, ...], expected: tuple[float, ...]) -> None:
    """Usable hits of a cache that knows the future."""
    read = trace(name)
    uses = read.next_uses()
    found = [optimum(read, blocks(read, percent), uses) for percent in percents]
    assert found == pytest.approx(expected, abs=5.1e-5)


@pytest.mark.parametrize(
    ("policy", "name", "percent", "expected"),
    [
        ("lru", SYNTHETIC, 5, 0.1548),
        ("fifo", SYNTHETIC, 1, 0.0361),
        pytest.param("lru", CONVERSATION, 1, 0.0523, marks=pytest.mark.soak),
        pytest.param("lru", CONVERSATION, 10, 0.2784, marks=pytest.mark.soak),
        pytest.param("fifo", CONVERSATION, 10, 0.2558, marks=pytest.mark.soak),
        pytest.param("lru", CONVERSATION, 5, 0.1954, marks=pytest.mark.soak),
        pytest.param("lru", CONVERSATION, 20, 0.3446, marks=pytest.mark.soak),
        pytest.param("fifo", CONVERSATION, 1, 0.0505, marks=pytest.mark.soak),
        pytest.param("fifo", CONVERSATION, 5, 0.1796, marks=pytest.mark.soak),
        pytest.param("fifo", SYNTHETIC, 20, 0.3703, marks=pytest.mark.soak),
        pytest.param("lru", AGENTS, 1, 0.801, marks=pytest.mark.soak),
    ],
)
def test_flat_policies_equal_libcachesim(
    trace: GetTrace, policy: str, name: str, percent: float, expected: float
) -> None:
    """Block hits of LRU and FIFO on unrelated blocks, as libCacheSim 0.3.5 counts them."""
    digits = 5.1e-4 if name == AGENTS else 1.1e-4
    assert flat(trace(name), policy, percent) == pytest.approx(expected, abs=digits)


@pytest.mark.soak
def test_a_million_block_operations_a_second(trace: GetTrace) -> None:
    """CPU time of LRU on the coding agents, with numba; the best of three, for the machine may be busy."""
    if not jit.warm_up():
        pytest.skip(f"only promised with numba: {jit.status()}")
    read = trace(AGENTS)
    rates = []
    for _ in range(3):
        begun = time.process_time()
        replay(read, "lru", 1)
        rates.append(read.blocks / (time.process_time() - begun))
    assert max(rates) >= 1_000_000
