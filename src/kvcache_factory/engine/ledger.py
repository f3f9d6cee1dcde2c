"""One ledger of events, from which every figure is derived.

An entry is (tier, event, reason) → (times, blocks, bytes).  The vocabulary is closed, so that a reader of the ledger, a
metric or a test can rely on these identities:

    asked.blocks = hit.blocks + miss.blocks                                         per tier, and for the manager
    stored.blocks + found.blocks = held blocks + evicted.blocks + dropped.blocks    per tier
    reusable.blocks = served.blocks + recomputed.blocks                             for the manager

Each thread counts in a shard of its own, so that counting takes no lock and no thread waits for another; a reader adds
the shards up.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

MANAGER = "manager"
"""The name under which events are counted that belong to no tier."""

BOUNDS_S = (
    *(base * 10**power for power in range(-5, 1) for base in (1, 2.5, 5)),
    10.0,
    30.0,
)
"""Upper bounds in seconds of the buckets of a histogram, from 10 µs to 30 s; what takes longer is in one more."""
_BOUNDS = np.array(BOUNDS_S)

MOST_FRESH = 1024
"""Durations of one operation that a thread keeps before it puts them into buckets."""


class Event(StrEnum):
    """What can happen to blocks."""

    __hash__ = str.__hash__  # each count hashes one or two of them, and that of an enumeration is written in Python

    ASKED = "asked"
    HIT = "hit"
    MISS = "miss"
    REUSABLE = "reusable"
    """History of a request that has ended: blocks from its first on that had been seen before."""
    SERVED = "served"
    """Of these, blocks that the engine was given."""
    RECOMPUTED = "recomputed"
    """The others: ``chosen`` where computing was judged faster, ``not_loaded`` where they were found and not used,
    ``gone`` where they were stored no longer."""
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    STORED = "stored"
    FOUND = "found"
    DUPLICATE = "duplicate"
    NOT_STORED = "not_stored"
    EVICTED = "evicted"
    UNUSED = "unused"
    """Of those evicted, blocks that no request had found in this tier."""
    DROPPED = "dropped"
    DEMOTED = "demoted"
    PROMOTED = "promoted"
    ENCODED = "encoded"
    """Written by way of a codec, which is the reason; bytes of payload as they are stored."""
    KEPT_RAW = "kept_raw"
    """Blocks that a codec was given and that stay as they are, for the reason that is said."""
    DECIDED = "decided"
    """Loads that were weighed against computing: ``load``, ``recompute``, or ``explore`` against the prediction."""
    LEASE_EXPIRED = "lease_expired"
    STORE_ERROR = "store_error"
    """What went wrong in the store of a tier, by its own word for it; what became of the blocks is counted too."""
    ERROR = "error"


class Total(NamedTuple):
    """Sum of one kind of event."""

    times: int = 0
    blocks: int = 0
    nbytes: int = 0


class Histogram(NamedTuple):
    """Durations of one operation: how many there were, their sum, and how many fell into each bucket."""

    calls: int
    sum_s: float
    buckets: tuple[int, ...]
    """One more than :data:`BOUNDS_S`, not cumulated."""


class Durations:
    """Durations of one operation in one thread: the newest as they are, the others by bucket."""

    __slots__ = ("_sorted", "fresh")

    def __init__(self) -> None:
        self.fresh: list[float] = []
        # One object with the list that belongs to it, replaced as a whole: a reader sees all before or all after.
        self._sorted: tuple[Histogram, list[float]] = (EMPTY, self.fresh)

    def sort_in(self) -> None:
        """Put the newest durations into their buckets; only the thread that adds them may."""
        histogram = self.histogram()
        self.fresh = []
        self._sorted = (histogram, self.fresh)

    def histogram(self) -> Histogram:
        """All durations by bucket."""
        done, fresh = self._sorted
        seconds = list(fresh)
        if not seconds:
            return done
        fallen = np.bincount(np.searchsorted(_BOUNDS, seconds), minlength=len(done.buckets)).tolist()
        buckets = tuple(before + more for before, more in zip(done.buckets, fallen, strict=True))
        return Histogram(done.calls + len(seconds), done.sum_s + sum(seconds), buckets)

    def absorb(self, other: Durations) -> None:
        """Add what *other* holds."""
        mine, more = self.histogram(), other.histogram()
        buckets = tuple(a + b for a, b in zip(mine.buckets, more.buckets, strict=True))
        self.fresh = []
        self._sorted = (Histogram(mine.calls + more.calls, mine.sum_s + more.sum_s, buckets), self.fresh)


EMPTY = Histogram(0, 0.0, (0,) * (len(BOUNDS_S) + 1))


class _Shard:
    """Sums of one thread, or of threads that have ended."""

    __slots__ = ("__weakref__", "durations", "pairs", "seconds", "totals", "worst")

    def __init__(self) -> None:
        self.totals: dict[tuple[str, Event, str], list[int]] = {}
        self.pairs: dict[tuple[str, Event, Event], list[int]] = {}  # times, then blocks and bytes of both
        self.durations: dict[tuple[str, str], Durations] = {}
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.worst: dict[tuple[str, str], float] = {}

    def absorb(self, other: _Shard) -> None:
        """Add what *other* holds."""
        ours: tuple[dict[Any, list[Any]], ...] = (self.totals, self.pairs, self.seconds)
        theirs: tuple[dict[Any, list[Any]], ...] = (other.totals, other.pairs, other.seconds)
        for mine, more in zip(ours, theirs, strict=True):
            for key, amounts in list(more.items()):
                known = mine.get(key)
                mine[key] = list(amounts) if known is None else [a + b for a, b in zip(known, amounts, strict=True)]
        for key, durations in list(other.durations.items()):
            self.durations.setdefault(key, Durations()).absorb(durations)
        for key, value in list(other.worst.items()):
            self.worst[key] = max(value, self.worst.get(key, value))

    def resolve(self) -> None:
        """Make pairs what they stand for."""
        for (tier, first, second), (times, a, a_bytes, b, b_bytes) in self.pairs.items():
            for event, blocks, nbytes in ((first, a, a_bytes), (second, b, b_bytes)):
                if blocks:
                    total = self.totals.setdefault((tier, event, ""), [0, 0, 0])
                    total[:] = [total[0] + times, total[1] + blocks, total[2] + nbytes]
        self.pairs.clear()


class _Mine(threading.local):
    """The shard of the thread that looks."""

    def __init__(self, enrol: Callable[[], _Shard]) -> None:
        self.shard = enrol()


class Timing:
    """Measures what is inside; a class, for a generator costs more than what it would measure here."""

    __slots__ = ("_begun", "_ledger", "_operation", "_tier")

    def __init__(self, ledger: Ledger, tier: str, operation: str) -> None:
        self._ledger = ledger
        self._tier = tier
        self._operation = operation

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._ledger.observe(self._tier, self._operation, time.perf_counter() - self._begun)


UNTIMED: AbstractContextManager[None] = nullcontext()


class Ledger:
    """Thread-safe sums of events; one per manager.

    Parameters
    ----------
    timed:
        Whether durations are measured; counts always are.
    """

    def __init__(self, timed: bool = True) -> None:
        self.timed = timed
        self._lock = threading.RLock()
        self._shards: list[tuple[weakref.ref[threading.Thread], _Shard]] = []
        self._ended = _Shard()
        self._mine = _Mine(self._enrol)

    def _enrol(self) -> _Shard:
        """A shard for this thread; those of threads that have ended become one, so that they cannot pile up."""
        shard, living = _Shard(), []
        with self._lock:
            for owner, theirs in self._shards:
                thread = owner()
                if thread is None or not thread.is_alive():
                    self._ended.absorb(theirs)
                else:
                    living.append((owner, theirs))
            self._shards = [*living, (weakref.ref(threading.current_thread()), shard)]
        return shard

    # -- counting -----------------------------------------------------------------------------------------------------

    def add(self, tier: str, event: Event, blocks: int = 0, nbytes: int = 0, reason: str = "") -> None:
        """Count one event of *blocks* blocks and *nbytes* bytes."""
        totals = self._mine.shard.totals
        key = (tier, event, reason)
        total = totals.get(key)
        if total is None:
            total = totals.setdefault(key, [0, 0, 0])
        total[0] += 1
        total[1] += blocks
        total[2] += nbytes

    def add_both(self, tier: str, first: Event, second: Event, a: int, b: int, block_bytes: int = 0) -> None:
        """Count *a* blocks of the *first* event and *b* of the *second*, which happen together and often."""
        pairs = self._mine.shard.pairs
        key = (tier, first, second)
        pair = pairs.get(key)
        if pair is None:
            pair = pairs.setdefault(key, [0] * 5)
        pair[0] += 1
        pair[1] += a
        pair[3] += b
        if block_bytes:
            pair[2] += a * block_bytes
            pair[4] += b * block_bytes

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        """Note that *operation* of *tier* took so many *seconds*."""
        durations = self._mine.shard.durations
        key = (tier, operation)
        spent = durations.get(key)
        if spent is None:
            spent = durations.setdefault(key, Durations())
        fresh = spent.fresh
        fresh.append(seconds)
        if len(fresh) > MOST_FRESH:
            spent.sort_in()

    def timing(self, tier: str, operation: str) -> AbstractContextManager[None]:
        """Measure what is inside, if durations are measured."""
        return Timing(self, tier, operation) if self.timed else UNTIMED

    def decided(self, choice: str) -> None:
        """Count one choice between ``load``, ``recompute`` and ``explore``."""
        self.add(MANAGER, Event.DECIDED, reason=choice)

    def compare(self, kind: str, predicted_s: float, actual_s: float) -> None:
        """Note how long a *kind* of work (``load``, ``recompute``) was predicted to take, and took."""
        seconds = self._mine.shard.seconds
        sums = seconds.setdefault((MANAGER, kind), [0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += predicted_s
        sums[2] += actual_s

    def note_worst(self, tier: str, name: str, value: float) -> None:
        """Keep the largest *value* of this *name*, such as the relative error of a codec."""
        worst = self._mine.shard.worst
        worst[tier, name] = max(value, worst.get((tier, name), value))

    # -- reading ------------------------------------------------------------------------------------------------------

    def _all(self) -> _Shard:
        """Everything that was counted so far, in one shard of the caller's."""
        together = _Shard()
        with self._lock:
            together.absorb(self._ended)
            for _, shard in self._shards:
                together.absorb(shard)
        together.resolve()
        return together

    def total(self, event: Event, tier: str | None = None, reason: str | None = None) -> Total:
        """Sum over all entries of *event* that match."""
        picked = [
            total
            for (t, e, r), total in self._all().totals.items()
            if e == event and tier in (None, t) and reason in (None, r)
        ]
        return Total(*(sum(column) for column in zip(*picked, strict=True))) if picked else Total()

    def rows(self) -> list[dict[str, str | int]]:
        """Every entry as a flat row, sorted."""
        return [
            {"tier": tier, "event": event.value, "reason": reason, "times": n, "blocks": blocks, "bytes": nbytes}
            for (tier, event, reason), (n, blocks, nbytes) in sorted(self._all().totals.items())
        ]

    def histograms(self) -> dict[tuple[str, str], Histogram]:
        """Durations by tier and operation, sorted."""
        return {key: spent.histogram() for key, spent in sorted(self._all().durations.items())}

    def seconds(self) -> list[dict[str, str | int | float]]:
        """Time by verb: how many calls took how many seconds in all."""
        return [
            {"verb": verb, "calls": spent.calls, "seconds": spent.sum_s}
            for (tier, verb), spent in self.histograms().items()
            if tier == MANAGER
        ]

    def comparisons(self) -> list[dict[str, str | int | float]]:
        """By kind of work: how often it was predicted, how long it should have taken and took."""
        return [
            {"kind": kind, "times": int(times), "predicted_s": predicted, "actual_s": actual}
            for (_, kind), (times, predicted, actual) in sorted(self._all().seconds.items())
        ]

    def worst(self) -> list[dict[str, str | float]]:
        """The largest value of each name that was noted."""
        return [{"tier": t, "name": name, "value": value} for (t, name), value in sorted(self._all().worst.items())]
