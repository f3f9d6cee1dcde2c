"""``bench index``: what one block costs in the index's memory, and to evict when half of the blocks are leased."""

from __future__ import annotations

import statistics
import sys
from typing import Any

import numpy as np

from .. import jit
from ..block.identity import Identity
from ..block.key import KeyChain
from ..engine.index import Index
from ..policy.base import EvictionPolicy
from ..policy.order import FIFOEvictionPolicy, LRUEvictionPolicy
from .measure import Progress, quiet, thread_seconds

ROWS = 65_536
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 64
ROOT = -2


def run_index(progress: Progress | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``policy``, ``bytes_per_block`` (tokens not counted: 4 bytes each), ``evict_us_half_leased``."""
    progress = progress or quiet
    jit.warm_up()
    rows = []
    policies: tuple[type[EvictionPolicy], ...] = (LRUEvictionPolicy, FIFOEvictionPolicy)
    for number, policy in enumerate(policies):
        progress(number, len(policies), policy.name)
        rows.append({"policy": policy.name, **_measure(policy(), rounds=3 if quick else 20)})
    progress(len(policies), len(policies))
    return rows


def _measure(policy: EvictionPolicy, rounds: int) -> dict[str, Any]:
    index = Index(ROWS, BLOCK_TOKENS, policy, iter(range(1 << 60)).__next__)
    identity = Identity("bench", "float16", BLOCK_TOKENS)
    random = np.random.default_rng(0)
    chains = [_chain(identity, random) for _ in range(ROWS // CHAIN_BLOCKS)]
    for chain in chains:
        index.commit(index.reserve(chain, ROOT, 0, CHAIN_BLOCKS).rows)
    assert index.used == ROWS
    for chain in chains[::2]:
        index.match(chain, ROOT, CHAIN_BLOCKS)
    size = index.nbytes + deep_bytes(policy) - index.tokens.nbytes
    seconds = []
    batch = 256
    for _ in range(rounds):
        seconds.append(thread_seconds(lambda _: index.evict(batch), 0) / batch)
        while index.used < ROWS:
            index.commit(index.reserve(_chain(identity, random), ROOT, 0, CHAIN_BLOCKS).rows)
    return {
        "bytes_per_block": round(size / ROWS, 1),
        "evict_us_half_leased": round(statistics.median(seconds) * 1e6, 3),
    }


def _chain(identity: Identity, random: np.random.Generator) -> KeyChain:
    chain = KeyChain(identity)
    chain.extend(random.integers(0, 50_000, CHAIN_BLOCKS * BLOCK_TOKENS))
    return chain


def deep_bytes(policy: EvictionPolicy) -> int:
    """Bytes of a policy's arrays and of its lists of integers."""
    total = 0
    for value in vars(policy).values():
        if isinstance(value, np.ndarray):
            total += value.nbytes
        elif isinstance(value, list):
            total += sys.getsizeof(value) + sum(map(sys.getsizeof, value))
    return total
