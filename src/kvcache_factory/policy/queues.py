"""Rows in queues: what S3-FIFO, SIEVE, ARC and MQ are made of.

A queue is an order of stamps.  A row that cannot leave is not in its queue, but keeps its stamp, and with it its place:
parked rows cost nothing to pass over.  A chain's rows are stamped from its head on, so that its end is the youngest and
what is before it the next to go once it is a leaf.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .base import EvictionPolicy, Keys, Rows

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_NOT_QUEUED = -1


class RowQueue:
    """Rows in the order of their stamps, the smallest first; removal is lazy."""

    def __init__(self, rows: int) -> None:
        self._queued = memoryview(np.full(rows, _NOT_QUEUED, np.int64))
        self._heap: list[int] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, row: int, stamp: int) -> None:
        """Put *row*, which is not in the queue, at the place of *stamp*."""
        self._queued[row] = stamp
        self._live += 1
        heapq.heappush(self._heap, stamp << _ROW_BITS | row)
        if len(self._heap) > 2 * self._live + 64:
            # A row that left and came back to its place is there twice.
            self._heap = [e for e in set(self._heap) if self._queued[e & _ROW_MASK] == e >> _ROW_BITS]
            heapq.heapify(self._heap)

    def remove(self, row: int) -> None:
        """Take *row*, which is in the queue, out of it."""
        self._queued[row] = _NOT_QUEUED
        self._live -= 1

    def first(self) -> int:
        """The first row; -1 when the queue is empty."""
        heap = self._heap
        while heap:
            row = heap[0] & _ROW_MASK
            if self._queued[row] == heap[0] >> _ROW_BITS:
                return row
            heapq.heappop(heap)
        return -1

    def pop(self) -> int:
        """Take the first row out; -1 when the queue is empty."""
        row = self.first()
        if row >= 0:
            heapq.heappop(self._heap)
            self.remove(row)
        return row


class QueuePolicy(EvictionPolicy):
    """Several queues of rows, each row being in one of them; what left is remembered for a while.

    A subclass sets `_queue[row]` and `_stamp[row]` of new rows, moves rows between queues with :meth:`_move`, and names
    the queue of the next victim.
    """

    num_queues: ClassVar[int] = 2
    bytes_per_row: ClassVar[int] = 160

    def bind(self, rows: int, keys: Keys) -> None:
        self._keys = keys
        self._rows = rows
        self._stamp = np.zeros(rows, np.int64)
        self._queue = np.full(rows, -1, np.int8)
        self._evictable = np.zeros(rows, np.bool_)
        self._stamp_at, self._queue_at = memoryview(self._stamp), memoryview(self._queue)
        self._evictable_at = memoryview(self._evictable)
        self._queues = [RowQueue(rows) for _ in range(self.num_queues)]
        self._size = [0] * self.num_queues
        """Rows of each queue, those that are parked included."""
        self._sequence = 0

    def on_evictable(self, row: int, evictable: bool) -> None:
        if self._evictable_at[row] == evictable:
            return
        if self._queue_at[row] < 0:  # chosen, but used before it had left
            self._enter(row)
        self._evictable_at[row] = evictable
        if evictable:
            self._queues[self._queue_at[row]].push(row, self._stamp_at[row])
        else:
            self._queues[self._queue_at[row]].remove(row)

    def forget(self, row: int) -> None:
        self.on_evictable(row, False)
        if self._queue_at[row] >= 0:
            self._size[self._queue_at[row]] -= 1
            self._queue_at[row] = -1

    def next_victim(self) -> int:
        row = self._choose()
        if row >= 0:
            self._evictable_at[row] = False
            self._size[self._queue_at[row]] -= 1
            self._queue_at[row] = -1
        return row

    @abstractmethod
    def _choose(self) -> int:
        """Take the next victim out of its queue; -1 when there is none."""

    def _enter(self, row: int) -> None:
        """Put a row that is in no queue into the first."""
        self._place(np.array([row], np.int32), 0)

    def _place(self, rows: Rows, queue: int) -> None:
        """Put *rows*, in this order, at the end of *queue*; those that can leave at once are queued."""
        if not len(rows):
            return
        for row in rows[self._queue[rows] >= 0].tolist():
            self._unqueue(row)
        self._stamp[rows] = self._new_stamps(len(rows))
        self._queue[rows] = queue
        self._size[queue] += len(rows)
        for row in rows[self._evictable[rows]].tolist():
            self._queues[queue].push(row, self._stamp_at[row])

    def _new_stamps(self, count: int) -> npt.NDArray[np.int64]:
        first = self._sequence + 1
        self._sequence += count
        return np.arange(first, first + count)

    def _unqueue(self, row: int) -> None:
        queue = self._queue_at[row]
        self._size[queue] -= 1
        if self._evictable_at[row]:
            self._queues[queue].remove(row)

    def _requeue(self, row: int, queue: int) -> None:
        """Put *row*, which was just popped from its queue, at the end of *queue*."""
        self._size[self._queue_at[row]] -= 1
        self._size[queue] += 1
        self._sequence += 1
        self._queue_at[row], self._stamp_at[row] = queue, self._sequence
        self._queues[queue].push(row, self._sequence)

    def _fallback(self, *order: int) -> int:
        """The first of the queues *order* that has a row that can leave; -1: none."""
        return next((queue for queue in order if len(self._queues[queue])), -1)
