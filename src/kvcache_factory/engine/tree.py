"""Rows of one tier as a tree in columns, and what holds each of them.

A row number is a slot number.  Per row there are a key, a record (parent, tokens, digest of the extras), a state, and
counts of what holds it; there are no Python objects per block.  Invariants, checked by :meth:`Tree.check`:

* a row is in the key table exactly when it is PENDING or READY;
* a row's parent is never freed before the row: contents are closed under prefix;
* a row can leave when it is READY, has no children and no pins; the policy knows exactly these rows;
* a busy row belongs to the operation that fills it, and nothing else frees it.

Where a store has work to do before a row's number can be used again (*deferred*), rows that are let go wait in limbo
until :meth:`Tree.recycle`.
"""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..jit import kernel
from ..policy.base import EvictionPolicy, TreeColumns
from .table import Keys, KeyTable, Rows, pick, pick_keys
from .waiting import Waiting

FREE, PENDING, READY, DOOMED = 0, 1, 2, 3
"""States of a row: free, reserved but not filled, visible, hidden and waiting to be let go."""

NO_KEYS: Keys = np.empty((0, 2), np.uint64)
_NUMBERS = itertools.count()


@kernel("i8(i4[::1], i4[::1], i4[::1], u1[::1], i8[::1], i8, i8, i4[::1])")
def _unlink_run(parent: Any, children: Any, pins: Any, state: Any, stamps: Any, row: Any, most: Any, out: Any) -> int:
    """As :meth:`Unlinker.run`; the rows go to *out*, and behind them the parent that can leave now, or -1."""
    count = 0
    while True:
        out[count] = row
        count += 1
        above = parent[row]
        if above >= 0:
            children[above] -= 1
            if state[above] != READY or children[above] != 0 or pins[above] != 0:
                above = -1
        if above < 0 or count >= most or stamps[above] > stamps[row]:
            out[count] = above
            return count
        row = above


def _add_one_numpy(rows: Any, counts: Any) -> None:
    counts[as_slice(rows)] += 1


@kernel("void(i4[::1], u4[::1])", fallback=_add_one_numpy)
def add_one(rows: Any, counts: Any) -> None:
    """One more in *counts* for each of *rows*, which are distinct."""
    for i in range(len(rows)):
        counts[rows[i]] += 1


class WaitingLock(_thread.RLock):  # type: ignore[misc]  # final in the stubs only
    """A reentrant lock that tells how long a thread had to wait for it, when it had to.

    It is taken several times in each request, so it is the interpreter's own lock with one method before it.
    """

    def __init__(self, on_wait: Callable[[float], None]) -> None:
        self._on_wait = on_wait

    def __enter__(self, _acquire: Callable[..., bool] = _thread.RLock.acquire) -> bool:  # type: ignore[override]
        if _acquire(self, False):
            return True
        begun = time.perf_counter()
        _acquire(self)
        self._on_wait(time.perf_counter() - begun)
        return True


class Unlinker:
    """Takes leaves out of a tree for a policy: one by one, or a run of one chain in one step."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.columns = TreeColumns(tree.parent, tree.children, tree.pins, tree.state)
        """For a policy's own compiled loop."""
        self._out: Rows = np.empty(64, np.int32)

    def __call__(self, row: int) -> int:
        """Take *row* out; returns its parent if that can leave now, else -1."""
        return self._tree._unlink(row)

    def run(self, row: int, stamps: npt.NDArray[np.int64], most: int) -> tuple[list[int], int]:
        """Take out *row* and then what it hangs from, up to *most* rows, while each can leave and is stamped no later.

        Returns these rows, and the parent of the last if it can leave now, else -1.
        """
        if most >= len(self._out):
            self._out = np.empty(2 * most, np.int32)
        tree, out = self._tree, self._out
        count = _unlink_run(tree.parent, tree.children, tree.pins, tree.state, stamps, row, most, out)
        *rows, above = out[: count + 1].tolist()
        return rows, above


