"""Bringing what slower tiers hold of one chain to memory, ahead of its use, by several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..block.plan import Match, Segment
from .fetch import Fetch
from .flow import Flow
from .io import Joint, Lane, Ticket


class Prefetch:
    """One prefetch: its threads take one read after the other, in the order of the chain.

    No thread waits for another, so that prefetches can use every thread of the pool without starving each other.

    Parameters
    ----------
    segments:
        The parts of *match* that lie below the first tier, or are encoded in it; its lease is held until *on_end* is
        called, once.
    """

    def __init__(self, flow: Flow, match: Match, segments: Sequence[Segment], on_end: Callable[[], None]) -> None:
        self._flow = flow
        self._match = match
        self._segments = list(segments)
        self._on_end = on_end
        self._lock = threading.Lock()
        self._started = 0
        self._working = 0

    def start(self, threads: int) -> Ticket | None:
        """Begin with up to *threads* threads; None when there is nothing to do or no room for the work."""
        tickets = []
        with self._lock:
            for _ in range(threads):
                ticket = self._flow.io.submit(Lane.LOAD, self._work)
                if ticket is None:
                    break
                tickets.append(ticket)
            self._working = len(tickets)
        if not tickets:
            self._on_end()
            return None
        return Joint(tickets)

    def _work(self) -> None:
        try:
            while (fetch := self._next()) is not None:
                fetch.run()
                fetch.landing.release()
                if fetch.good < len(fetch.rows):
                    self._stop()
        finally:
            with self._lock:
                self._working -= 1
                last = not self._working
            if last:
                self._on_end()

    def _next(self) -> Fetch | None:
        # Slots are reserved under the lock: a block's slot can be had only when its parent's is.
        with self._lock:
            while self._segments:
                segment = self._segments[0]
                if segment.tier and self._flow.tiers[segment.tier].store.memory is not None:
                    self._flow.promote(segment.tier, int(segment.rows[-1]))
                    del self._segments[0]
                    continue
                if self._started == len(segment.rows):
                    del self._segments[0]
                    self._started = 0
                    continue
                return self._begin(segment)
            return None

    def _begin(self, segment: Segment) -> Fetch | None:
        match, at = self._match, self._started
        assert match.chain is not None
        fetcher = self._flow.fetcher(segment.tier)
        fetch = fetcher.prepare(match.chain, match.root, segment.first + at, segment.rows[at:])
        if fetch is None:
            self._segments.clear()
            return None
        self._started += len(fetch.rows)
        return fetch

    def _stop(self) -> None:
        with self._lock:
            self._segments.clear()
