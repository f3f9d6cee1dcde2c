"""Queues of recency and frequency that adapt or age: ARC and MQ."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from .base import Action, Keys, RequestHint, Rows, Target, Unlink
from .ghosts import Ghosts
from .queues import QueuePolicy


class ARCEvictionPolicy(QueuePolicy):
    """Two LRU queues, blocks used once and blocks used more, whose sizes follow the ghosts that come back (ARC).

    Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.  Deviations: only leaves leave;
    the target size moves when room is made, so not by ghosts that return while rows are free.
    """

    name: ClassVar[str] = "arc"
    _ONCE, _MORE = 0, 1

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._ghosts = (Ghosts(rows, 1), Ghosts(2 * rows, 1))
        self._left: tuple[list[int], list[int]] = ([], [])
        self._target = 0.0
        self._returns_from_more = False

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._place(rows[:hit_len], self._MORE)
        new = rows[hit_len:]
        if not len(new):
            return
        keys = self._keys[new]
        known = (self._ghosts[0].take(keys)[:, 0] >= 0) | (self._ghosts[1].take(keys)[:, 0] >= 0)
        self._place(new[~known], self._ONCE)
        self._place(new[known], self._MORE)
        self._trim()

    def restore(self, rows: Rows) -> None:
        self._place(rows, self._ONCE)

    def make_room(self, now: float, keys: Keys, hint: RequestHint, unlink: Unlink) -> tuple[int, list[int]]:
        once, more = (ghosts.peek(keys)[:, 0] >= 0 for ghosts in self._ghosts)
        leaving: list[int] = []
        for from_once, from_more in zip(once.tolist(), more.tolist(), strict=True):
            sizes = [len(ghosts) + len(left) for ghosts, left in zip(self._ghosts, self._left, strict=True)]
            if from_once:
                self._target = min(self._target + max(sizes[1] / sizes[0], 1.0), float(self._rows))
            elif from_more:
                self._target = max(self._target - max(sizes[0] / sizes[1], 1.0), 0.0)
            self._returns_from_more = from_more
            left = super().victims(1, unlink)
            if not left:
                break
            leaving += left
        self._returns_from_more = False
        self._bury()
        return len(keys), leaving

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        leaving = super().victims(count, unlink)
        self._bury()
        return leaving

    def _choose(self) -> int:
        once = self._size[self._ONCE]
        shrink = once > self._target or (self._returns_from_more and once == self._target)
        order = (self._ONCE, self._MORE) if once and shrink else (self._MORE, self._ONCE)
        queue = self._fallback(*order)
        if queue < 0:
            return -1
        row = self._queues[queue].pop()
        self._left[queue].append(row)
        return row

    def _bury(self) -> None:
        for ghosts, left in zip(self._ghosts, self._left, strict=True):
            if left:
                ghosts.add(self._keys[left])
                left.clear()
        self._trim()

    def _trim(self) -> None:
        once, more = self._size
        self._ghosts[0].trim(self._rows - once)
        self._ghosts[1].trim(2 * self._rows - once - more - len(self._ghosts[0]))


class MQEvictionPolicy(QueuePolicy):
    """LRU queues by the logarithm of uses, from which rows descend when they are not used for a lifetime (MQ).

    Zhou, Philbin and Li, "The Multi-Queue Replacement Algorithm for Second Level Buffer Caches", USENIX 2001.
    Deviations: only leaves leave, and only they descend; the lifetime is fixed in accesses, not measured.

    Parameters
    ----------
    lifetime:
        Block accesses after which an unused row descends by one queue, in multiples of the rows.
    ghost_ratio:
        Keys whose uses are remembered, in multiples of the rows.
    """

    name: ClassVar[str] = "mq"
    num_queues: ClassVar[int] = 8
    bytes_per_row: ClassVar[int] = 400

    def __init__(
        self,
        max_size_gb: float | None = None,
        lifetime: float = 2.0,
        ghost_ratio: float = 4.0,
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        if not 0 < lifetime < float("inf") or not 0 <= ghost_ratio <= 8:
            raise ConfigError(
                f"MQEvictionPolicy(lifetime={lifetime!r}, ghost_ratio={ghost_ratio!r}): the first must be above 0, the "
                "second between 0 and 8"
            )
        self.lifetime = lifetime
        self.ghost_ratio = ghost_ratio

    def options(self) -> dict[str, Any]:
        return {**super().options(), "lifetime": self.lifetime, "ghost_ratio": self.ghost_ratio}

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._uses = np.zeros(rows, np.int64)
        self._expires = np.zeros(rows, np.int64)
        self._expires_at = memoryview(self._expires)
        self._ghosts = Ghosts(int(rows * self.ghost_ratio), 1)
        self._life = max(int(rows * self.lifetime), 1)
        self._accesses = 0

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._accesses += len(rows)
        self._uses[rows[:hit_len]] += 1
        new = rows[hit_len:]
        if len(new):
            self._uses[new] = np.maximum(self._ghosts.take(self._keys[new])[:, 0], 0) + 1
        queues = np.minimum(np.log2(self._uses[rows]).astype(np.int64), self.num_queues - 1)
        self._expires[rows] = self._accesses + self._life
        for queue in np.unique(queues).tolist():
            self._place(rows[queues == queue], queue)
        self._descend()

    def restore(self, rows: Rows) -> None:
        self._uses[rows] = 1
        self._expires[rows] = self._life
        self._place(rows, 0)

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        leaving = super().victims(count, unlink)
        if leaving:
            self._ghosts.add(self._keys[leaving], self._uses[leaving].astype(np.float64)[:, None])
        return leaving

    def _choose(self) -> int:
        queue = self._fallback(*range(self.num_queues))
        return self._queues[queue].pop() if queue >= 0 else -1

    def _descend(self) -> None:
        for queue in range(1, self.num_queues):
            rows = self._queues[queue]
            while len(rows) and self._expires_at[rows.first()] < self._accesses:
                row = rows.pop()
                self._expires_at[row] = self._accesses + self._life
                self._requeue(row, queue - 1)
