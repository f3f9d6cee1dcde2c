"""A circuit breaker: after some failures in a row nothing is asked any more, until a trial succeeds."""

from __future__ import annotations

import threading


class Breaker:
    """Counts failures in a row; open means that calls are refused.

    Parameters
    ----------
    failures:
        How many in a row open it.
    cooldown_s:
        Seconds before the first trial; doubled with each trial that fails.
    longest_s:
        Most seconds between trials.
    """

    def __init__(self, failures: int = 5, cooldown_s: float = 0.5, longest_s: float = 30.0) -> None:
        self.failures = failures
        self.cooldown_s = cooldown_s
        self.longest_s = longest_s
        self.openings = 0
        self._wait_s = cooldown_s
        self._in_a_row = 0
        self._open = False
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self._open

    def succeeded(self) -> bool:
        """A call or a trial went well; True when that closes the breaker."""
        with self._lock:
            was, self._open = self._open, False
            self._in_a_row, self._wait_s = 0, self.cooldown_s
            return was

    def failed(self) -> bool:
        """A call failed; True when that opens the breaker, and somebody must try again after :meth:`next_trial_s`."""
        with self._lock:
            self._in_a_row += 1
            if self._open or self._in_a_row < self.failures:
                return False
            self._open = True
            self.openings += 1
            return True

    def next_trial_s(self) -> float:
        """Seconds until the next trial; more each time."""
        with self._lock:
            wait, self._wait_s = self._wait_s, min(2 * self._wait_s, self.longest_s)
            return wait
