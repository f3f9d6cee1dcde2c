"""One ledger of events, from which every figure is derived.

An entry is (tier, event, reason) → (times, blocks, bytes).  The vocabulary is closed, so that a reader of the ledger, a
metric or a test can rely on these identities:

    asked.blocks = hit.blocks + miss.blocks                                         per tier, and for the manager
    stored.blocks + found.blocks = held blocks + evicted.blocks + dropped.blocks    per tier
    reusable.blocks = served.blocks + recomputed.blocks                             for the manager

Counting appends to a list, which takes no lock: no thread waits for another.  A list that has become long is summed up,
and so are all of them when somebody reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .inside import INSIDE

MANAGER = "manager"
"""The name under which events are counted that belong to no tier."""

BOUNDS_S = (
    *(base * 10**power for power in range(-5, 1) for base in (1, 2.5, 5)),
    10.0,
    30.0,
)
"""Upper bounds in seconds of the buckets of a histogram, from 10 µs to 30 s; what takes longer is in one more."""
_BOUNDS = np.array(BOUNDS_S)

MOST_FRESH = 256
"""Notes of one thing that are kept before they are summed up: so few that they stay in the first cache."""
_HALF = 48

_N = TypeVar("_N")


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


EMPTY = Histogram(0, 0.0, (0,) * (len(BOUNDS_S) + 1))


class _Notes(Generic[_N]):
    """What was noted of one thing since it was last summed up.

    Any thread appends, which is one step that no other can divide.  Only the ledger takes from the front, under its
    lock, so that what is appended meanwhile stays for the next time.
    """

    __slots__ = ("_full", "fresh")

    def __init__(self, full: Callable[[_Notes[Any]], None]) -> None:
        self.fresh: list[_N] = []
        self._full = full

    def sum_up(self) -> None:
        """Add what is fresh to the sums."""
        some = self.fresh[:]
        if some:
            del self.fresh[: len(some)]  # first: what cannot be added must not stay for ever
            self._add(some)

    def _add(self, some: list[_N]) -> None:
        raise NotImplementedError


class Entry(_Notes[tuple[int, int]]):
    """Blocks and bytes of one event, of one tier and for one reason."""

    __slots__ = ("total",)

    def __init__(self, full: Callable[[_Notes[Any]], None]) -> None:
        super().__init__(full)
        self.total = Total()

    def add(self, blocks: int, nbytes: int) -> None:
        """Count one event."""
        fresh = self.fresh
        fresh.append((blocks, nbytes))
        if len(fresh) > MOST_FRESH:
            self._full(self)

    def _add(self, some: list[tuple[int, int]]) -> None:
        times, blocks, nbytes = self.total
        more_blocks, more_bytes = map(sum, zip(*some, strict=True))
        self.total = Total(times + len(some), blocks + more_blocks, nbytes + more_bytes)


class Pair(_Notes[int]):
    """Blocks of two events that happen together and often, and the bytes of one block.

    A note is one number, the second count in its lower half, so that it takes little memory and one sum adds up both.
    """

    __slots__ = ("_block_bytes", "first", "second")

    def __init__(self, full: Callable[[_Notes[Any]], None], block_bytes: int) -> None:
        super().__init__(full)
        self._block_bytes = block_bytes
        self.first = self.second = Total()

    def add(self, first: int, second: int) -> None:
        """Count so many blocks of both, less than 2^32 of each."""
        fresh = self.fresh
        fresh.append(first << _HALF | second)
        if len(fresh) > MOST_FRESH:
            self._full(self)

    def _add(self, some: list[int]) -> None:
        first, second = divmod(sum(some), 1 << _HALF)
        self.first = _sum(self.first, Total(len(some), first, first * self._block_bytes))
        self.second = _sum(self.second, Total(len(some), second, second * self._block_bytes))


class Durations(_Notes[float]):
    """How long one operation of a tier took."""

    __slots__ = ("histogram",)

    def __init__(self, full: Callable[[_Notes[Any]], None]) -> None:
        super().__init__(full)
        self.histogram = EMPTY

    def add(self, seconds: float) -> None:
        """Note that it took so many *seconds*, once."""
        fresh = self.fresh
        fresh.append(seconds)
        if len(fresh) > MOST_FRESH:
            self._full(self)

    def _add(self, some: list[float]) -> None:
        done = self.histogram
        fallen = np.bincount(np.searchsorted(_BOUNDS, some), minlength=len(done.buckets)).tolist()
        buckets = tuple(before + more for before, more in zip(done.buckets, fallen, strict=True))
        self.histogram = Histogram(done.calls + len(some), done.sum_s + sum(some), buckets)


def _sum(one: Total, other: Total) -> Total:
    return Total(one.times + other.times, one.blocks + other.blocks, one.nbytes + other.nbytes)


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
        self._lock = threading.RLock()  # a destructor may count inside
        self._summing = False
        self._entries: dict[tuple[str, Event, str], Entry] = {}
        self._pairs: dict[tuple[str, Event, Event, int], Pair] = {}
        self._durations: dict[tuple[str, str], Durations] = {}
        self._seconds: dict[tuple[str, str], tuple[int, float, float]] = {}
        self._worst: dict[tuple[str, str], float] = {}

    # -- counting -----------------------------------------------------------------------------------------------------

    def entry(self, tier: str, event: Event, reason: str = "") -> Entry:
        """What counts one kind of event: for those who count it in each request."""
        key = (tier, event, reason)
        found = self._entries.get(key)
        return found if found is not None else self._entries.setdefault(key, Entry(self._sum_up))

    def pair(self, tier: str, first: Event, second: Event, block_bytes: int = 0) -> Pair:
        """What counts two kinds of events that happen together, as :meth:`entry`."""
        key = (tier, first, second, block_bytes)
        found = self._pairs.get(key)
        return found if found is not None else self._pairs.setdefault(key, Pair(self._sum_up, block_bytes))

    def durations(self, tier: str, operation: str) -> Durations:
        """What notes how long an *operation* takes, as :meth:`entry`."""
        key = (tier, operation)
        found = self._durations.get(key)
        return found if found is not None else self._durations.setdefault(key, Durations(self._sum_up))

    def add(self, tier: str, event: Event, blocks: int = 0, nbytes: int = 0, reason: str = "") -> None:
        """Count one event of *blocks* blocks and *nbytes* bytes."""
        self.entry(tier, event, reason).add(blocks, nbytes)

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        """Note that *operation* of *tier* took so many *seconds*."""
        self.durations(tier, operation).add(seconds)

    def timing(self, tier: str, operation: str) -> AbstractContextManager[None]:
        """Measure what is inside, if durations are measured."""
        return Timing(self, tier, operation) if self.timed else UNTIMED

    def decided(self, choice: str) -> None:
        """Count one choice between ``load``, ``recompute`` and ``explore``."""
        self.add(MANAGER, Event.DECIDED, reason=choice)

    def compare(self, kind: str, predicted_s: float, actual_s: float) -> None:
        """Note how long a *kind* of work (``load``, ``recompute``) was predicted to take, and took."""
        with INSIDE, self._lock:
            times, predicted, actual = self._seconds.get((MANAGER, kind), (0, 0.0, 0.0))
            self._seconds[MANAGER, kind] = times + 1, predicted + predicted_s, actual + actual_s

    def note_worst(self, tier: str, name: str, value: float) -> None:
        """Keep the largest *value* of this *name*, such as the relative error of a codec."""
        with INSIDE, self._lock:
            self._worst[tier, name] = max(value, self._worst.get((tier, name), value))

    def _sum_up(self, *notes: _Notes[Any]) -> None:
        with INSIDE, self._lock:  # no destructor may ask for other locks while this thread has this one
            if self._summing:  # a destructor, in the middle of it: what it has noted is in the next sum
                return
            self._summing = True
            try:
                for some in notes:
                    some.sum_up()
            finally:
                self._summing = False

    # -- reading ------------------------------------------------------------------------------------------------------

    def _totals(self) -> dict[tuple[str, Event, str], Total]:
        """Everything that was counted so far."""
        with INSIDE, self._lock:
            entries, pairs = list(self._entries.items()), list(self._pairs.items())
            self._sum_up(*(entry for _, entry in entries), *(pair for _, pair in pairs))
            totals = {key: entry.total for key, entry in entries if entry.total.times}
            for (tier, first, second, _), pair in pairs:
                for event, total in zip((first, second), (pair.first, pair.second), strict=True):
                    if total.blocks:
                        totals[tier, event, ""] = _sum(total, totals.get((tier, event, ""), Total()))
            return totals

    def total(self, event: Event, tier: str | None = None, reason: str | None = None) -> Total:
        """Sum over all entries of *event* that match."""
        picked = [
            total
            for (t, e, r), total in self._totals().items()
            if e == event and tier in (None, t) and reason in (None, r)
        ]
        return Total(*(sum(column) for column in zip(*picked, strict=True))) if picked else Total()

    def rows(self) -> list[dict[str, str | int]]:
        """Every entry as a flat row, sorted."""
        return [
            {"tier": tier, "event": event.value, "reason": reason, "times": n, "blocks": blocks, "bytes": nbytes}
            for (tier, event, reason), (n, blocks, nbytes) in sorted(self._totals().items())
        ]

    def histograms(self) -> dict[tuple[str, str], Histogram]:
        """Durations by tier and operation, sorted."""
        with INSIDE, self._lock:
            durations = sorted(self._durations.items(), key=itemgetter(0))
            self._sum_up(*(spent for _, spent in durations))
            return {key: spent.histogram for key, spent in durations if spent.histogram.calls}

    def seconds(self) -> list[dict[str, str | int | float]]:
        """Time by verb: how many calls took how many seconds in all."""
        return [
            {"verb": verb, "calls": spent.calls, "seconds": spent.sum_s}
            for (tier, verb), spent in self.histograms().items()
            if tier == MANAGER
        ]

    def comparisons(self) -> list[dict[str, str | int | float]]:
        """By kind of work: how often it was predicted, how long it should have taken and took."""
        with INSIDE, self._lock:
            sums = sorted(self._seconds.items())
        return [
            {"kind": kind, "times": times, "predicted_s": predicted, "actual_s": actual}
            for (_, kind), (times, predicted, actual) in sums
        ]

    def worst(self) -> list[dict[str, str | float]]:
        """The largest value of each name that was noted."""
        with INSIDE, self._lock:
            worst = sorted(self._worst.items())
        return [{"tier": tier, "name": name, "value": value} for (tier, name), value in worst]
