"""What went wrong, counted by reason, and pauses: what has failed is not tried again for a second."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ...errors import StoreError
from .aio import reason_of

RETRY_S = 1.0


class Health:
    """Reasons counted, and one pause each for writing blocks and for making segments; safe across threads.

    They pause apart: on a full disk, blocks that leave still make room in the segments that there are.  *report* hears
    of each reason and how many times.
    """

    def __init__(self, clock: Callable[[], float], report: Callable[[str, int], object] = lambda *_: None) -> None:
        self._lock = threading.Lock()
        self._report = report
        self.reasons: Counter[str] = Counter()
        self.writing = Pause(clock)
        self.growing = Pause(clock)

    def count(self, reason: str, times: int = 1) -> None:
        """Count *times* events under *reason*."""
        if times:
            with self._lock:
                self.reasons[reason] += times
            self._report(reason, times)

    def failed(self, what: str, error: Exception) -> StoreError:
        """Count a failure; returns it as the error to raise."""
        if isinstance(error, StoreError):
            typed = error
        else:
            typed = StoreError(f"{what}: {error}", reason_of(error) if isinstance(error, OSError) else "failed")
        self.count(typed.reason)
        return typed


class Pause:
    """The last failure of one kind of work, for as long as that work is not worth trying again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[StoreError, float] | None = None

    def begin(self, error: StoreError) -> None:
        """Try again a second from now."""
        self._last = error, self._clock() + RETRY_S

    @property
    def error(self) -> StoreError | None:
        """Why not to try now, or None."""
        last = self._last
        return StoreError(str(last[0]), last[0].reason) if last is not None and self._clock() < last[1] else None
