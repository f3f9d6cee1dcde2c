"""One ledger of events, from which every figure is derived.

An entry is (tier, event, reason) → (times, blocks, bytes).  The vocabulary is closed, so that a reader of the ledger, a
metric or a test can rely on these identities:

    asked.blocks = hit.blocks + miss.blocks                                         per tier, and for the manager
    stored.blocks + found.blocks = held blocks + evicted.blocks + dropped.blocks    per tier
"""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import NamedTuple

MANAGER = "manager"
"""The name under which events are counted that belong to no tier."""


class Event(StrEnum):
    """What can happen to blocks."""

    ASKED = "asked"
    HIT = "hit"
    MISS = "miss"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    STORED = "stored"
    FOUND = "found"
    DUPLICATE = "duplicate"
    NOT_STORED = "not_stored"
    REPLACED = "replaced"
    EVICTED = "evicted"
    DROPPED = "dropped"
    DEMOTED = "demoted"
    PROMOTED = "promoted"
    ENCODED = "encoded"
    KEPT_RAW = "kept_raw"
    LEASE_EXPIRED = "lease_expired"
    ERROR = "error"


class Total(NamedTuple):
    """Sum of one kind of event."""

    times: int = 0
    blocks: int = 0
    nbytes: int = 0


class Ledger:
    """Thread-safe sums of events; one per manager."""

    def __init__(self) -> None:
        # Reentrant: a destructor that the collector runs inside may end a session, which counts.
        self._lock = threading.RLock()
        self._totals: dict[tuple[str, Event, str], list[int]] = {}
        self._seconds: dict[str, list[float]] = {}

    def add(self, tier: str, event: Event, blocks: int = 0, nbytes: int = 0, reason: str = "") -> None:
        """Count one event of *blocks* blocks and *nbytes* bytes."""
        with self._lock:
            total = self._totals.setdefault((tier, event, reason), [0, 0, 0])
            total[0] += 1
            total[1] += blocks
            total[2] += nbytes

    def total(self, event: Event, tier: str | None = None, reason: str | None = None) -> Total:
        """Sum over all entries of *event* that match."""
        with self._lock:
            picked = [
                total
                for (t, e, r), total in self._totals.items()
                if e == event and tier in (None, t) and reason in (None, r)
            ]
        return Total(*(sum(column) for column in zip(*picked, strict=True))) if picked else Total()

    def rows(self) -> list[dict[str, str | int]]:
        """Every entry as a flat row, sorted."""
        with self._lock:
            entries = sorted(self._totals.items())
        return [
            {"tier": tier, "event": event.value, "reason": reason, "times": n, "blocks": blocks, "bytes": nbytes}
            for (tier, event, reason), (n, blocks, nbytes) in entries
        ]

    def time(self, verb: str, seconds: float) -> None:
        """Add to the time that *verb* took."""
        with self._lock:
            spent = self._seconds.setdefault(verb, [0, 0.0])
            spent[0] += 1
            spent[1] += seconds

    def seconds(self) -> list[dict[str, str | int | float]]:
        """Time by verb: how many calls took how many seconds in all."""
        with self._lock:
            entries = sorted(self._seconds.items())
        return [{"verb": verb, "calls": int(calls), "seconds": total} for verb, (calls, total) in entries]
