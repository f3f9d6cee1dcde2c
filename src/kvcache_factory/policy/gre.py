"""Gittins Reuse Eviction: evicts the leaf that promises the fewest hits for the time it would be kept."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .base import NO_TREE, Action, EvictionPolicy, Keys, RequestHint, Rows, Target, TreeColumns, Unlink, columns_of
from .ghosts import Ghosts
from .hazard import BUCKETS, CLASSES, EDGES, NUMBER, index_table
from .spells import (
    COLUMNS,
    GAP,
    GHOST_COLUMNS,
    LAST,
    LEAVES,
    OPEN,
    RANDOM,
    REFUSED,
    SPELLS,
    bid,
    finish,
    leave,
    touch,
)

RING = 32_768
REBUILD_EVERY = 50
REBUILD_AFTER_S = 1.0
_NO_BIDS = np.empty(0)
_NO_PAST = np.empty((0, GHOST_COLUMNS))
_HINTS = {"unknown": 0, "returns": 1, "tool_pending": 1, "ended": 2}


class GREEvictionPolicy(EvictionPolicy):
    """Learns how long blocks of each class wait for their next use, and evicts by the Gittins index of that wait (GRE).

    After Gittins, "Bandit Processes and Dynamic Allocation Indices", JRSS B 1979, applied to reuse times as in LHD
    (Beckmann et al., NSDI 2018), on the leaves of the prefix tree.  A class is what is known of a block: uses, distance
    from the end of its prompt, last gap, tokens generated after it, and what the caller hinted.  A newcomer that is
    worth less than whoever would leave for it is not stored, nor what hangs on it.  A victim is the worst of 64 random
    leaves.  The table of indices is learned anew every 50 requests, at most once a second, beside the running one.

    Parameters
    ----------
    ghost_ratio:
        Blocks that are remembered after they left, in multiples of the rows, up to 4; 0: none, else 32,768 at least.
    seed:
        Start of the random numbers.
    """

    name: ClassVar[str] = "gre"
    bytes_per_row: int = 400

    def __init__(
        self,
        max_size_gb: float | None = None,
        ghost_ratio: float = 4.0,
        seed: int = 1,
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        if isinstance(ghost_ratio, bool) or not 0 <= ghost_ratio <= 4:
            raise ConfigError(f"GREEvictionPolicy(ghost_ratio={ghost_ratio!r}): use 0 to 4")
        self.ghost_ratio = ghost_ratio
        self.seed = int(seed)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "ghost_ratio": self.ghost_ratio, "seed": self.seed}

    def bind(self, rows: int, keys: Keys) -> None:
        self._keys = keys
        self._book = np.zeros((rows, COLUMNS))
        self._worth = np.full((rows, 3), -1.0)
        # As many as there are spells, at least: a forgotten ghost's spell never ends, and its class looks unused.
        ghosts = max(int(rows * self.ghost_ratio), RING) if self.ghost_ratio else 0
        self._ghosts = Ghosts(ghosts, GHOST_COLUMNS)
        self._ring = np.zeros((RING, 5))
        self._ring[:, NUMBER] = -1
        # A flat table: before anything is learned, ties let the least recently used leave.
        self._table = (np.full((CLASSES, BUCKETS), 1e-6), 0.0)
        self._leaves = np.zeros(rows, np.int32)
        self._position = np.full(rows, -1, np.int32)
        self._state = np.zeros(4, np.int64)
        self._state[RANDOM] = (self.seed << 16) + 0x330E
        self._picked = np.zeros(rows, np.int32)
        self._leaf_at, self._position_at = memoryview(self._leaves), memoryview(self._position)
        self._state_at = memoryview(self._state)
        self._now = 0.0
        self._requests = 0
        self._rebuilt_at = float("-inf")
        self._rebuilding = False

    # -- what happens -------------------------------------------------------------------------------------------------

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._now = now
        if not hint.first_block:
            self._requests += 1
            if self._requests % REBUILD_EVERY == 0 or self._requests < 5:
                self._rebuild()
        new = rows[hit_len:]
        past = self._ghosts.take(self._keys[new]) if len(new) else _NO_PAST
        place = (hint.first_block, max(hint.total_blocks, hint.first_block + len(rows)))
        touch(rows, hit_len, now, *place, *_known(hint), past, self._book, self._worth, self._ring, self._state)

    def on_finish(self, rows: Rows, output_tokens: int) -> None:
        finish(rows, _output_class(output_tokens), self._book, self._worth, self._ring)

    def on_evictable(self, row: int, evictable: bool) -> None:
        at = self._position_at[row]
        if (at >= 0) == evictable:
            return
        state, leaves = self._state_at, self._leaf_at
        count = state[LEAVES]
        if evictable:
            leaves[count] = row
            self._position_at[row] = count
            state[LEAVES] = count + 1
            return
        moved = leaves[count - 1]
        leaves[at] = moved
        self._position_at[moved] = at
        self._position_at[row] = -1
        state[LEAVES] = count - 1

    def restore(self, rows: Rows) -> None:
        self._worth[rows] = -1.0
        self._book[rows] = 0.0
        self._book[rows, GAP] = self._book[rows, OPEN] = -1.0
        self._book[rows, LAST] = self._now - len(rows) + np.arange(len(rows))

    # -- who leaves ---------------------------------------------------------------------------------------------------

    def make_room(self, now: float, keys: Keys, hint: RequestHint, unlink: Unlink) -> tuple[int, list[int]]:
        self._now = max(now, self._now)
        bids = np.empty(len(keys))
        place = (hint.first_block, max(hint.total_blocks, hint.first_block + len(keys)))
        past = self._ghosts.peek(keys)
        bid(now, *place, *_known(hint), past, self._table[0], bids)
        leaving = self._leave(len(keys), bids, unlink)
        admitted = len(leaving) if self._state_at[REFUSED] else len(keys)
        if admitted < len(keys) and self._ghosts.capacity:
            # What is not stored was asked for all the same: how long until it is again is worth knowing.
            refused = np.arange(len(keys) - admitted, dtype=np.int32)
            book, worth = np.empty((len(refused), COLUMNS)), np.empty((len(refused), 3))
            known = (place[0] + admitted, place[1], *_known(hint), past[admitted:])
            touch(refused, 0, now, *known, book, worth, self._ring, self._state)
            self._ghosts.add(keys[admitted:], book[:, :GHOST_COLUMNS])
        return admitted, leaving

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        return self._leave(count, _NO_BIDS, unlink)

    def next_victim(self) -> int:
        return int(self._picked[0]) if self._pick(1, _NO_BIDS, NO_TREE) else -1

    def _pick(self, want: int, bids: npt.NDArray[np.float64], tree: TreeColumns) -> int:
        table, epoch = self._table
        books = (self._book, self._worth, self._leaves, self._position, self._state, self._picked)
        return int(leave(self._now, want, bids, *tree, table, epoch, EDGES, *books))

    def _leave(self, count: int, bids: npt.NDArray[np.float64], unlink: Unlink) -> list[int]:
        tree = columns_of(unlink)
        leaving: list[int] = []
        if tree is not None:
            left = self._picked[: self._pick(count, bids, tree)]
            self._ghosts.add(self._keys[left], self._book[left, :GHOST_COLUMNS])
            victims: list[int] = left.tolist()
            return victims
        while len(leaving) < count and self._pick(1, bids[len(leaving) :], NO_TREE):
            leaving.append(int(self._picked[0]))
            parent = unlink(leaving[-1])
            if parent >= 0:
                self.on_evictable(parent, True)
        if leaving:
            self._ghosts.add(self._keys[leaving], self._book[leaving, :GHOST_COLUMNS])
        return leaving

    # -- learning -----------------------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """Have the table learned anew from a copy of the spells, beside the index's lock where a manager can."""
        if self._rebuilding or self._now - self._rebuilt_at < REBUILD_AFTER_S:
            return
        self._rebuilding, self._rebuilt_at = True, self._now
        count, now, epoch = self._state_at[SPELLS], self._now, self._table[1] + 1
        oldest = count % RING if count > RING else 0
        spells = np.concatenate((self._ring[oldest:count], self._ring[:oldest]))

        def learn() -> None:
            try:
                self._table = (index_table(spells, now), epoch)
            finally:
                self._rebuilding = False

        if not self.defer(learn):
            self._rebuilding = False


def _known(hint: RequestHint) -> tuple[int, int]:
    """What a hint says that is part of a class."""
    return _HINTS[hint.reuse], _output_class(hint.output_tokens) if hint.output_tokens else 0


def _output_class(tokens: int) -> int:
    return min(6, max(0, (tokens + 1).bit_length() - 4))
