"""Blocks one by one, as caches of unrelated objects see them: for comparison with simulators that know no prefixes."""

from __future__ import annotations

import math
import time

import numpy as np

from ..errors import CapacityError
from ..policy.base import NO_HINT, EvictionPolicy
from .replay import REPORT_EVERY, Outcome, Size
from .workload import Progress, Workload


def replay_flat(
    workload: Workload, policy: EvictionPolicy, capacity: int, progress: Progress = lambda done, total: None
) -> Outcome:
    """Replay every block access of *workload* in order, on a policy that is told of no tree.

    A block that is not there is stored at once, evicting one for it, wherever it is in its chain.
    """
    if capacity < 1:
        raise CapacityError(f"a capacity of {capacity} blocks holds nothing")
    begun = time.process_time()
    cache = _Flat(workload, policy.clone(), min(capacity, workload.unique))
    usable = np.zeros((1, len(workload)), np.int32)
    for number, at_s in enumerate(workload.at_s.tolist()):
        nodes = workload.request(number).tolist()
        cache.now = max(at_s, cache.now)
        usable[0, number] = cache.leading(nodes)
        for node in nodes:
            cache.access(node)
        if number % REPORT_EVERY == 0:
            progress(number, len(workload))
    return Outcome(
        policy=policy.name,
        sizes=[Size("cache", capacity)],
        blocks=workload.blocks,
        hits=usable,
        block_hits=cache.hits,
        evicted=[cache.evicted],
        stored=[cache.evicted + cache.held],
        moved=[0],
        held=[cache.held],
        seconds=time.process_time() - begun,
    )


class _Flat:
    """Which block is in which row; everything can leave at any time."""

    def __init__(self, workload: Workload, policy: EvictionPolicy, rows: int) -> None:
        self._keys = workload.book.keys
        self._policy = policy
        self._column = np.zeros((rows, 2), np.uint64)
        self._row_of = [-1] * workload.unique
        self._node_of = [-1] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._rows = np.arange(rows, dtype=np.int32)
        self.now = 0.0
        self.hits = 0
        self.evicted = 0
        policy.bind(rows, self._column)

    @property
    def held(self) -> int:
        """Blocks that are there."""
        return len(self._rows) - len(self._free)

    def leading(self, nodes: list[int]) -> int:
        """How many of the leading *nodes* are there."""
        rows = self._row_of
        return next((at for at, node in enumerate(nodes) if rows[node] < 0), len(nodes))

    def access(self, node: int) -> None:
        """Use one block, and store it if it is not there."""
        self.now = math.nextafter(self.now, math.inf)
        row = self._row_of[node]
        if row >= 0:
            self.hits += 1
            self._policy.on_request(self.now, self._rows[row : row + 1], 1, NO_HINT)
            return
        if not self._free:
            admitted, leaving = self._policy.make_room(self.now, self._keys[node : node + 1], NO_HINT, _no_tree)
            self._let_go(leaving)
            if not admitted or not self._free:
                return
        row = self._free.pop()
        self._row_of[node], self._node_of[row] = row, node
        self._column[row] = self._keys[node]
        self._policy.on_request(self.now, self._rows[row : row + 1], 0, NO_HINT)
        self._policy.on_evictable(row, True)

    def _let_go(self, rows: list[int]) -> None:
        self.evicted += len(rows)
        for row in rows:
            self._row_of[self._node_of[row]] = -1
            self._free.append(row)


def _no_tree(row: int) -> int:
    return -1
