"""Threads for what may never come back: a loop, and an executor whose threads do not keep the process alive."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(Executor):
    """Up to *threads* daemon threads: a call that hangs in a client library must not hang the interpreter's exit."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is shut down")
            self._jobs.put(run)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; end each thread when its job has ended.  *wait* waits for that."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._idle.release()
                job = self._jobs.get()
            if job is None:
                return
            job()


class LoopThread:
    """An event loop on a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enter(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run *coroutine* on the loop, without waiting for it."""
        self.loop.call_soon_threadsafe(self._start, coroutine)

    def later(self, seconds: float, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what *make* makes after some seconds."""
        self.loop.call_soon_threadsafe(lambda: self.loop.call_later(seconds, lambda: self._start(make())))

    def stop(self) -> None:
        """End the loop as soon as nothing runs on it; waits a second for that, and leaves what hangs alone."""
        with contextlib.suppress(RuntimeError):  # it has been stopped
            self.loop.call_soon_threadsafe(self._stop_when_idle)
        self._thread.join(1.0)

    def _stop_when_idle(self) -> None:
        self._stopping = True
        if not self._tasks:
            self.loop.stop()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._stopping:
            self._stop_when_idle()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()
