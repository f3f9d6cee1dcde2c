"""Background work in two lanes: loads go before stores.

The pool starts its threads with the first job and never keeps the process alive.  Both lanes are bounded: a job that
does not fit is refused, and the caller counts that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

from .inside import HERE


class Lane(IntEnum):
    """Lower goes first."""

    LOAD = 0
    STORE = 1


class Ticket:
    """A job that was taken; ask or wait for its end."""

    def __init__(self, job: Callable[[], object]) -> None:
        self._job = job
        self._done = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Run the job; its exception stays in :attr:`error`."""
        try:
            self._job()
        except Exception as error:
            self.error = error
        finally:
            self._job = _nothing
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether the job has ended."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to *timeout* seconds for the job's end; True when it has ended."""
        return self._done.wait(timeout)


class Joint(Ticket):
    """Several jobs as one: it has ended when all of them have."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        super().__init__(_nothing)
        self._tickets = tickets

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        return all(t.wait(None if end is None else max(end - time.monotonic(), 0)) for t in self._tickets)


def _nothing() -> None:
    return None


class IOPool:
    """Daemon threads that run jobs, the load lane first.

    Parameters
    ----------
    threads:
        Number of threads.
    max_pending:
        Jobs that may wait in each lane.
    on_error:
        Called with the exception of a job that failed.
    """

    def __init__(self, threads: int, max_pending: int, on_error: Callable[[Exception], None]) -> None:
        self._size = threads
        self._max_pending = max_pending
        self._on_error = on_error
        self._lanes: tuple[deque[Ticket], ...] = tuple(deque() for _ in Lane)
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._alarm: tuple[float, Callable[[], object]] | None = None
        self._running = 0
        self._closed = False

    def submit(self, lane: Lane, job: Callable[[], object]) -> Ticket | None:
        """Queue *job*; None when the lane is full or the pool is closed."""
        with self._changed:
            if self._closed or len(self._lanes[lane]) >= self._max_pending:
                return None
            ticket = Ticket(job)
            self._lanes[lane].append(ticket)
            if len(self._threads) < self._size:
                self._start_thread()
            self._changed.notify()
            return ticket

    def wake_at(self, when: float, job: Callable[[], object]) -> None:
        """Run *job* at the time *when* of ``time.monotonic``; there is one such job, that with the earliest time."""
        with self._changed:
            if self._closed or (self._alarm is not None and self._alarm[0] <= when):
                return
            self._alarm = when, job
            if not self._threads:
                self._start_thread()
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or running; False when *timeout* seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running and not self.pending, timeout)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        with self._changed:
            return not self._running and not self.pending

    @property
    def pending(self) -> int:
        """Jobs that wait."""
        return sum(len(lane) for lane in self._lanes)

    def waiting(self, lane: Lane) -> int:
        """Jobs that wait in one lane."""
        return len(self._lanes[lane])

    @property
    def running(self) -> int:
        """Jobs at work."""
        return self._running

    def close(self) -> None:
        """Refuse new jobs, finish those that were taken, end the threads; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start_thread(self) -> None:
        name = f"kvcache-factory-io-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        HERE.depth = 1
        while True:
            with self._changed:
                ticket = self._next()
                if ticket is None:
                    return
                self._running += 1
            ticket.run()
            if ticket.error is not None:
                self._on_error(ticket.error)
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _next(self) -> Ticket | None:
        """Wait for the next job; None when the pool is closed and nothing is left to do."""
        while True:
            lane = next((lane for lane in self._lanes if lane), None)
            if lane is not None:
                return lane.popleft()
            if self._closed:
                return None
            left = self._alarm[0] - time.monotonic() if self._alarm is not None else None
            if self._alarm is not None and left is not None and left <= 0:
                (_, job), self._alarm = self._alarm, None
                return Ticket(job)
            self._changed.wait(left)
