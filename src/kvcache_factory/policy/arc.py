"""Queues of recency and frequency that adapt or age: ARC and MQ."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from .base import NO_TREE, Action, Keys, RequestHint, Rows, Target, TreeColumns, Unlink
from .ghosts import Ghosts
from .queues import FIRST, SECOND, SIZE, QueuePolicy, leave_arc, leave_lowest, place, use_mq

_NOBODY = np.empty((0, 1))


class ARCEvictionPolicy(QueuePolicy):
    """Two LRU queues, blocks used once and blocks used more, whose sizes follow the ghosts that come back (ARC).

    Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.  Deviations: only leaves leave;
    the target size moves when room is made, so not by ghosts that return while rows are free.
    """

    name: ClassVar[str] = "arc"
    bytes_per_row: int = 120
    _ONCE, _MORE = 0, 1

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._ghosts = (Ghosts(rows, 1), Ghosts(2 * rows, 1))
        self._out_of = np.zeros(rows, np.int32)
        self._target = np.zeros(1)
        self._returning = (_NOBODY, _NOBODY)

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        queues = np.full(len(rows), self._MORE, np.int32)
        if hit_len < len(rows):
            keys = self._keys[rows[hit_len:]]
            known = (self._ghosts[0].take(keys) >= 0) | (self._ghosts[1].take(keys) >= 0)
            queues[hit_len:] = known[:, 0]
        place(self._books, rows, queues)
        if hit_len < len(rows):
            self._trim()

    def restore(self, rows: Rows) -> None:
        self._place(rows, self._ONCE)

    def make_room(self, now: float, keys: Keys, hint: RequestHint, unlink: Unlink) -> tuple[int, list[int]]:
        self._returning = (self._ghosts[0].peek(keys), self._ghosts[1].peek(keys))
        try:
            return len(keys), self.victims(len(keys), unlink)
        finally:
            self._returning = (_NOBODY, _NOBODY)

    def _leave(self, count: int, tree: TreeColumns) -> int:
        self._state[FIRST], self._state[SECOND] = (len(ghosts) for ghosts in self._ghosts)
        books = (self._books, *self._returning, self._target, self._out, self._out_of)
        found = int(leave_arc(count, tuple(tree), *books))
        if tree is NO_TREE:  # one at a time: the next newcomer with the next
            self._returning = (self._returning[0][1:], self._returning[1][1:])
        return found

    def _remember(self, rows: Rows) -> None:
        out_of = self._out_of[: len(rows)]
        for queue, ghosts in enumerate(self._ghosts):
            left = rows[out_of == queue]
            if len(left):
                ghosts.add(self._keys[left])
        self._trim()

    def _trim(self) -> None:
        once, more = int(self._state[SIZE]), int(self._state[SIZE + 1])
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
    bytes_per_row: int = 220

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
        self._ghosts = Ghosts(int(rows * self.ghost_ratio), 1)
        self._life = max(int(rows * self.lifetime), 1)
        self._accesses = 0

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._accesses += len(rows)
        new = rows[hit_len:]
        past = self._ghosts.take(self._keys[new]) if len(new) else _NOBODY
        use_mq(self._books, self._uses, self._expires, rows, hit_len, past, self._accesses, self._life)

    def restore(self, rows: Rows) -> None:
        self._uses[rows] = 1
        self._expires[rows] = self._life
        self._place(rows, 0)

    def _leave(self, count: int, tree: TreeColumns) -> int:
        return int(leave_lowest(count, tuple(tree), self._books, self._out))

    def _remember(self, rows: Rows) -> None:
        self._ghosts.add(self._keys[rows], self._uses[rows].astype(np.float64)[:, None])
