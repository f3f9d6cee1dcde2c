"""Rows in queues: what S3-FIFO, SIEVE, ARC and MQ are made of.

A queue is an order of stamps, kept in a heap of rows.  A row that cannot leave is not in its heap, but keeps its stamp,
and with it its place: parked rows cost nothing to pass over.  A chain's rows are stamped from its head on, so that its
end is the youngest, and what is before it the next to go once it is a leaf.

Here are the loops, with what they share; the policies are in s3fifo.py and arc.py.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from ..jit import helper, kernel
from .base import NO_TREE, EvictionPolicy, Keys, Rows, TreeColumns, Unlink, columns_of

# State: 0 to 7: rows in each heap; 8 to 15: rows in each queue, parked ones included; then what these say.
SIZE, SEQUENCE, FIRST, SECOND = 8, 16, 17, 18
STATE = 19


_TREE = "Tuple((i4[::1], i4[::1], i4[::1], u1[::1]))"
"""Columns of the tree: parent, children, pins, state; empty ones where there is none."""
_BOOKS = "Tuple((i8[::1], i4[::1], i4[::1], i4[:,::1], i8[::1]))"
"""By row: stamp, queue, position in its heap or -1; then the heaps, and the state."""


@helper
def _sift(books: Any, q: Any, at: Any, size: Any) -> None:
    """Let the row at *at* rise or sink to where it belongs."""
    stamp, _, position, heap, _ = books
    row = heap[q, at]
    while at > 0 and stamp[heap[q, (at - 1) >> 1]] > stamp[row]:
        heap[q, at] = heap[q, (at - 1) >> 1]
        position[heap[q, at]] = at
        at = (at - 1) >> 1
    while True:
        child = 2 * at + 1
        if child + 1 < size and stamp[heap[q, child + 1]] < stamp[heap[q, child]]:
            child += 1
        if child >= size or stamp[heap[q, child]] >= stamp[row]:
            break
        heap[q, at] = heap[q, child]
        position[heap[q, at]] = at
        at = child
    heap[q, at] = row
    position[row] = at


@helper
def _push(books: Any, row: Any) -> None:
    """Put *row* into the heap of its queue; one that is in no queue begins in the first."""
    stamp, queue, position, heap, state = books
    if queue[row] < 0:
        queue[row] = 0
        state[8] += 1
        state[16] += 1
        stamp[row] = state[16]
    q = queue[row]
    size = state[q]
    heap[q, size] = row
    position[row] = size
    state[q] = size + 1
    _sift(books, q, size, size + 1)


@helper
def _pull(books: Any, row: Any) -> None:
    """Take *row* out of its heap."""
    _, queue, position, heap, state = books
    q, at = queue[row], position[row]
    size = state[q] - 1
    state[q] = size
    position[row] = -1
    if at < size:
        heap[q, at] = heap[q, size]
        _sift(books, q, at, size)


@helper
def _move(books: Any, row: Any, q: Any) -> None:
    """Put *row* at the end of queue *q*, and into its heap if it was in one."""
    stamp, queue, position, _, state = books
    queued = position[row] >= 0
    if queued:
        _pull(books, row)
    if queue[row] >= 0:
        state[8 + queue[row]] -= 1
    queue[row] = q
    state[8 + q] += 1
    state[16] += 1
    stamp[row] = state[16]
    if queued:
        _push(books, row)


@helper
def _leave(tree: Any, books: Any, row: Any) -> Any:
    """Take *row* out of its heap, its queue and the tree; returns its parent if that can leave now, else -1."""
    parent, children, pins, states = tree
    _, queue, _, _, state = books
    _pull(books, row)
    state[8 + queue[row]] -= 1
    queue[row] = -1
    if len(parent) == 0 or parent[row] < 0:
        return -1
    above = parent[row]
    children[above] -= 1
    return above if states[above] == 2 and children[above] == 0 and pins[above] == 0 else -1


@kernel(f"void({_BOOKS}, i8, b1)")
def set_evictable(books: Any, row: Any, evictable: Any) -> None:
    """*row* enters or leaves the heap of its queue, if that is news."""
    there = books[2][row] >= 0
    if evictable and not there:
        _push(books, row)
    elif there and not evictable:
        _pull(books, row)


@kernel(f"void({_BOOKS}, i4[::1], i4[::1])")
def place(books: Any, rows: Any, queues: Any) -> None:
    """Put *rows*, in this order, at the end of one queue each."""
    for i in range(len(rows)):
        _move(books, rows[i], queues[i])


@kernel(f"i8(i8, {_TREE}, {_BOOKS}, u1[::1], i8, i8, i4[::1], i4[::1])")
def leave_s3fifo(
    count: Any, tree: Any, books: Any, uses: Any, threshold: Any, main_rows: Any, out: Any, out_of: Any
) -> int:
    """Victims of S3-FIFO, and the queue that each leaves."""
    _, _, _, heap, state = books
    found = 0
    while found < count:
        q = 1 if state[9] > main_rows else 0
        if state[q] == 0:
            q = 1 - q
        if state[q] == 0:
            return found
        row = heap[q, 0]
        used = uses[row]
        if (q == 0 and used >= threshold) or (q == 1 and used > 0):
            uses[row] = 0 if q == 0 else used - 1
            _move(books, row, 1)
            continue
        out[found], out_of[found] = row, q
        found += 1
        above = _leave(tree, books, row)
        if above >= 0:
            _push(books, above)
    return found


@helper
def _see(books: Any, row: Any) -> None:
    """Put the place of *row* into the hand's round if the hand has yet to come there, else into the next."""
    stamp, _, _, _, state = books
    at = stamp[row] & 0xFFFFFFFF
    turn = state[17] + 1 if at < state[18] else state[17]
    stamp[row] = (turn << 32) | at


