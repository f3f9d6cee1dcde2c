"""What went wrong, counted by reason, and a pause after it: a disk that fails is not asked again for a second."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ...errors import StoreError
from .aio import reason_of

RETRY_S = 1.0


class Health:
    """Reasons counted, and whether writing is worth trying now; safe across threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._again_at = 0.0
        self._error: StoreError | None = None
        self.reasons: Counter[str] = Counter()

    def count(self, reason: str, times: int = 1) -> None:
        """Count *times* events under *reason*."""
        if times:
            with self._lock:
                self.reasons[reason] += times

    def failed(self, what: str, error: OSError | StoreError) -> StoreError:
        """Count a failure of writing and begin the pause; returns the error to raise."""
        typed = error if isinstance(error, StoreError) else StoreError(f"{what}: {error}", reason_of(error))
        self.count(typed.reason)
        with self._lock:
            self._error, self._again_at = typed, self._clock() + RETRY_S
        return typed

    def check(self) -> None:
        """Raise the last failure of writing again while its pause lasts."""
        error = self.pausing()
        if error is not None:
            raise StoreError(str(error), error.reason)

    def pausing(self) -> StoreError | None:
        """The failure whose pause lasts, or None."""
        with self._lock:
            if self._error is not None and self._clock() >= self._again_at:
                self._error = None
            return self._error
