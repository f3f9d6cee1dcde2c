"""What the page draws over time: a sample every two seconds, for ten minutes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ..observe.log import LimitedLog

EVERY_S = 2.0
KEPT = 300


class Counts(NamedTuple):
    """Counts of one manager that rates are made from."""

    reusable: float = 0
    served: float = 0
    answers: float = 0
    answers_s: float = 0
    hits: float = 0


class History:
    """Samples of every manager: ``time_s``, ``hit_rate``, ``ttft_s`` (null where nothing happened), ``hits_per_s``."""

    def __init__(self, managers: Callable[[], dict[str, Any]], every_s: float = EVERY_S) -> None:
        self._managers = managers
        self._every_s = every_s
        self._samples: dict[str, deque[dict[str, Any]]] = {}
        self._last: dict[str, tuple[float, Counts]] = {}
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to sample, in a daemon thread."""
        threading.Thread(target=self._work, name="kvcache-factory-history", daemon=True).start()

    def stop(self) -> None:
        """End; idempotent."""
        self._ended.set()

    def of(self, label: str) -> list[dict[str, Any]]:
        """Samples of one manager, the oldest first."""
        return list(self._samples.get(label, ()))

    def _work(self) -> None:
        log = LimitedLog()
        while not self._ended.wait(self._every_s):
            try:
                self.sample()
            except Exception as error:  # the page goes on with the next one
                log.warning("history", f"the page has no sample of this moment: {error!r}", exc_info=True)

    def sample(self) -> None:
        """Take one sample of each manager, and forget those that are gone."""
        managers = self._managers()
        for label in set(self._samples) - set(managers):
            self._samples.pop(label, None)
            self._last.pop(label, None)
        for label, manager in managers.items():
            now, counts = time.time(), counts_of(manager.state())
            then, before = self._last.get(label, (now - self._every_s, Counts()))
            self._last[label] = now, counts
            self._samples.setdefault(label, deque(maxlen=KEPT)).append(_sample(now, now - then, before, counts))


def counts_of(state: dict[str, Any]) -> Counts:
    """The counts of a manager, those in engines' processes included."""
    events = {(row["event"], row["tier"]): 0 for row in state["events"]}
    for row in state["events"]:
        events[row["event"], row["tier"]] += row["blocks"]
    first = next((row for row in state["durations"] if row["operation"] == "first_token"), {"count": 0, "sum_s": 0.0})
    own = Counts(
        state["reusable_tokens"],
        state["served_tokens"],
        first["count"],
        first["sum_s"],
        events.get(("hit", "manager"), 0),
    )
    for engine in state.get("engines", ()):
        if engine:
            own = Counts(*(a + b for a, b in zip(own, counts_of(engine), strict=True)))
    return own


def _sample(now: float, seconds: float, before: Counts, after: Counts) -> dict[str, Any]:
    reusable, served, answers, answers_s, hits = (b - a for a, b in zip(before, after, strict=True))
    return {
        "time_s": round(now, 3),
        "hit_rate": served / reusable if reusable > 0 else None,
        "ttft_s": answers_s / answers if answers > 0 else None,
        "hits_per_s": max(hits, 0) / max(seconds, 1e-3),
    }