class Tree:
    """Columns of *rows* rows, and the steps that keep their invariants; methods expect the lock to be held.

    One lock, held for microseconds and never across a copy or I/O.

    Parameters
    ----------
    rows:
        Number of rows.
    block_tokens:
        Width of the record's token column; 0 where the store keeps the tokens itself and verifies them on reading.
    policy:
        An unbound policy that becomes this tree's own.
    clock:
        Seconds; injected so that tests and simulations own the time.
    deferred:
        Whether rows that are let go wait for :meth:`recycle`.
    """

    def __init__(
        self,
        rows: int,
        block_tokens: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        deferred: bool = False,
    ) -> None:
        self.capacity = rows
        self.deferred = deferred
        self.accepts = 0
        """The fidelity that a resident block may have without giving way to a more exact one."""
        self._limbo: list[Rows] = []
        self._waiting = Waiting()
        self.number = next(_NUMBERS)
        self.policy = policy
        self._clock = clock
        self._lock = threading.RLock()
        self.keys = np.zeros((rows, 2), np.uint64)
        self.tokens = np.zeros((rows, block_tokens), np.uint32)
        self.extras = np.zeros((rows, 2), np.uint64)
        self.extras_words = self.extras.view(np.int64)
        self.parent = np.full(rows, -1, np.int32)
        self.depth = np.zeros(rows, np.int32)
        self.children = np.zeros(rows, np.int32)
        self.pins = np.zeros(rows, np.int32)
        self.state = np.zeros(rows, np.uint8)
        self.busy = np.zeros(rows, np.bool_)
        self.fidelity = np.zeros(rows, np.uint8)
        self.layout = np.zeros(rows, np.uint8)
        self.codings = np.zeros(rows, np.uint8)
        """How many lossy codings the payload of a row has been through."""
        self.generation = np.zeros(rows, np.uint32)
        self.hits = np.zeros(rows, np.uint32)
        self.checksum = np.zeros(rows, np.uint64)
        self.wipe = np.zeros(rows, np.bool_)
        self._parent_at, self._children_at = memoryview(self.parent), memoryview(self.children)
        self._pins_at, self._state_at = memoryview(self.pins), memoryview(self.state)
        self._unlinker = Unlinker(self)
        self._table = KeyTable(self.keys)
        self._free: Rows = np.arange(rows - 1, -1, -1, dtype=np.int32)
        self._num_free = rows
        self._live = 0
        self._unused = 0
        column = self.keys.view()
        column.flags.writeable = False
        policy.bind(rows, column)

    @property
    def used(self) -> int:
        """Rows that hold a block or are about to."""
        return self._live

    @property
    def ready(self) -> int:
        """Rows whose block can be found."""
        return int(np.count_nonzero(self.state == READY))

    @staticmethod
    def bytes_per_row(block_tokens: int) -> int:
        """Bytes of index, policy and record that a row costs at most, tokens included."""
        return 160 + 4 * block_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the index's own arrays, tokens included, without the policy."""
        columns = (self.keys, self.extras, self.parent, self.depth, self.children, self.pins, self.state, self.busy)
        more = (self.fidelity, self.layout, self.generation, self.hits, self.checksum, self.tokens, self._free)
        return sum(c.nbytes for c in columns + more) + self._table.nbytes

    def _pin(self, row: int) -> None:
        self._pins_at[row] += 1
        if self._pins_at[row] == 1:
            self.policy.on_evictable(row, False)

    def _can_leave(self, row: int) -> bool:
        return self._state_at[row] == READY and self._children_at[row] == 0 and self._pins_at[row] == 0

    def _offer(self, row: int) -> None:
        if self._can_leave(row):
            self.policy.on_evictable(row, True)

    def _unlink(self, row: int) -> int:
        """Take a leaf out of the tree; the caller frees it.  Returns its parent if that can leave now, else -1."""
        parent = self._parent_at[row]
        if parent < 0:
            return -1
        self._children_at[parent] -= 1
        return parent if self._can_leave(parent) else -1

    def _evict(self, count: int) -> Keys:
        if count <= 0:
            return NO_KEYS
        return self._let_go(self.policy.victims(count, self._unlinker))

    def _offer_parent(self, row: int) -> None:
        parent = self._unlink(row)
        if parent >= 0:
            self.policy.on_evictable(parent, True)

    def _let_go(self, unlinked: list[int]) -> Keys:
        """Free rows that were taken out of the tree; returns their keys."""
        rows = np.array(unlinked, np.int32)
        self._unused += int(np.count_nonzero(pick(self.hits, rows) == 0))
        self._table.remove(rows)
        self._release(rows)
        return pick_keys(self.keys, rows)

    def _release(self, rows: Rows) -> None:
        """Let go of rows that nobody can see or holds any more."""
        self.state.put(rows, FREE)
        add_one(rows, self.generation)
        self._live -= len(rows)
        if self.deferred and len(rows):
            self._limbo.append(rows)
        else:
            self._return(rows)

    def _return(self, rows: Rows) -> None:
        self._free[self._num_free : self._num_free + len(rows)] = rows[::-1]
        self._num_free += len(rows)

    def take_unused(self) -> int:
        """How many of the blocks that have left by policy since the last call had never been found."""
        with self._lock:
            unused, self._unused = self._unused, 0
            return unused

    def time_lock(self, on_wait: Callable[[float], None]) -> None:
        """Call *on_wait* with the seconds that a thread had to wait for the lock; before anybody uses it."""
        self._lock = WaitingLock(on_wait)

    @property
    def in_limbo(self) -> bool:
        """Whether rows wait for :meth:`take_limbo`."""
        return bool(self._limbo)

    def take_limbo(self) -> Rows:
        """Rows that were let go and whose places the store still has to free; :meth:`recycle` must follow."""
        with self._lock:
            taken, self._limbo = self._limbo, []
            return np.concatenate(taken) if taken else np.empty(0, np.int32)

    def recycle(self, rows: Rows) -> None:
        """Make the numbers of *rows*, which came from :meth:`take_limbo`, usable again."""
        with self._lock:
            self._return(rows)

    def _doom(self, rows: Rows) -> int:
        """Hide *rows* and their descendants, and free those that nobody holds; returns how many could be found."""
        below = self._below(rows)
        return self._hide(below[(self.state[below] == PENDING) | (self.state[below] == READY)])

    def _hide(self, doomed: Rows) -> int:
        """Hide visible rows whose descendants are among them, and free those that nobody holds."""
        if not len(doomed):
            return 0
        lost = int(np.count_nonzero(self.state[doomed] == READY))
        self._table.remove(doomed)
        self.state[doomed] = DOOMED
        self.generation[doomed] += 1
        for row in doomed.tolist():
            self.policy.forget(row)
        self._collect(doomed[np.argsort(-self.depth[doomed], kind="stable")].tolist())
        return lost

    def _below(self, rows: Rows) -> Rows:
        """*rows* and everything that descends from them, by pointer doubling."""
        rows = np.unique(rows[self.state[rows] != FREE])
        if not self.children[rows].any():
            return rows
        live = self.state != FREE
        marked = np.zeros(self.capacity, np.bool_)
        marked[rows] = True
        up = np.where(live & (self.parent >= 0), self.parent, np.arange(self.capacity))
        for _ in range(int(self.depth.max()).bit_length() + 1):
            marked |= marked[up]
            up = up[up]
        return np.flatnonzero(marked & live).astype(np.int32)

    def _collect(self, rows: Iterable[int]) -> None:
        """Free doomed *rows* that nobody holds, and then the ancestors that waited for them."""
        freed = []
        for row in rows:
            while row >= 0 and self._state_at[row] == DOOMED:
                if self._children_at[row] or self._pins_at[row] or self.busy[row]:
                    break
                parent = self._parent_at[row]
                self._state_at[row] = FREE
                freed.append(row)
                if parent >= 0:
                    self._children_at[parent] -= 1
                    self._offer(parent)
                row = parent
        self._release(np.array(freed, np.int32))

    def check(self) -> list[str]:
        """Violated invariants, as sentences; empty when all is well."""
        with self._lock:
            return list(self._violations())

    def _violations(self) -> Iterable[str]:
        live = np.flatnonzero(self.state != FREE).astype(np.int32)
        if len(live) != self.used:
            yield f"{len(live)} rows are not free, but {self.used} are counted as used"
        parents = self.parent[live]
        counted = np.bincount(parents[parents >= 0], minlength=self.capacity)
        if (counted[live] != self.children[live]).any():
            yield "a row's count of children is not the number of rows that name it as parent"
        if len(parents) and (self.state[parents[parents >= 0]] == FREE).any():
            yield "a row's parent was freed before it"
        visible = live[(self.state[live] == PENDING) | (self.state[live] == READY)]
        if (self._table.find(self.keys[visible]) != visible).any():
            yield "a visible row is not found under its key"
        if (self.pins < 0).any() or (self.pins[self.state == FREE] != 0).any():
            yield "a free row is pinned, or a count of pins is negative"


def as_slice(rows: Rows) -> Rows | slice:
    """The slice that selects the same rows when they follow each other: a copy without gathering."""
    n = len(rows)
    if n > 1 and int(rows[-1]) - int(rows[0]) == n - 1 and bool((rows[1:] - rows[:-1] == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
