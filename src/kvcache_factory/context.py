"""What every key space of one manager shares, and the guard around each verb."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from .engine.chain import TierChain
from .engine.inside import HERE
from .engine.ledger import MANAGER, Durations, Event, Ledger
from .memory.agreement import Agreement
from .observe.log import LimitedLog
from .observe.profiling import Profiling, profile
from .observe.record import Recorder
from .policy.base import Importance
from .session import Keeper

if TYPE_CHECKING:
    from .config import ManagerConfig


class Context:
    """What every key space of one manager shares."""

    def __init__(self, config: ManagerConfig, chain: TierChain, ledger: Ledger, sessions: Keeper, number: int) -> None:
        self.config = config
        self.chain = chain
        self.ledger = ledger
        self.spent = _Verbs(ledger)
        self.sessions = sessions
        self.number = number
        self.recorder: Recorder | None = None
        self.profiling: Profiling | None = None
        self.agreement: Agreement | None = None
        """What keeps the ranks of a tensor-parallel engine together."""
        self.bypassed = False
        self.scorer: Importance | None = None
        """What tells how important blocks are, where the policy has such a hook."""
        self.log = LimitedLog(config.name)
        self._lock = threading.RLock()  # a destructor may fail inside
        self._later: deque[Callable[[], object]] = deque()

    @property
    def serving(self) -> bool:
        """Whether requests are served: tiers are open, and the cache is not bypassed."""
        return self.chain.is_open and not self.bypassed

    def begin_recording(self, block_tokens: int) -> None:
        """Record requests from now on, if the configuration says so; the file is opened with the first."""
        with self._lock:
            if self.config.record is not None and self.recorder is None:
                self.recorder = Recorder(self.config.record, block_tokens)

    def end_recording(self) -> None:
        """Write what is left, and close the file; idempotent."""
        if self.recorder is not None:
            with self.guarded("record"):
                self.recorder.close()

    def begin_profiling(self) -> None:
        """Push profiles of this process from now on, if the configuration says so."""
        with self._lock:
            if self.config.profiling_server and self.profiling is None:
                self.profiling = profile(self.config.profiling_server)

    def end_profiling(self) -> None:
        """Push what is left, unless another manager goes on; idempotent."""
        if self.profiling is not None:
            with self.guarded("profile"):
                self.profiling.end()

    def guarded(self, verb: str, *, timed: bool = True) -> Guard:
        """Count and log whatever is raised inside instead of letting it reach the engine; measure the time if asked.

        What is measured by tier, or takes next to no time, needs not be *timed* here.
        """
        return Guard(self, verb, timed=timed and self.ledger.timed)

    def soon(self, work: Callable[[], object]) -> None:
        """Run *work* now or, where a destructor asks in the middle of something, when the next verb has ended."""
        self._later.append(work)
        self.catch_up()

    @property
    def why_not(self) -> str:
        """The reason of a match that finds nothing before anything was looked up, or fails."""
        return "bypassed" if self.bypassed else "error" if self.chain.is_open else "closed"

    @property
    def late(self) -> bool:
        """Whether something waits for :meth:`catch_up`."""
        return bool(self._later)

    def catch_up(self) -> None:
        """Run what had to wait, unless this thread is inside itself."""
        while self._later and not HERE.depth:
            try:
                work = self._later.popleft()
            except IndexError:  # another thread was faster
                return
            with Guard(self, "later", catch_up=False):
                work()

    def failed(self, verb: str, error: Exception) -> None:
        """Count a failure of *verb*, and log it unless its like was logged within a minute."""
        kind = f"{verb}:{type(error).__name__}"
        self.ledger.add(MANAGER, Event.ERROR, reason=kind)
        text = f"{verb} failed and is answered as a miss: {kind}: {error}"
        self.log.warning(kind, text, verb=verb, error=type(error).__name__)


class _Verbs(dict[str, Durations]):
    """What notes the durations of each verb; made when it is first asked for."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __missing__(self, verb: str) -> Durations:
        made = self[verb] = self._ledger.durations(MANAGER, verb)
        return made


class Guard:
    """One verb: keeps its failures from the engine, marks the thread as inside, and measures if asked."""

    __slots__ = ("_begun", "_catch_up", "_context", "_timed", "_verb")

    def __init__(self, context: Context, verb: str, catch_up: bool = True, timed: bool = False) -> None:
        self._context = context
        self._verb = verb
        self._catch_up = catch_up
        self._timed = timed

    def __enter__(self) -> None:
        HERE.depth += 1
        if self._timed:
            self._begun = perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        context = self._context
        swallowed = isinstance(error, Exception)
        if isinstance(error, Exception):
            context.failed(self._verb, error)
        HERE.depth -= 1
        if self._timed:
            context.spent[self._verb].add(perf_counter() - self._begun)
        if self._catch_up and context.late:
            context.catch_up()
        return swallowed
