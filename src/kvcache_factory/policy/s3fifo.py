"""Queues that tell blocks used once from the rest: S3-FIFO and SIEVE."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .base import NO_HINT, Action, Keys, RequestHint, Rows, Target, Unlink
from .ghosts import Ghosts
from .queues import QueuePolicy

_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1


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
        self._left_small: list[int] = []
        self._has_evicted = False

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        hits, new = rows[:hit_len], rows[hit_len:]
        self._uses[hits] = np.minimum(self._uses[hits], 2) + 1
        if not len(new):
            return
        self._uses[new] = 0
        known = self._ghosts.take(self._keys[new])[:, 0] >= 0
        # A cache that has never been full has no reason to keep newcomers apart.
        fresh = new[~known]
        room = len(fresh) if self._has_evicted else max(self._small_rows - self._size[self._SMALL], 0)
        self._place(fresh[:room], self._SMALL)
        self._place(fresh[room:], self._MAIN)
        self._place(new[known], self._MAIN)

    def restore(self, rows: Rows) -> None:
        self._uses[rows] = 0
        self._place(rows, self._MAIN)

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        leaving = super().victims(count, unlink)
        self._has_evicted |= bool(leaving)
        if self._left_small:
            self._ghosts.add(self._keys[self._left_small])
            self._left_small = []
        return leaving

    def _choose(self) -> int:
        while True:
            full = self._size[self._MAIN] > self._rows - self._small_rows
            queue = self._fallback(*((self._MAIN, self._SMALL) if full else (self._SMALL, self._MAIN)))
            if queue < 0:
                return -1
            row = self._queues[queue].pop()
            uses = int(self._uses[row])
            if queue == self._SMALL:
                if uses < self.threshold:
                    self._left_small.append(row)
                    return row
                self._uses[row] = 0
            elif not uses:
                return row
            else:
                self._uses[row] = uses - 1
            self._requeue(row, self._MAIN)


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
        self._round, self._hand = 0, 0

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._visited[rows[:hit_len]] = True
        self._visited[rows[hit_len:]] = False
        self._place(rows[hit_len:], 0)

    def restore(self, rows: Rows) -> None:
        self.on_request(0.0, rows, 0, NO_HINT)

    def on_evictable(self, row: int, evictable: bool) -> None:
        if evictable and not self._evictable_at[row]:
            # The hand may have passed by while the row was parked.
            self._stamp_at[row] = self._stamp_after(self._hand, self._stamp_at[row] & _PLACE)
        super().on_evictable(row, evictable)

    def _stamp_after(self, hand: int, place: int) -> int:
        return (self._round + (place < hand)) << _PLACE_BITS | place

    def _new_stamps(self, count: int) -> npt.NDArray[np.int64]:
        return super()._new_stamps(count) | self._round << _PLACE_BITS

    def _choose(self) -> int:
        queue = self._queues[0]
        while True:
            row = queue.pop()
            if row < 0:
                return row
            self._round, self._hand = divmod(self._stamp_at[row], 1 << _PLACE_BITS)
            if not self._visited[row]:
                return row
            self._visited[row] = False
            self._stamp_at[row] = self._stamp_after(self._hand + 1, self._hand)
            queue.push(row, self._stamp_at[row])