@kernel(f"void({_BOOKS}, i8, b1)")
def set_evictable_sieve(books: Any, row: Any, evictable: Any) -> None:
    """As :func:`set_evictable`; the hand may have passed by while the row was parked."""
    there = books[2][row] >= 0
    if evictable and not there:
        _see(books, row)
        _push(books, row)
    elif there and not evictable:
        _pull(books, row)


@kernel(f"i8(i8, {_TREE}, {_BOOKS}, b1[::1], i4[::1])")
def leave_sieve(count: Any, tree: Any, books: Any, visited: Any, out: Any) -> int:
    """Victims of SIEVE; the state's last two are the round and the place of the hand."""
    stamp, queue, _, heap, state = books
    found = 0
    while found < count:
        if state[0] == 0:
            return found
        row = heap[0, 0]
        state[17], state[18] = stamp[row] >> 32, stamp[row] & 0xFFFFFFFF
        if visited[row]:
            visited[row] = False
            stamp[row] += 1 << 32
            _sift(books, 0, 0, state[0])
            continue
        out[found] = row
        found += 1
        above = _leave(tree, books, row)
        if above >= 0:
            if queue[above] >= 0:
                _see(books, above)
            _push(books, above)
    return found


@kernel(f"i8(i8, {_TREE}, {_BOOKS}, f8[:,::1], f8[:,::1], f8[::1], i4[::1], i4[::1])")
def leave_arc(
    count: Any, tree: Any, books: Any, from_once: Any, from_more: Any, target: Any, out: Any, out_of: Any
) -> int:
    """Victims of ARC, one for each newcomer where there are any; the state's last two count the ghosts of each."""
    stamp, _, _, heap, state = books
    found = 0
    while found < count:
        returns = False
        if found < len(from_once):
            if from_once[found, 0] >= 0:
                target[0] = min(target[0] + max(state[18] / state[17], 1.0), float(len(stamp)))
            elif from_more[found, 0] >= 0:
                target[0] = max(target[0] - max(state[17] / state[18], 1.0), 0.0)
                returns = True
        once = state[8]
        q = 0 if once > 0 and (once > target[0] or (returns and once == target[0])) else 1
        if state[q] == 0:
            q = 1 - q
        if state[q] == 0:
            return found
        row = heap[q, 0]
        state[17 + q] += 1
        out[found], out_of[found] = row, q
        found += 1
        above = _leave(tree, books, row)
        if above >= 0:
            _push(books, above)
    return found


