"""Requests of a trace against one index: no bytes, no tiers, nobody in flight; and blocks without chains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcache_factory.engine.index import Index
from kvcache_factory.policy.base import NO_HINT, EvictionPolicy, RequestHint

TRACES = Path(__file__).resolve().parents[3] / "shared" / "reference" / "traces"
ROOT = -2


class Request(NamedTuple):
    """Block numbers of one prompt; equal numbers are equal prefixes."""

    seconds: float
    blocks: np.ndarray
    output_tokens: int = 0


class Blocks:
    """What the index asks of a chain, from block numbers alone."""

    def __init__(self, numbers: np.ndarray) -> None:
        words = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.keys = np.stack((words ^ (words >> np.uint64(29)), numbers.astype(np.uint64)), axis=1)
        self.num_blocks = len(numbers)
        self.extras = np.zeros((len(numbers), 2), np.uint64)
        self.token_blocks = np.zeros((len(numbers), 0), np.uint32)
        self.memo: dict[int, Any] = {}


def read_mooncake(path: Path, most: int | None = None) -> list[Request]:
    """Requests of a trace in Mooncake's format; a block is its id and all ids before it."""
    numbers: dict[tuple[int, int], int] = {}
    requests = []
    for at, line in zip(range(most or 1 << 30), path.open(), strict=False):
        row, above = json.loads(line), -1
        chain = []
        for block in row["hash_ids"]:
            above = numbers.setdefault((above, block), len(numbers))
            chain.append(above)
        # A little later than the one before: stamps tell requests apart that came in the same millisecond.
        requests.append(Request(row["timestamp"] / 1000 + at * 1e-6, np.array(chain), row["output_length"]))
    return requests


def unique_blocks(requests: Iterable[Request]) -> int:
    return len(np.unique(np.concatenate([request.blocks for request in requests])))


def usable_hits(
    requests: Sequence[Request],
    capacity: int,
    policy: EvictionPolicy,
    hint: Callable[[int], RequestHint] = lambda number: NO_HINT,
) -> float:
    """Share of all blocks that lie in the longest stored prefix of their request."""
    now, hits = 0.0, 0
    index = Index(capacity, 0, policy, lambda: now)
    for number, (now, numbers, output_tokens) in enumerate(requests):  # noqa: B007  the clock reads it
        chain, known = Blocks(numbers), hint(number)
        found = index.match(chain, ROOT, chain.num_blocks, hint=known).rows
        hits += len(found)
        new = index.reserve(chain, ROOT, 0, chain.num_blocks, hint=known).rows
        index.commit(new, known)
        if len(found) or len(new):
            index.finish(int(new[-1] if len(new) else found[-1]), output_tokens)
        if len(found):
            index.unpin(int(found[-1]))
    assert index.check() == []
    return hits / sum(len(request.blocks) for request in requests)


def block_hits(requests: Sequence[Request], capacity: int, policy: EvictionPolicy) -> int:
    """Hits when every block stands for itself, as in simulators of ordinary caches: one access after the other."""
    row_of: dict[int, int] = {}
    keys = np.zeros((capacity, 2), np.uint64)
    free, number_of = list(range(capacity)), np.zeros(capacity, np.int64)
    policy.bind(capacity, keys)
    hits, now = 0, 0.0
    for block in np.concatenate([request.blocks for request in requests]).tolist():
        now += 1.0
        row = row_of.get(block, -1)
        if row >= 0:
            hits += 1
            policy.on_request(now, np.array([row], np.int32), 1, NO_HINT)
            continue
        if not free:
            key = Blocks(np.array([block])).keys
            if not policy.make_room(now, key, NO_HINT, lambda row: free.append(row) or -1)[1]:
                continue
            del row_of[number_of[free[0]]]
        row = free.pop()
        row_of[block], number_of[row] = row, block
        keys[row] = Blocks(np.array([block])).keys[0]
        policy.on_request(now, np.array([row], np.int32), 0, NO_HINT)
        policy.on_evictable(row, True)
    return hits
