"""Jobs that go on when somebody else has ended writing to a tier."""

from __future__ import annotations

import threading
from collections.abc import Callable

MOST_WAITING = 256


class Waiting:
    """Jobs, at most :data:`MOST_WAITING`, each called once; a job that came too early waits again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[Callable[[], object]] = []

    def add(self, job: Callable[[], object]) -> bool:
        """Call *job* with the next :meth:`wake`; False when too many wait."""
        with self._lock:
            room = len(self._jobs) < MOST_WAITING
            if room:
                self._jobs.append(job)
            return room

    def wake(self) -> None:
        """Call all jobs, which must be quick; not under a lock that they may want."""
        if self._jobs:
            with self._lock:
                jobs, self._jobs = self._jobs, []
            for job in jobs:
                job()