@kernel(f"void({_BOOKS}, i8[::1], i8[::1], i4[::1], i8, f8[:,::1], i8, i8)")
def use_mq(books: Any, uses: Any, expires: Any, rows: Any, hits: Any, past: Any, accesses: Any, lifetime: Any) -> None:
    """MQ: put *rows* into the queues of their uses, and let what was not used for a lifetime go down by one queue.

    The first *hits* have been there; *past* has the uses of the others from before they left, if they are known.
    """
    _, _, _, heap, state = books
    for i in range(len(rows)):
        row = rows[i]
        before = uses[row] if i < hits else int(max(past[i - hits, 0], 0.0))
        uses[row] = before + 1
        q = 0
        while q < len(heap) - 1 and (before + 1) >> (q + 1) > 0:
            q += 1
        expires[row] = accesses + lifetime
        _move(books, row, q)
    for q in range(1, len(heap)):
        while state[q] > 0 and expires[heap[q, 0]] < accesses:
            row = heap[q, 0]
            expires[row] = accesses + lifetime
            _move(books, row, q - 1)


@kernel(f"i8(i8, {_TREE}, {_BOOKS}, i4[::1])")
def leave_lowest(count: Any, tree: Any, books: Any, out: Any) -> int:
    """Victims from the lowest queue that has any (MQ)."""
    _, _, _, heap, state = books
    found = 0
    while found < count:
        q = 0
        while q < len(heap) and state[q] == 0:
            q += 1
        if q == len(heap):
            return found
        row = heap[q, 0]
        out[found] = row
        found += 1
        above = _leave(tree, books, row)
        if above >= 0:
            _push(books, above)
    return found


class QueuePolicy(EvictionPolicy):
    """Queues of rows, each row being in one of them; what left is remembered for a while.

    A subclass places new and used rows, and lets a loop choose victims.
    """

    num_queues: ClassVar[int] = 2

    def bind(self, rows: int, keys: Keys) -> None:
        self._keys = keys
        self._rows = rows
        self._stamp = np.zeros(rows, np.int64)
        self._queue = np.full(rows, -1, np.int32)
        self._position = np.full(rows, -1, np.int32)
        self._state = np.zeros(STATE, np.int64)
        heap = np.zeros((self.num_queues, rows), np.int32)
        self._books = (self._stamp, self._queue, self._position, heap, self._state)
        self._out = np.zeros(rows, np.int32)

    def on_evictable(self, row: int, evictable: bool) -> None:
        set_evictable(self._books, row, evictable)

    def forget(self, row: int) -> None:
        self.on_evictable(row, False)
        if self._queue[row] >= 0:
            self._state[SIZE + self._queue[row]] -= 1
            self._queue[row] = -1

    def next_victim(self) -> int:
        found = self._leave(1, NO_TREE)
        if found:
            self._remember(self._out[:1])
        return int(self._out[0]) if found else -1

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        columns = columns_of(unlink)
        if columns is None:
            return super().victims(count, unlink)
        found = self._leave(count, columns)
        if found:
            self._remember(self._out[:found])
        victims: list[int] = self._out[:found].tolist()
        return victims

    @abstractmethod
    def _leave(self, count: int, tree: TreeColumns) -> int:
        """Choose up to *count* victims, take them out of *tree*, and write them to the start of `_out`."""

    def _remember(self, rows: Rows) -> None:
        """Those of *rows* that have just left are ghosts from now on."""

    def _place(self, rows: Rows, queue: int) -> None:
        """Put *rows*, in this order, at the end of *queue*."""
        if len(rows):
            place(self._books, rows, np.full(len(rows), queue, np.int32))
