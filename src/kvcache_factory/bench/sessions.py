"""``bench sessions``: many threads on many sessions against one thread on the same.

A turn is what an adapter does for one request of a conversation: look up its chain, load what is found, give the lease
back, and store one new block, charged to its session.  A conversation that has become long starts over, so that blocks
leave by policy and by quota all the time; conversations are of all lengths at any time.  Tokens are drawn beforehand,
as those of an engine are there when it asks.  Each thread has tensors of its own, as an engine has.

Blocks are of two sizes: those of SmolLM2-135M, the smallest model that is in use, and of a tenth of that.  The second
are the hard case: a turn is nearly all Python then, of which one thread runs at a time.

Each round measures all numbers of threads in another order; the figure is the ratio to one thread in the same round.
Wall time is what counts, and what neighbours on the machine disturb; CPU time a turn tells what threads cost each
other.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import jit
from ..backend import GIB, CPUBackend
from ..block.identity import Identity
from ..block.key import KeyChain
from ..block.spec import BlockSpec, KVDtype
from ..keyspace import KeySpace
from ..manager import CacheManager
from ..memory.region import SequenceRegion
from .measure import Progress, quiet

SESSIONS = 200
THREADS = (1, 2, 8, 32)
SPECS = (
    BlockSpec(dtype=KVDtype.BF16, num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16),
    BlockSpec(dtype=KVDtype.F16, num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16),
)
BEGIN, MOST = 16, 64
"""Blocks of a conversation when it begins, and when it starts over."""
_DRAWN = 1 << 14
"""Tokens that a conversation draws at once."""


class Talk:
    """One conversation of a session."""

    def __init__(self, number: int, space: KeySpace) -> None:
        self.name = f"session {number}"
        self._space = space
        self._random = np.random.default_rng(number)
        self._tokens = self._draw()
        self._starts = np.arange(MOST + 1) * space.block_tokens
        self.chain = self._begin(int(self._random.integers(BEGIN, MOST)))

    def _draw(self) -> npt.NDArray[np.uint32]:
        return self._random.integers(0, 50_000, _DRAWN, np.uint32)

    def _next(self, blocks: int) -> npt.NDArray[np.uint32]:
        """New tokens of so many blocks."""
        count = blocks * self._space.block_tokens
        if len(self._tokens) < count:
            self._tokens = self._draw()
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        return tokens

    def _begin(self, blocks: int = BEGIN) -> KeyChain:
        return self._space.chain(self._next(blocks))

    def turn(self, region: SequenceRegion) -> None:
        """One request, with the tensors of an engine."""
        space = self._space
        match = space.match(self.chain, self.name, session=self.name, reuse_hint="returns")
        space.load(match, region, region.positions(0, self._starts[: match.blocks]))
        space.release(self.name)
        if self.chain.num_blocks >= MOST:
            self.chain = self._begin()
        self.chain.extend(self._next(1))
        if match.blocks < self.chain.num_blocks:
            positions = region.positions(0, self._starts[match.blocks : self.chain.num_blocks])
            space.save(self.chain, region, positions, first=match.blocks, session=self.name, reuse_hint="returns")


def run_sessions(progress: Progress | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``threads``, ``sessions``, ``turns_per_s``, ``ratio`` (to one thread), ``cpu_ms`` (a turn): medians."""
    progress = progress or quiet
    jit.warm_up()
    rounds = 3 if quick else 7
    rows: list[dict[str, Any]] = []
    for number, spec in enumerate(SPECS):

        def began(turn: int, first: int = number * rounds, size: int = spec.payload_bytes) -> None:
            progress(first + turn, rounds * len(SPECS), f"blocks of {size >> 10} KiB, round {turn + 1}")

        rows += _rows(spec, rounds, 400 if quick else 1600, began)
    progress(rounds * len(SPECS), rounds * len(SPECS))
    return rows


def _rows(spec: BlockSpec, rounds: int, turns: int, began: Callable[[int], None]) -> list[dict[str, Any]]:
    size_gb = SESSIONS * MOST // 2 * spec.slot_bytes / GIB
    with CacheManager(CPUBackend(size_gb=size_gb, huge_pages=False), name="bench") as manager:
        space = manager.register(spec, Identity("bench", spec.dtype.value, spec.block_tokens))
        quota_gb = MOST * 3 / 4 * (spec.slot_bytes + 512) / GIB
        for number in range(SESSIONS):
            manager.create_session(f"session {number}", quota_gb=quota_gb, labels={"tenant": f"t{number % 8}"})
        talks = [Talk(number, space) for number in range(SESSIONS)]
        regions = [_region(spec) for _ in range(max(THREADS))]
        for threads in (1, max(THREADS)):
            _measure(talks, regions[:threads], 2 * SESSIONS)
        found: dict[int, list[tuple[float, float]]] = {threads: [] for threads in THREADS}
        for number in range(rounds):
            began(number)
            start = number % len(THREADS)
            for threads in THREADS[start:] + THREADS[:start]:
                found[threads].append(_measure(talks, regions[:threads], turns))
        problems = manager.check()
        assert not problems, problems
    one = [speed for speed, _ in found[1]]
    return [
        {
            "block_bytes": spec.payload_bytes,
            "threads": threads,
            "sessions": SESSIONS,
            "turns_per_s": round(statistics.median(speed for speed, _ in figures)),
            "ratio": round(statistics.median(s / base for (s, _), base in zip(figures, one, strict=True)), 3),
            "cpu_ms": round(statistics.median(cost for _, cost in figures) * 1e3, 3),
        }
        for threads, figures in found.items()
    ]


def _region(spec: BlockSpec) -> SequenceRegion:
    import torch

    shape = (1, spec.num_kv_heads, (MOST + 1) * spec.block_tokens, spec.head_dim)
    kind = getattr(torch, spec.dtype.value)
    keys, values = ([torch.zeros(shape, dtype=kind) for _ in range(spec.num_layers)] for _ in range(2))
    return SequenceRegion.from_layers(keys, values, spec)


def _measure(talks: Sequence[Talk], regions: Sequence[SequenceRegion], turns: int) -> tuple[float, float]:
    """Turns a second of a thread for each of *regions*, and CPU seconds a turn; a talk is of one thread only."""
    threads = len(regions)
    ready, failures = threading.Barrier(threads + 1), []

    def work(mine: Sequence[Talk], region: SequenceRegion, count: int) -> None:
        ready.wait()
        try:
            for number in range(count):
                mine[number % len(mine)].turn(region)
        except Exception as error:
            failures.append(error)

    shares = [(talks[number::threads], regions[number], turns // threads) for number in range(threads)]
    workers = [threading.Thread(target=work, args=share) for share in shares]
    for worker in workers:
        worker.start()
    ready.wait()
    begun, spent = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.join()
    seconds, spent = time.perf_counter() - begun, time.process_time() - spent
    if failures:
        raise failures[0]
    done = turns // threads * threads
    return done / seconds, spent / done
