"""The index of a store that keeps its own records and is shared with other processes.

Rows are plenty and only number what the store holds.  Rows of blocks that another process owns are here too, pinned by
that ownership.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..policy.base import EvictionPolicy
from ..store.base import Entries
from .movable import MovableIndex
from .roots import Roots
from .table import Rows
from .tree import READY


class LastingIndex(MovableIndex):
    """An index without tokens, which can take over what a directory already holds."""

    def __init__(self, rows: int, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        super().__init__(rows, 0, policy, clock, deferred=True)
        self.foreign = np.zeros(rows, np.bool_)
        """Rows of other processes, each with a pin that stands for that."""

    def enter(self, entries: Entries, roots: Roots) -> Rows:
        """Give rows to *entries* that are connected to a root and not here yet; returns a row or -1 for each.

        Entries of other processes stay pinned until :meth:`own` or :meth:`lose`.
        """
        with self._lock:
            rows = np.full(len(entries.keys), -1, np.int32)
            fresh = _first_of_each(entries)
            fresh = fresh[self._table.find(entries.keys[fresh]) < 0][: self._num_free]
            if not len(fresh):
                return rows
            new = self._free[self._num_free - len(fresh) : self._num_free][::-1].copy()
            self._num_free -= len(fresh)
            self._live += len(fresh)
            self._fill_columns(new, entries, fresh)
            self._table.insert(new)
            connected = self._connect(new, entries, fresh, roots)
            self._discard(new[~connected])
            new, fresh = new[connected], fresh[connected]
            rows[fresh] = new
            parents = self.parent[new]
            np.add.at(self.children, parents[parents >= 0], 1)
            self.state[new] = READY
            self.foreign[new] = ~entries.owned[fresh]
            self.pins[new] = self.foreign[new]
            self.policy.restore(new[np.argsort(entries.time_ns[fresh], kind="stable")])
            for row in parents[parents >= 0].tolist():
                self.policy.on_evictable(row, False)
            for row in new[(self.children[new] == 0) & (self.pins[new] == 0)].tolist():
                self.policy.on_evictable(row, True)
            return rows

    def own(self, rows: Rows) -> None:
        """*rows* of another process are this process's from now on."""
        with self._lock:
            taken = rows[self.foreign[rows]]
            self.foreign[taken] = False
            for row in taken.tolist():
                self.unpin(row)

    def lose(self, rows: Rows) -> int:
        """The blocks of *rows*, whoever's they are, are gone; drop them and what was built on them."""
        with self._lock:
            lost = self._doom(rows)
            self.own(rows)
            return lost

    def _fill_columns(self, new: Rows, entries: Entries, fresh: npt.NDArray[np.int64]) -> None:
        self.keys[new] = entries.keys[fresh]
        self.extras[new] = entries.extras[fresh]
        self.depth[new] = entries.depth[fresh]
        self.fidelity[new] = entries.fidelity[fresh]
        self.layout[new] = entries.layout[fresh]
        self.codings[new] = 0
        self.children[new] = 0
        self.hits[new] = 0
        self.busy[new] = False
        self.wipe[new] = False

    def _connect(
        self, new: Rows, entries: Entries, fresh: npt.NDArray[np.int64], roots: Roots
    ) -> npt.NDArray[np.bool_]:
        """Set the parents of *new* rows; True for those whose chain reaches a root without a gap."""
        parents = self._table.find(entries.parents[fresh])
        depth = entries.depth[fresh]
        connected = (depth == 0) | ((parents >= 0) & (self.depth[parents] == depth - 1))
        first = np.flatnonzero(depth == 0)
        heads = entries.parents[fresh[first]]
        for head in np.unique(heads, axis=0):
            same = first[(heads == head).all(axis=1)]
            identity = entries.identities[fresh[same[0]]].tobytes()
            parents[same] = roots.number(head.tobytes(), identity)
        self.parent[new] = parents
        # A row is connected when all rows above it are: spread the gaps downwards by pointer doubling.
        number = np.full(self.capacity, -1, np.int32)
        number[new] = np.arange(len(new))
        up = np.where(parents >= 0, number[parents], -1)
        up = np.where(up >= 0, up, np.arange(len(new)))
        for _ in range(int(depth.max()).bit_length() + 1):
            connected &= connected[up]
            up = up[up]
        reached: npt.NDArray[np.bool_] = connected
        return reached

    def _discard(self, rows: Rows) -> None:
        self._table.remove(rows)
        self._live -= len(rows)
        self._return(rows)


def _first_of_each(entries: Entries) -> npt.NDArray[np.int64]:
    """One entry for each key, parents before children; a block of our own goes before another process's copy."""
    order = np.lexsort((~entries.owned, entries.keys[:, 1], entries.keys[:, 0]))
    keys = entries.keys[order]
    repeated = np.zeros(len(order), np.bool_)
    repeated[1:] = (keys[1:] == keys[:-1]).all(axis=1)
    unique = order[~repeated]
    sorted_by_depth: npt.NDArray[np.int64] = unique[np.argsort(entries.depth[unique], kind="stable")]
    return sorted_by_depth
