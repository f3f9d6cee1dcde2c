"""The index of a tier that moves the bytes of blocks that stay where they are in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .index import Index
from .table import Rows
from .tree import FREE, READY


class MovableIndex(Index):
    """Knows which blocks nobody relies on: neither on them nor on anything that is built on them."""

    def visible(self) -> npt.NDArray[np.bool_]:
        """Where a row is ready, ``bool [rows]``; a hint, because nothing is locked."""
        ready: npt.NDArray[np.bool_] = self.state == READY
        return ready

    def deepest(self) -> npt.NDArray[np.int32]:
        """For each row, how deep the deepest block lies that is built on it; a hint as long as nobody holds it."""
        with self._lock:
            live = np.flatnonzero(self.state != FREE)
            reach = np.where(self.state != FREE, self.depth, -1).astype(np.int32)
            order = live[np.argsort(-self.depth[live], kind="stable")]
            cuts = np.flatnonzero(np.diff(self.depth[order])) + 1
            for level in np.split(order, cuts) if len(order) else []:
                inner = level[self.parent[level] >= 0]
                np.maximum.at(reach, self.parent[inner], reach[inner])
            return reach

    def pin_ready(self, row: int) -> bool:
        """Pin *row* if it is ready; False if it is not."""
        with self._lock:
            ready = bool(self.state[row] == READY)
            if ready:
                self._pin(row)
            return ready

    def unheld(self, rows: Rows, own: int = 0) -> Rows:
        """Those of *rows* that are ready, and of which nobody else than *own* pins holds anything that is built on."""
        with self._lock:
            held = np.zeros(self.capacity, np.bool_)
            pinned = self.pins > 0
            pinned[rows] = self.pins[rows] > own
            up = np.flatnonzero(pinned | self.busy).astype(np.int32)
            while len(up):
                held[up] = True
                above = np.unique(self.parent[up])
                above = above[above >= 0]
                up = above[~held[above]]
            free: Rows = rows[~held[rows] & (self.state[rows] == READY)]
            return free

    def while_unheld(self, row: int, own: int, action: Callable[[], None]) -> bool:
        """As :meth:`if_unheld`, and after that the block may be another than an earlier match has verified."""

        def change() -> None:
            action()
            self.generation[row] += 1

        return self.if_unheld(row, own, change)

    def if_unheld(self, row: int, own: int, action: Callable[[], None]) -> bool:
        """Do *action*, which must be quick, if nobody else than *own* pins holds *row* or anything on it.

        False if somebody does.
        """
        with self._lock:
            free = len(self.unheld(np.array([row], np.int32), own)) > 0
            if free:
                action()
            return free
