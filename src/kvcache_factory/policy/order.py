"""Policies that keep evictable rows in order of one stamp: last use (LRU), arrival (FIFO), age (TTL), uses (LFU).

Only leaves are evictable and a request stamps its whole chain at once, so a chain leaves from its end: the order that
SGLang's radix cache and vLLM's block pool use as well.
"""

from __future__ import annotations

import heapq
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from .base import Action, EvictionPolicy, Keys, RequestHint, Rows, Target, Unlink

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_LONG_AGO = 1 << 42
_USES_SHIFT = 42
_MOST_USES = 1 << 20


class QueuedPolicy(EvictionPolicy):
    """Base of the policies with a heap of evictable rows: who is in it, and the stamp of what happens."""

    def bind(self, rows: int, keys: Keys) -> None:
        self._stamp = np.zeros(rows, np.int64)
        self._evictable = np.zeros(rows, np.bool_)
        self._stamp_at = memoryview(self._stamp)
        self._evictable_at = memoryview(self._evictable)
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

    def _tick(self, now: float) -> int:
        """The stamp of everything that happens at *now*: the hits of a request and what it adds share one."""
        if now > self._last_tick:
            self._last_tick = now
            self._sequence += 1
        return self._sequence

    def _push(self, row: int) -> None:
        """Queue *row*, which can leave."""
        raise NotImplementedError


class StampOrderPolicy(QueuedPolicy):
    """Evicts the evictable row with the smallest stamp.

    The queue is a heap of integers (stamp, row) with lazy deletion: an entry is current while its stamp is the row's
    and the row is evictable.  Outdated entries are dropped when they surface, and swept when they outnumber the rest.
    """

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._queued = np.full(rows, -1, np.int64)
        self._queued_at = memoryview(self._queued)
        self._heap: list[int] = []

    def restore(self, rows: Rows) -> None:
        self._stamp[rows] = self._sequence + 1 + np.arange(len(rows))
        self._sequence += len(rows)

    def _restamp(self, rows: Rows, stamp: int) -> None:
        """Give *rows* a stamp that may be smaller than the one they are queued under."""
        self._stamp[rows] = stamp
        for row in rows[self._evictable[rows]].tolist():
            self._push(row)

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
        run = getattr(unlink, "run", None)  # what an index passes can take a run out in one step
        while len(leaving) < count:
            row = self.next_victim()
            if row < 0:
                break
            if run is not None:
                rows, parent = run(row, self._stamp, count - len(leaving))
                leaving += rows
                if parent >= 0:
                    self.on_evictable(parent, True)
                continue
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
    """Evicts the least recently used leaf (leaf-first LRU, as in SGLang's radix cache and vLLM's block pool).

    What a session used that has ended leaves before all else; what one used that returns stays twice as long as it
    would: its stamp is put ahead by the age at which rows leave now.
    """

    name: ClassVar[str] = "lru"

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._age_at_exit = 0

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        tick = self._tick(now)
        if hint.reuse == "unknown":
            self._stamp.put(rows, tick)
        elif hint.reuse == "ended":
            self._restamp(rows, tick - _LONG_AGO)
        else:
            self._stamp.put(rows, tick + self._age_at_exit)

    def next_victim(self) -> int:
        row = super().next_victim()
        if row >= 0:
            self._age_at_exit = max(self._sequence - max(self._stamp_at[row], 0), 0)
        return row


class FIFOEvictionPolicy(StampOrderPolicy):
    """Evicts the leaf that was stored first, whatever was used since."""

    name: ClassVar[str] = "fifo"

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._stamp.put(rows[hit_len:], self._tick(now))


class LFUEvictionPolicy(StampOrderPolicy):
    """Evicts the leaf that was used least often; among equals, the least recently used.

    In-cache LFU without aging, as analysed by Breslau et al., "Web Caching and Zipf-like Distributions", INFOCOM 1999:
    counts begin anew when a block comes back.  Deviations: only leaves leave, and counts end at 2^20.
    """

    name: ClassVar[str] = "lfu"

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        tick = self._tick(now)
        hits = rows[:hit_len]
        self._stamp[hits] = np.minimum((self._stamp[hits] >> _USES_SHIFT) + 1, _MOST_USES) << _USES_SHIFT | tick
        self._stamp[rows[hit_len:]] = 1 << _USES_SHIFT | tick

    def restore(self, rows: Rows) -> None:
        super().restore(rows)
        self._stamp[rows] |= 1 << _USES_SHIFT


class TTLEvictionPolicy(StampOrderPolicy):
    """Evicts the leaf whose time to live ends first, and those whose time has ended although there is room.

    Fixed lifetimes as in memcached; under pressure this is LRU, or FIFO without *refresh*.  What has outlived its time
    leaves with the next block that is stored, and can be hit until then.

    Parameters
    ----------
    ttl_s:
        Seconds that a block lives.
    refresh:
        Whether a use begins a new life.
    """

    name: ClassVar[str] = "ttl"

    def __init__(
        self,
        max_size_gb: float | None = None,
        ttl_s: float = 3600.0,
        refresh: bool = True,
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s < float("inf"):
            raise ConfigError(f"TTLEvictionPolicy(ttl_s={ttl_s!r}): give seconds above 0")
        self.ttl_s = ttl_s
        self.refresh = refresh

    def options(self) -> dict[str, Any]:
        return {**super().options(), "ttl_s": self.ttl_s, "refresh": self.refresh}

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._found: list[Rows] = []

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._restamp(rows if self.refresh else rows[hit_len:], _microseconds(now))

    def restore(self, rows: Rows) -> None:
        super().restore(rows)
        self._found.append(rows)

    def overdue(self, now: float) -> int:
        while self._found:  # nobody knows how old they are: their time begins when it is first asked for
            self._restamp(self._found.pop(), _microseconds(now))
        oldest = _microseconds(now - self.ttl_s)
        heap = self._heap
        while heap and self._queued_at[heap[0] & _ROW_MASK] != heap[0] >> _ROW_BITS:
            heapq.heappop(heap)
        if not heap or heap[0] >> _ROW_BITS > oldest:
            return 0
        return int(np.count_nonzero(self._evictable & (self._stamp <= oldest)))


def _microseconds(seconds: float) -> int:
    """Twice the microseconds: even, so that no stamp is the -1 of a row that is not queued."""
    return 2 * int(seconds * 1e6)
