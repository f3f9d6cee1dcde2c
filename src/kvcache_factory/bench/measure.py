"""How this project measures: thread CPU time, cold random places, candidates in turn, medians of same-round ratios.

Rates of one candidate drift with what the neighbours do to caches and memory; the ratio of two candidates that ran in
the same round hardly does.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Candidate = Callable[[int], object]
"""Does the work of round number i."""

Work = Callable[[], object]
Preparation = Callable[[], Work]
"""Prepares one round, untimed, and returns the work to time."""


class Progress(Protocol):
    """Told how far a long measurement is."""

    def __call__(self, done: float, total: float, text: str = "") -> None: ...


def quiet(done: float, total: float, text: str = "") -> None:
    """The progress of those who did not ask."""


def thread_seconds(run: Callable[..., object], *args: object) -> float:
    """CPU seconds of this thread that one call takes; what other processes take from the cores does not count."""
    start = time.thread_time_ns()
    run(*args)
    return max(time.thread_time_ns() - start, 1) * 1e-9


def round_robin(candidates: Mapping[str, Preparation], rounds: int) -> dict[str, list[float]]:
    """Thread seconds of each candidate in each of *rounds* rounds, after one round that does not count.

    Each round starts with another candidate, so that none always inherits the caches of the same predecessor.
    """
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            seconds = thread_seconds(candidates[name]())
            if number:
                times[name].append(seconds)
    return times


def median_ratio(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """How many times faster the candidate is: the median over rounds of reference time by candidate time."""
    return statistics.median(r / c for r, c in zip(reference, candidate, strict=True))


def memcpy_blocks(dst: Sequence[int], src: Sequence[int], nbytes: int) -> None:
    """The yardstick: libc's memcpy of whole blocks between addresses."""
    for d, s in zip(dst, src, strict=True):
        ctypes.memmove(d, s, nbytes)
