"""``bench sessions``: many threads on many sessions against one thread on the same.

A turn is what an adapter does for one request of a conversation: look up its chain, load what is found, give the lease
back, and store one new block, charged to its session.  A conversation that has become long starts over, so that blocks
leave by policy and by quota all the time; conversations are of all lengths at any time.  Tokens are drawn beforehand,
as those of an engine are there when it asks.

Each round measures all numbers of threads in another order; the figure is the ratio to one thread in the same round.
Wall time is what counts, and what neighbours on the machine disturb; CPU time a turn tells what threads cost each
other.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
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
BEGIN, MOST = 16, 64
"""Blocks of a conversation when it begins, and when it starts over."""
_DRAWN = 1 << 14
"""Tokens that a conversation draws at once."""


class Talk:
    """One conversation of a session: its chain, and tensors of an engine for it."""

    def __init__(self, number: int, space: KeySpace, region: SequenceRegion) -> None:
        self.name = f"session {number}"
        self._space = space
        self._region = region
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

    def turn(self) -> None:
        """One request."""
        space, region = self._space, self._region
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
    rounds, turns = (3, 400) if quick else (7, 1600)
    spec = BlockSpec(dtype=KVDtype.F16, num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16)
    size_gb = SESSIONS * MOST // 2 * spec.slot_bytes / GIB
    with CacheManager(CPUBackend(size_gb=size_gb, huge_pages=False), name="bench") as manager:
        space = manager.register(spec, Identity("bench", spec.dtype.value, spec.block_tokens))
        quota_gb = MOST * 3 / 4 * (spec.slot_bytes + 512) / GIB
        talks = [_open(manager, space, spec, number, quota_gb) for number in range(SESSIONS)]
        _measure(talks, 1, 2 * SESSIONS)
        speeds: dict[int, list[float]] = {threads: [] for threads in THREADS}
        costs: dict[int, list[float]] = {threads: [] for threads in THREADS}
        for number in range(rounds):
            progress(number, rounds, f"round {number + 1}")
            start = number % len(THREADS)
            for threads in THREADS[start:] + THREADS[:start]:
                speed, cost = _measure(talks, threads, turns)
                speeds[threads].append(speed)
                costs[threads].append(cost)
        problems = manager.check()
        assert not problems, problems
    progress(rounds, rounds)
    return [
        {
            "threads": threads,
            "sessions": SESSIONS,
            "turns_per_s": round(statistics.median(speed)),
            "ratio": round(statistics.median(s / one for s, one in zip(speed, speeds[1], strict=True)), 3),
            "cpu_ms": round(statistics.median(costs[threads]) * 1e3, 3),
        }
        for threads, speed in speeds.items()
    ]


def _open(manager: CacheManager, space: KeySpace, spec: BlockSpec, number: int, quota_gb: float) -> Talk:
    import torch

    manager.create_session(f"session {number}", quota_gb=quota_gb, labels={"tenant": f"t{number % 8}"})
    shape = (1, spec.num_kv_heads, (MOST + 1) * spec.block_tokens, spec.head_dim)
    keys, values = ([torch.zeros(shape, dtype=torch.float16) for _ in range(spec.num_layers)] for _ in range(2))
    return Talk(number, space, SequenceRegion.from_layers(keys, values, spec))


def _measure(talks: Sequence[Talk], threads: int, turns: int) -> tuple[float, float]:
    """Turns a second of *threads* threads that share *talks*, each in one thread at a time; CPU seconds a turn."""
    ready, failures = threading.Barrier(threads + 1), []

    def work(mine: Sequence[Talk], count: int) -> None:
        ready.wait()
        try:
            for number in range(count):
                mine[number % len(mine)].turn()
        except Exception as error:
            failures.append(error)

    shares = [(talks[number::threads], turns // threads) for number in range(threads)]
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
