"""A batch in pieces: whoever waits for it works on one piece while others are on their way.

A piece is prepared before it is put, and checked when it has come, both by the thread that waits for the batch: it has
nothing else to do, and when it stops waiting, nobody touches the memory but the operation itself.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future

from .answers import Answers
from .base import Operation


class Pieces:
    """The pieces of one batch.

    Parameters
    ----------
    blocks:
        Number of blocks of the batch.
    step:
        Blocks of a piece.
    prepare:
        Called with each piece in turn before it is put; none is put behind one for which this raised.
    check:
        Called with leading blocks that have come, in order and once each; with none behind those for which this raised.

    Attributes
    ----------
    parts:
        The pieces, as slices of the batch.
    not_ready, not_checked:
        What *prepare* and *check* raised, in words.
    late:
        Whether preparing took all the time there was: what is not done then says nothing against the store.
    """

    def __init__(
        self,
        blocks: int,
        step: int,
        prepare: Callable[[slice], object] | None = None,
        check: Callable[[slice], object] | None = None,
    ) -> None:
        self.step = step if prepare or check else max(blocks, 1)
        self.parts = [slice(at, min(at + self.step, blocks)) for at in range(0, blocks, self.step)]
        self.not_ready = self.not_checked = ""
        self.late = False
        self._prepare = prepare
        self._check = check
        self._ready: list[Future[bool]] = [Future() for _ in self.parts] if prepare else []
        self._come: set[int] = set()
        self._news: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    # -- by the thread that waits -------------------------------------------------------------------------------------

    def attend(self, operation: Operation, end: float) -> bool:
        """Work until *operation* has ended and all that came is checked, True, or until the clock says *end*, False."""
        if self._prepare is not None:
            self._make_ready(self._prepare, operation, end)
        if self._check is not None:
            return self._look(self._check, operation, end)
        return operation.wait(max(end - time.monotonic(), 0))

    def _make_ready(self, prepare: Callable[[slice], object], operation: Operation, end: float) -> None:
        try:
            for part, ready in zip(self.parts, self._ready, strict=True):
                if operation.done or time.monotonic() >= end:
                    break
                prepare(part)
                ready.set_result(True)
            self.late = time.monotonic() >= end
        except Exception as error:  # the piece before it may be on its way, and has to be waited for
            self.not_ready = f"{type(error).__name__}: {error}"
        finally:
            for ready in self._ready:
                if not ready.done():
                    ready.set_result(False)

    def _look(self, check: Callable[[slice], object], operation: Operation, end: float) -> bool:
        operation.then(lambda: self._news.put(None))
        at, waiting = 0, True
        while waiting:
            try:
                waiting = self._news.get(timeout=max(end - time.monotonic(), 0)) is not None
            except queue.Empty:
                if not operation.done:
                    return False
                waiting = False
            if waiting and time.monotonic() >= end and not operation.done:
                return False
            come = self._leading(at) if waiting else operation.count
            if come > at:
                self._check_part(check, slice(at, come))
                at = come
        return True

    def _leading(self, at: int) -> int:
        while at in self._come:
            at += 1
        return at

    def _check_part(self, check: Callable[[slice], object], part: slice) -> None:
        if self.not_checked:  # whoever checks counts blocks by their order
            return
        try:
            check(part)
        except Exception as error:
            self.not_checked = f"{type(error).__name__}: {error}"

    # -- by others ----------------------------------------------------------------------------------------------------

    async def turn(self, block: int) -> Answers | None:
        """On the loop: wait until the piece of a block may be put; an answer where it may not."""
        if not self._ready:
            return None
        ready = self._ready[block // self.step]
        if await asyncio.wrap_future(ready) if not ready.done() else ready.result():
            return None
        return self.refusal

    def wait_for(self, block: int) -> bool:
        """The same on any other thread, and whether the piece may be put."""
        return not self._ready or self._ready[block // self.step].result()

    @property
    def refusal(self) -> Answers:
        """Why a piece may not be put."""
        return Answers(0, "not_ready", self.not_ready) if self.not_ready else Answers(0, "timeout")

    def came(self, block: int) -> None:
        """A block has come; from any thread."""
        self._come.add(block)
        if (block + 1) % self.step == 0:  # a look at each would cost more than it gains
            self._news.put(block)
