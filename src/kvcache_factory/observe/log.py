"""Log records with structured fields, at a limited rate; the last warnings are kept for whoever looks.

Nothing is configured here: records go to the logger ``kvcache_factory`` of the standard library, and what belongs to
them (manager, verb, session, ...) is in their attributes, where every JSON formatter finds it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("kvcache_factory")

EVERY_S = 60.0
"""One line for each subject in this time."""
KEPT = 50
"""Warnings that are kept, all managers together."""
MOST_SUBJECTS = 1024

_recent: deque[tuple[str, float, str]] = deque(maxlen=KEPT)


def recent_warnings(manager: str) -> list[dict[str, Any]]:
    """The last warnings about this manager, the newest last: ``time_s`` (wall clock) and ``text``."""
    return [{"time_s": at, "text": text} for name, at, text in list(_recent) if name == manager]


class LimitedLog:
    """Warnings about one manager: one line a minute for each subject, which says how many were left out.

    Parameters
    ----------
    manager:
        Name of the manager, a field of every record; empty where it is not known.
    logger:
        Where records go.
    """

    def __init__(
        self,
        manager: str = "",
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        logger: logging.Logger = log,
    ) -> None:
        self._manager = manager
        self._every_s = every_s
        self._clock = clock
        self._logger = logger
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()
        self._lock = threading.RLock()  # a destructor may fail inside

    def warning(self, subject: str, text: str, *, exc_info: bool = False, **fields: Any) -> None:
        """Log *text* unless a line about *subject* was logged a moment ago; *fields* become attributes."""
        with self._lock:
            now = self._clock()
            if now - self._last.get(subject, -self._every_s) < self._every_s:
                self._left_out[subject] += 1
                return
            if len(self._last) >= MOST_SUBJECTS:
                self._last.clear()
            self._last[subject] = now
            left_out = self._left_out.pop(subject, 0)
        _recent.append((self._manager, time.time(), text))
        more = f" ({left_out} more like this were not logged)" if left_out else ""
        self._write(logging.WARNING, subject, text + more, {**fields, "left_out": left_out}, exc_info)

    def info(self, subject: str, text: str, **fields: Any) -> None:
        """Log *text*, which is not rare enough to be a warning and not frequent enough to be left out."""
        if self._logger.isEnabledFor(logging.INFO):
            self._write(logging.INFO, subject, text, fields)

    def _write(self, level: int, subject: str, text: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        named = {f"kv_{name}": value for name, value in {"manager": self._manager, "event": subject, **fields}.items()}
        whose = f"manager {self._manager!r}: " if self._manager else ""
        self._logger.log(level, "%s%s", whose, text, exc_info=exc_info, extra=named)
