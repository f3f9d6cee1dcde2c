"""Policies that keep evictable rows in order of one stamp: last use (LRU) or arrival (FIFO).

Only leaves are evictable and a request stamps its whole chain at once, so a chain leaves from its end: the order that
SGLang's radix cache and vLLM's block pool use as well.
"""

from __future__ import annotations

import heapq
from typing import ClassVar

import numpy as np

from .base import EvictionPolicy, Keys, RequestHint, Rows, Unlink

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


class StampOrderPolicy(EvictionPolicy):
    """Evicts the evictable row with the smallest stamp.

    The queue is a heap of integers (stamp, row) with lazy deletion: an entry is current while its stamp is the row's
    and the row is evictable.  Outdated entries are dropped when they surface, and swept when they outnumber the rest.
    """

    def bind(self, rows: int, keys: Keys) -> None:
        self._stamp = np.zeros(rows, np.int64)
        self._evictable = np.zeros(rows, np.bool_)
        self._queued = np.full(rows, -1, np.int64)
        self._stamp_at = memoryview(self._stamp)
        self._evictable_at = memoryview(self._evictable)
        self._queued_at = memoryview(self._queued)
        self._heap: list[int] = []
        self._live = 0
        self._sequence = 0
        self._last_tick = float("-inf")

    def on_evictable(self, row: int, evictable: bool) -> None:
        if self._evictable_at[row] == evictable:
            return
        self._evictable_at[row] = evictable
        self._live += 1 if evictable else -1
        if evictable:
            self._push(row)

    def restore(self, rows: Rows) -> None:
        self._stamp[rows] = self._sequence + 1 + np.arange(len(rows))
        self._sequence += len(rows)

    def _tick(self, now: float) -> int:
        """The stamp of everything that happens at *now*: the hits of a request and what it adds share one."""
        if now > self._last_tick:
            self._last_tick = now
            self._sequence += 1
        return self._sequence

    def next_victim(self) -> int:
        heap, stamps = self._heap, self._stamp_at
        while heap:
            entry = heapq.heappop(heap)
            row, stamp = entry & _ROW_MASK, entry >> _ROW_BITS
            if self._queued_at[row] != stamp:
                continue
            self._queued_at[row] = -1
            if not self._evictable_at[row]:
                continue
            if stamps[row] != stamp:
                self._push(row)
                continue
            self._evictable_at[row] = False
            self._live -= 1
            return row
        return -1

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        leaving: list[int] = []
        stamps = self._stamp_at
        while len(leaving) < count:
            row = self.next_victim()
            if row < 0:
                break
            leaving.append(row)
            parent = unlink(row)
            # What was stamped together with the oldest row is next in any case: no detour through the queue.
            while parent >= 0 and len(leaving) < count and stamps[parent] <= stamps[row]:
                row = parent
                leaving.append(row)
                parent = unlink(row)
            if parent >= 0:
                self.on_evictable(parent, True)
        return leaving

    def _push(self, row: int) -> None:
        stamp = self._stamp_at[row]
        if self._queued_at[row] == stamp:
            return
        self._queued_at[row] = stamp
        heapq.heappush(self._heap, stamp << _ROW_BITS | row)
        if len(self._heap) > 2 * self._live + 64:
            self._sweep()

    def _sweep(self) -> None:
        rows = np.flatnonzero(self._evictable)
        self._queued.fill(-1)
        self._queued[rows] = self._stamp[rows]
        self._heap = [s << _ROW_BITS | r for s, r in zip(self._stamp[rows].tolist(), rows.tolist(), strict=True)]
        heapq.heapify(self._heap)


class LRUEvictionPolicy(StampOrderPolicy):
    """Evicts the least recently used leaf (leaf-first LRU)."""

    name: ClassVar[str] = "lru"

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._stamp[rows] = self._tick(now)


class FIFOEvictionPolicy(StampOrderPolicy):
    """Evicts the leaf that was stored first, whatever was used since."""

    name: ClassVar[str] = "fifo"

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._stamp[rows[hit_len:]] = self._tick(now)
