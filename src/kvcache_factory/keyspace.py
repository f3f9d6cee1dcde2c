"""A model's view of a manager: the verbs that engines' adapters call, under one identity.

In the engine's path nothing raises: whatever fails is counted, logged once in a while, and answered as a miss.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .block.envelope import Fidelity
from .block.identity import Identity
from .block.key import KeyChain, MediaSpan
from .block.plan import LoadPlan, Match, SavePlan
from .block.spec import BlockSpec, Layout
from .engine.chain import TierChain
from .engine.inside import HERE
from .engine.io import Ticket
from .engine.ledger import MANAGER, Event, Ledger
from .errors import ConfigError, LayoutError
from .memory.agreement import Agreement
from .memory.region import BlockPositions, Region
from .observe.log import LimitedLog
from .observe.profiling import Profiling, profile
from .observe.record import Recorder
from .policy.base import Importance, RequestHint, ReuseHint
from .session import Session, SessionBook, current_session

if TYPE_CHECKING:
    from .config import ManagerConfig

MAX_WAIT_S = 2.0
"""Longest time that a look-up waits for a remote level."""


class Context:
    """What every key space of one manager shares."""

    def __init__(
        self, config: ManagerConfig, chain: TierChain, ledger: Ledger, sessions: SessionBook, number: int
    ) -> None:
        self.config = config
        self.chain = chain
        self.ledger = ledger
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

    def guarded(self, verb: str) -> Guard:
        """Count and log whatever is raised inside instead of letting it reach the engine; measure the time if asked."""
        return Guard(self, verb)

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


class Guard:
    """One verb: keeps its failures from the engine, marks the thread as inside, and measures if asked."""

    __slots__ = ("_begun", "_catch_up", "_context", "_verb")

    def __init__(self, context: Context, verb: str, catch_up: bool = True) -> None:
        self._context = context
        self._verb = verb
        self._catch_up = catch_up

    def __enter__(self) -> None:
        HERE.depth += 1
        self._begun = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        context = self._context
        swallowed = isinstance(error, Exception)
        if isinstance(error, Exception):
            context.failed(self._verb, error)
        HERE.depth -= 1
        if context.config.enable_metrics:
            context.ledger.observe(MANAGER, self._verb, time.perf_counter() - self._begun)
        if self._catch_up and context.late:
            context.catch_up()
        return swallowed


class KeySpace:
    """One model in one manager.  Made by :meth:`CacheManager.register`; safe to use from several threads.

    A :class:`KeyChain` belongs to one request at a time.
    """

    def __init__(self, context: Context, spec: BlockSpec, identity: Identity, root: int, owner: object = None) -> None:
        self._owner = owner  # a manager that nobody else holds must not close under its key space
        self.spec = spec
        self.identity = identity
        self._context = context
        self.root = root
        context.chain.roots.hold(root)
        weakref.finalize(self, context.chain.roots.let_go, root).atexit = False

    @property
    def block_tokens(self) -> int:
        """Tokens of a storage block."""
        return self.spec.block_tokens

    def chain(self, tokens: Any = (), media: Sequence[MediaSpan] = ()) -> KeyChain:
        """The keys of *tokens* (list, array or tensor of integers); TokenError when they are not token ids."""
        config = self._context.config
        chain = KeyChain(self.identity, builder=config.key_builder, media=media, max_tokens=config.max_tokens)
        chain.extend(tokens)
        return chain

    def peek(self, chain: KeyChain) -> int:
        """Leading blocks that are stored, by key alone: no verification, no lease, nothing counted."""
        found = 0
        with self._context.guarded("peek"):
            if self._context.serving:
                found = self._context.chain.peek(chain)
        return found

    def held_in_memory(self, chain: KeyChain) -> int:
        """Leading blocks that the first tier holds, by key alone."""
        found = 0
        with self._context.guarded("peek"):
            if self._context.serving:
                found = self._context.chain.tiers[0].index.peek(chain)
        return found

    def match(
        self,
        chain: KeyChain,
        request_id: str,
        *,
        max_tokens: int | None = None,
        session: str | None = None,
        reuse_hint: ReuseHint = "unknown",
    ) -> Match:
        """The verified, stored leading run of *chain*, of at most *max_tokens* tokens, leased to *request_id*.

        Hold it for loading and give it back with :meth:`release`.  Empty when anything fails.
        """
        context = self._context
        limit = chain.num_blocks
        if max_tokens is not None:
            limit = min(limit, max(max_tokens, 0) // self.block_tokens)
        match = Match(request_id, reason=context.why_not)
        with context.guarded("match"):
            hint = self._hint(session, reuse_hint, total_blocks=chain.num_blocks)
            if context.serving:
                self._require(chain)
                finding = context.chain.finding
                match = finding.match(chain, self.root, request_id, limit, finding.worst, hint)
            elif context.bypassed and limit:
                context.ledger.add(MANAGER, Event.ASKED, limit)
                context.ledger.add(MANAGER, Event.MISS, limit, reason="bypassed")
        if context.agreement is not None:
            match = self._agreed(context.agreement, match)
        self._charge(session, chain, match.blocks, used=True)
        if context.recorder is not None:
            with context.guarded("record"):
                owner = session if session is not None else current_session(context.number)
                said = self._hint(session, reuse_hint).reuse
                context.recorder.asked(request_id, chain.keys, chain.num_tokens, owner, said)
        return match

    def _agreed(self, agreement: Agreement, match: Match) -> Match:
        """What every rank has of it; asked for every request, found or not, since all ranks must ask equally often."""
        least = 0
        with self._context.guarded("agree"):
            least = agreement.least(match.blocks)
        return match.shortened(least, "not_on_every_rank")

    def load(self, match: Match, region: Region, positions: BlockPositions) -> int:
        """Copy the blocks of *match*, from number 0 on, to *positions* of *region*.

        Returns how many leading blocks were copied; what lies behind them is undefined and must be recomputed.
        """
        loaded = 0
        with self._context.guarded("load"):
            if self._context.chain.is_open and match.blocks:
                self._require(region=region)
                loaded = self._context.chain.loading.load(match, region, positions)
        return loaded

    def save(
        self,
        chain: KeyChain,
        region: Region,
        positions: BlockPositions,
        *,
        first: int = 0,
        session: str | None = None,
        reuse_hint: ReuseHint = "unknown",
        fidelity: Fidelity = Fidelity.EXACT,
        output_tokens: int = 0,
        importance: Any = None,
        text: str | None = None,
        request_id: str | None = None,
    ) -> int:
        """Store what is missing of the blocks *first* .. *first* + len(positions) - 1 of *chain*.

        Returns how many blocks were stored.  Blocks before *first* must be stored already.  *output_tokens* (generated
        by the request, 0: not known), *importance* (0 to 1: one number, or one for each block of the chain) and *text*
        (of the chain, for a policy that scores importance itself) are for policies that use them.  The lease of
        *request_id*, if it has one, holds what was stored until it is released.
        """
        stored = 0
        with self._context.guarded("save"):
            count = min(len(positions), chain.num_blocks - first)
            if self._context.serving and count > 0:
                self._require(chain, region)
                hint = self._hint(
                    session,
                    reuse_hint,
                    total_blocks=chain.num_blocks,
                    first_block=first,
                    output_tokens=output_tokens,
                    importance=self._importance(chain, importance, text),
                )
                part = positions[:count]
                # Before anything is stored: whoever ends the session meanwhile takes these blocks along.
                charged = self._charge(session, chain, first + count)
                arguments = region, part, first, fidelity, hint, request_id
                stored = self._context.chain.saving.save(chain, self.root, *arguments)
                if charged is not None and charged.purged is not None:
                    keys = self._context.sessions.unheld(chain.keys[: first + count])
                    self._context.chain.drop_unshared(keys, "session_destroyed", wipe=charged.purged)
        return stored

    def plan_save(
        self,
        chain: KeyChain,
        *,
        first: int,
        count: int,
        tag: Layout,
        session: str | None = None,
        reuse_hint: ReuseHint = "unknown",
    ) -> SavePlan | None:
        """Reserve slots for what is missing of the blocks *first* to *first* + *count* - 1; None when nothing is.

        For engines whose tensors are in another process: somebody copies payloads in order *tag* into the rows, and
        then :meth:`finish_save` must be called.
        """
        plan = None
        with self._context.guarded("save"):
            count = min(count, chain.num_blocks - first)
            if self._context.serving and count > 0:
                self._require(chain)
                hint = self._hint(session, reuse_hint, total_blocks=chain.num_blocks, first_block=first)
                plan = self._context.chain.saving.plan_save(chain, self.root, first, count, tag, Fidelity.EXACT, hint)
                self._charge(session, chain, first + count)
        return plan if plan is not None and len(plan.rows) else None

    def finish_save(
        self, plan: SavePlan, filled: int, *, session: str | None = None, reuse_hint: ReuseHint = "unknown"
    ) -> None:
        """End a plan: its leading *filled* rows hold their blocks, the others are given back."""
        with self._context.guarded("save"):
            if self._context.chain.is_open:
                self._context.chain.saving.finish_save(plan, filled, self._hint(session, reuse_hint))

    def holds(self, match: Match) -> bool:
        """Whether the lease of *match* is still there."""
        return self._context.chain.leases.holds(match.request_id, match.lease)

    def serve(self, match: Match, blocks: int, *, declined: bool = False) -> None:
        """For engines that load by :meth:`plan_load`: the leading *blocks* of *match* are not computed again.

        *declined*: the others are, because that was judged faster.
        """
        lease = self._context.chain.leases.find(match.request_id, match.lease)
        if lease is not None:
            lease.usage.served = blocks
            lease.usage.chosen = match.blocks - blocks if declined else 0

    def first_token(self, seconds: float) -> None:
        """A request got its first token so many *seconds* after it had come: counted if durations are measured."""
        if self._context.ledger.timed:
            self._context.ledger.observe(MANAGER, "first_token", seconds)

    def plan_load(self, match: Match, count: int) -> LoadPlan:
        """Slots of the first tier with the leading blocks of *match*, at most *count*; they stay while it is leased."""
        plan = LoadPlan()
        with self._context.guarded("load"):
            if self._context.chain.is_open:
                plan = self._context.chain.loading.plan_load(match, count)
        return plan

    def release(self, request_id: str, output_tokens: int = 0) -> bool:
        """Give the lease of a request back; idempotent.  *output_tokens*: how many it generated."""
        released = False
        with self._context.guarded("release"):
            released = self._context.chain.release(request_id, output_tokens)
        if self._context.recorder is not None:
            with self._context.guarded("record"):
                self._context.recorder.ended(request_id, output_tokens)
        return released

    @property
    def asks_remotely(self) -> bool:
        """Whether there is a remote level, which only :meth:`prefetch` asks; :meth:`peek` knows nothing of it."""
        return self._context.chain.remote is not None

    def prefetch(self, chain: KeyChain, wait_s: float | None = None) -> Ticket | None:
        """Start to bring what slower levels hold of *chain* to memory; None when there is nothing to do.

        *wait_s*: seconds after which the caller will not wait any more, a deadline for what comes from a remote level.
        """
        ticket = None
        with self._context.guarded("prefetch"):
            if self._context.serving:
                ticket = self._context.chain.finding.prefetch(chain, self.root, wait_s)
        return ticket

    def ask_remotely(self, chains: Sequence[KeyChain], wait_s: float = MAX_WAIT_S) -> None:
        """Bring what the remote level, if there is one, holds of *chains* to memory; waits at most *wait_s* seconds.

        For engines that cannot do anything else meanwhile; :meth:`match` then finds what has come.
        """
        if not self.asks_remotely:
            return
        end = time.monotonic() + wait_s
        tickets = [self.prefetch(chain, wait_s) for chain in chains]
        for ticket in tickets:
            if ticket is not None:
                ticket.wait(max(end - time.monotonic(), 0))

    def refresh(self) -> Ticket | None:
        """Begin to learn what other processes have stored; None when what is known is young enough."""
        ticket = None
        with self._context.guarded("refresh"):
            if self._context.chain.is_open:
                ticket = self._context.chain.finding.refresh_if_stale()
        return ticket

    def soon(self, work: Callable[[], object]) -> None:
        """Run *work* now or, where a destructor asks in the middle of something, when the next verb has ended."""
        self._context.soon(work)

    def drop(self, chain: KeyChain, first: int = 0) -> int:
        """Drop the blocks of *chain* from number *first* on, and all that was built on them; returns how many."""
        return self._context.chain.drop(chain, first) if self._context.chain.is_open else 0

    def _hint(self, session: str | None, reuse: ReuseHint, **known: Any) -> RequestHint:
        """What is known of a request; what it does not say about its session's return, the session may."""
        owner = session if session is not None else current_session(self._context.number)
        if reuse == "unknown" and owner:
            found = self._context.sessions.find(owner)
            reuse = found.reuse_hint if found is not None else reuse
        return RequestHint(reuse=reuse, session=owner or "", **known)

    def _importance(self, chain: KeyChain, given: Any, text: str | None) -> Any:
        scorer = self._context.scorer
        if given is not None or scorer is None:
            return given
        return scorer(chain.token_blocks, text)

    def _require(self, chain: KeyChain | None = None, region: Region | None = None) -> None:
        """Refuse a chain or tensors of another model: their records would not fit, their bytes would overrun a slot."""
        if chain is not None and chain.identity is not self.identity and chain.identity != self.identity:
            raise ConfigError(f"the chain belongs to {chain.identity}, this key space to {self.identity}")
        if region is not None and region.spec is not self.spec and region.spec != self.spec:
            raise LayoutError(f"the region was made for {region.spec}, this key space for {self.spec}")

    def _charge(self, session: str | None, chain: KeyChain, blocks: int, *, used: bool = False) -> Session | None:
        session = session if session is not None else current_session(self._context.number)
        charged = None
        if session is None:
            return charged
        with self._context.guarded("charge"):
            charged = self._context.sessions.charge(session, chain.keys[:blocks], self._context.chain.holds)
            if used:
                self._context.sessions.used(session, chain.num_tokens, blocks * self.block_tokens)
        return charged
