"""What every adapter does the same way: count, stay quiet, and never stop the engine.

In an engine's path our own failures are misses: caught here, counted, logged at a limited rate, and the engine goes on
as if there were no cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..observe.log import LimitedLog

log = logging.getLogger("kvcache_factory.integration")

QUIET_REQUESTS = 32
"""Requests without a single lookup after which an attached adapter says that it serves nothing."""

LOG_INTERVAL_S = 60.0

DECAY = 0.2
"""Weight of the newest measurement."""

MIN_TOKENS = 16
"""Shorter steps say nothing about prefill."""


class Rate:
    """Amounts per second, the newest measurement counting most; a prior of 0: nothing is believed yet."""

    def __init__(self, prior: float) -> None:
        self.value = prior

    def measured(self, amount: float, seconds: float) -> None:
        """Take a measurement; nothing to learn from none."""
        if amount > 0 and seconds > 0:
            self.value += DECAY * (amount / seconds - self.value)

    def seconds(self, amount: float) -> float:
        """How long *amount* takes."""
        return amount / self.value if self.value else float("inf")


class RateLimitedLog(LimitedLog):
    """What adapters log: one line a minute for each subject; the next line says how many were left out."""

    def __init__(self, interval_s: float = LOG_INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(every_s=interval_s, clock=clock, logger=log)


class CacheAdapter:
    """Base of the adapters: counters, the guard around everything of ours, and the status that shows them."""

    engine = "engine"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bypassed: Counter[str] = Counter()
        self._last_error = ""
        self._quiet = True
        self._log = RateLimitedLog()

    def status(self) -> dict[str, Any]:
        """What is hooked and what it has served so far."""
        with self._lock:
            return {
                "engine": self.engine,
                **{name: self._counts[name] for name in COUNTERS},
                "bypassed": dict(self._bypassed),
                "last_error": self._last_error,
            }

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Catch, count and log whatever goes wrong in *what*: the engine must not notice."""
        try:
            yield
        except Exception as error:
            with self._lock:
                self._counts["errors"] += 1
                self._last_error = f"{what}: {type(error).__name__}: {error}"
            self._log.warning(
                what, f"{self.engine}: {what} failed, going on without the cache: {self._last_error}", exc_info=True
            )

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)

    def _bypass(self, reason: str) -> None:
        """Count a request that is handed to the engine untouched."""
        with self._lock:
            self._counts["requests"] += 1
            self._bypassed[reason] += 1
            say = self._quiet and not self._counts["lookups"] and self._counts["requests"] >= QUIET_REQUESTS
            if say:
                self._quiet = False
        if say:
            log.warning(
                "%s: attached, but none of %d requests was looked up in the cache (%s); status() counts the reasons",
                self.engine,
                self._counts["requests"],
                ", ".join(sorted(self._bypassed)),
            )


COUNTERS = (
    "requests",
    "lookups",
    "hits",
    "prompt_tokens",
    "reused_tokens",
    "saved_blocks",
    "refreshes",
    "errors",
)
"""Every adapter counts these: requests seen and looked up, sequences that hit, tokens, blocks, and failures of ours."""
