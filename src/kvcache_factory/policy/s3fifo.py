"""Queues that tell blocks used once from the rest: S3-FIFO and SIEVE."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from .base import NO_HINT, Action, Keys, RequestHint, Rows, Target, TreeColumns
from .ghosts import Ghosts
from .queues import FIRST, SIZE, QueuePolicy, leave_s3fifo, leave_sieve, place, set_evictable_sieve


class S3FIFOEvictionPolicy(QueuePolicy):
    """Two queues: new blocks pass a small one, and only those used there enter the main one (S3-FIFO).

    Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.  Deviations: only leaves leave; uses are
    counted to 3 in both queues.  Ghosts are bounded, as in the paper and unlike in some implementations.

    Parameters
    ----------
    threshold:
        Uses in the small queue, 1 to 3, that move a block to the main one.
    small_ratio:
        Share of the rows that the small queue may take.
    ghost_ratio:
        Keys that are remembered, in multiples of the rows.
    """

    name: ClassVar[str] = "s3fifo"
    bytes_per_row: int = 32
    _SMALL, _MAIN = 0, 1

    def __init__(
        self,
        max_size_gb: float | None = None,
        threshold: int = 2,
        small_ratio: float = 0.1,
        ghost_ratio: float = 0.9,
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        if threshold not in (1, 2, 3) or isinstance(threshold, bool):
            raise ConfigError(f"S3FIFOEvictionPolicy(threshold={threshold!r}): use 1, 2 or 3")
        if not 0 < small_ratio < 1 or not 0 <= ghost_ratio <= 4:
            raise ConfigError(
                f"S3FIFOEvictionPolicy(small_ratio={small_ratio!r}, ghost_ratio={ghost_ratio!r}): the first must lie "
                "between 0 and 1, the second between 0 and 4"
            )
        self.threshold = threshold
        self.small_ratio = small_ratio
        self.ghost_ratio = ghost_ratio

    def options(self) -> dict[str, Any]:
        own = {"threshold": self.threshold, "small_ratio": self.small_ratio, "ghost_ratio": self.ghost_ratio}
        return {**super().options(), **own}

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._uses = np.zeros(rows, np.uint8)
        self._small_rows = max(int(rows * self.small_ratio), 1)
        self._ghosts = Ghosts(int(rows * self.ghost_ratio), 1)
        self._out_of = np.zeros(rows, np.int32)
        self._has_evicted = False

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        if hit_len:
            hits = rows[:hit_len]
            self._uses[hits] = np.minimum(self._uses[hits], 2) + 1
        if hit_len < len(rows):
            self._enter(rows[hit_len:])

    def _enter(self, new: Rows) -> None:
        self._uses[new] = 0
        queues = (self._ghosts.take(self._keys[new])[:, 0] >= 0).astype(np.int32)
        if not self._has_evicted:
            # A cache that has never been full has no reason to keep newcomers apart.
            room = max(self._small_rows - int(self._state[SIZE + self._SMALL]), 0)
            queues[room:] = self._MAIN
        place(self._books, new, queues)

    def restore(self, rows: Rows) -> None:
        self._uses[rows] = 0
        self._place(rows, self._MAIN)

    def _leave(self, count: int, tree: TreeColumns) -> int:
        self._has_evicted = True
        books = (self._books, self._uses, self.threshold, self._rows - self._small_rows, self._out, self._out_of)
        return int(leave_s3fifo(count, tuple(tree), *books))

    def _remember(self, rows: Rows) -> None:
        small = rows[self._out_of[: len(rows)] == self._SMALL]
        if len(small):
            self._ghosts.add(self._keys[small])


class SIEVEEvictionPolicy(QueuePolicy):
    """One queue and a hand that passes over what was used since it came by, and evicts the first that was not (SIEVE).

    Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.  Deviation: only leaves leave; the hand does not see the rest.

    A stamp is (round of the hand, place in the queue): what the hand has passed is behind all that it has not.
    """

    name: ClassVar[str] = "sieve"
    num_queues: ClassVar[int] = 1

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._visited = np.zeros(rows, np.bool_)

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        new = rows[hit_len:]
        self._visited[rows[:hit_len]] = True
        if len(new):
            self._visited[new] = False
            self._place(new, 0)
            self._stamp[new] |= int(self._state[FIRST]) << 32  # newcomers end the hand's round

    def restore(self, rows: Rows) -> None:
        self.on_request(0.0, rows, 0, NO_HINT)

    def on_evictable(self, row: int, evictable: bool) -> None:
        set_evictable_sieve(self._books, row, evictable)

    def _leave(self, count: int, tree: TreeColumns) -> int:
        return int(leave_sieve(count, tuple(tree), self._books, self._visited, self._out))
