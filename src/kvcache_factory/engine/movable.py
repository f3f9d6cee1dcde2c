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

    def while_unheld(self, rows: Rows, own: int, action: Callable[[Rows], None]) -> Rows:
        """As :meth:`if_unheld`, and after that the blocks may be others than an earlier match has verified."""

        def change(free: Rows) -> None:
            action(free)
            self.generation[free] += 1

        return self.if_unheld(rows, own, change)

    def if_unheld(self, rows: Rows, own: int, action: Callable[[Rows], None]) -> Rows:
        """Do *action*, which must be quick, with those of *rows* that :meth:`unheld` tells; returns these."""
        with self._lock:
            free = self.unheld(rows, own)
            if len(free):
                action(free)
            return free
