"""``bench ledger``: what counting costs an L1 get, with and without the measuring of durations.

The same gets over the same blocks, in turn: with a ledger that does nothing (``off``), with counts, and with counts and
durations (``enable_metrics=True``).  A few microseconds are to be seen beside a copy that varies by more than that, so
what counting adds is measured while the copy itself does nothing, and divided by the time of a whole get.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from ..engine.ledger import Durations, Entry, Pair
from ..memory import choose
from . import measure
from .l1 import MODELS, Bed, without_copying

_WORKING_SET = 512 << 20
_ROUND = 96 << 20
COUNTERS: tuple[type[Entry], type[Pair], type[Durations]] = (Entry, Pair, Durations)
REPEATS = 5
"""Passes over the same gets while copies do nothing."""
MODES = ("off", "counts", "durations")


def run_ledger(progress: measure.Progress | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``mode`` (counts | durations), ``block_bytes``, ``batch``, ``get_us``, ``added_us``, ``cost``.

    ``get_us`` is a whole get without counting, ``added_us`` what the mode adds, ``cost`` the one by the other: 0.01 is
    one percent.  *quick* is a check that it runs.
    """
    report = progress or measure.quiet
    choose()
    batches, rounds, working_set = ((4,), 2, 24 << 20) if quick else ((1, 8), 61, _WORKING_SET)
    models = MODELS[:1] if quick else [spec for spec in MODELS if spec.block_tokens == 64 or spec.num_kv_heads == 3]
    rows: list[dict[str, Any]] = []
    for done, spec in enumerate(models):
        report(done, len(models), f"{spec.payload_bytes >> 10} KiB blocks")
        bed = Bed(spec, max(working_set // spec.payload_bytes, 8), huge_pages=True, enable_metrics=True)
        try:
            for batch in batches:
                rows += _measure(bed, batch, rounds)
        finally:
            bed.close()
    report(len(models), len(models), "done")
    return rows


def _measure(bed: Bed, batch: int, rounds: int) -> Iterator[dict[str, Any]]:
    bed.fill(batch)
    calls = min(max(_ROUND // (batch * bed.spec.payload_bytes), 1), max(len(bed.chains) // 2, 1))
    candidates = {mode: _gets(bed, batch, calls, mode, copying=False) for mode in MODES}
    times = measure.round_robin({**candidates, "whole": _gets(bed, batch, calls, "off", copying=True)}, rounds)
    whole = statistics.median(times["whole"]) / calls
    for mode in MODES[1:]:
        added = statistics.median(more - less for more, less in zip(times[mode], times["off"], strict=True))
        added /= calls * REPEATS
        yield {
            "mode": mode,
            "block_bytes": bed.spec.payload_bytes,
            "block_tokens": bed.spec.block_tokens,
            "batch": batch,
            "get_us": round(whole * 1e6, 2),
            "added_us": round(added * 1e6, 2),
            "cost": round(added / whole, 4),
        }


def _gets(bed: Bed, batch: int, calls: int, mode: str, *, copying: bool) -> measure.Preparation:
    def prepare() -> measure.Work:
        work = bed.gets(batch, calls)

        def run() -> None:
            with counting(bed, mode), nullcontext() if copying else without_copying():
                for _ in range(1 if copying else REPEATS):
                    work()

        return run

    return prepare


@contextmanager
def counting(bed: Bed, mode: str) -> Iterator[None]:
    """Let the ledger of *bed*, whose manager measures durations, do only what *mode* says."""
    ledger, index = bed.manager.ledger, bed.manager.first_index
    lock, before = index._lock, [counter.add for counter in COUNTERS]
    ledger.timed = mode == "durations"
    if mode != "durations":
        index._lock = threading.RLock()
    if mode == "off":
        _let_add([_nothing] * len(COUNTERS))
    try:
        yield
    finally:
        ledger.timed, index._lock = True, lock
        _let_add(before)


def _let_add(what: Sequence[Callable[..., None]]) -> None:
    """Let this be what counters do."""
    for counter, add in zip(COUNTERS, what, strict=True):
        type.__setattr__(counter, "add", add)


def _nothing(*_: object) -> None:
    return None
