"""A model's view of a manager: the verbs that engines' adapters call, under one identity.

In the engine's path nothing raises: whatever fails is counted, logged once in a while, and answered as a miss.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from .block.envelope import Fidelity
from .block.identity import Identity
from .block.key import KeyChain, MediaSpan
from .block.plan import LoadPlan, Match, SavePlan
from .block.spec import BlockSpec, Layout
from .context import Context
from .engine.io import Ticket
from .engine.ledger import MANAGER, Event
from .errors import ConfigError, LayoutError
from .memory.agreement import Agreement
from .memory.region import BlockPositions, Region
from .policy.base import RequestHint, ReuseHint
from .session import current_session
from .session.book import Charge

MAX_WAIT_S = 2.0
"""Longest time that a look-up waits for a remote level."""


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

    @property
    def closed(self) -> bool:
        """Whether the manager was closed: nothing is found or stored any more."""
        return self._context.chain.closed

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

    def ready_in_memory(self, chain: KeyChain) -> int:
        """Leading blocks that :meth:`plan_load` would plan: those of :meth:`held_in_memory` that are not encoded."""
        found = 0
        with self._context.guarded("peek"):
            if self._context.serving:
                found = self._context.chain.ready(chain)
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
        with self._context.guarded("load", timed=False):
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
                # Before anything is stored: whoever ends the session meanwhile takes these blocks along.
                charge = self._charge(session, chain, first + count, storing=True)
                part = positions[: max(charge.blocks - first, 0)]
                arguments = region, part, first, fidelity, hint, request_id
                if len(part):
                    stored = self._context.chain.saving.save(chain, self.root, *arguments)
                self._context.sessions.stored(charge, chain.keys[: charge.blocks], stored)
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
                charge = self._charge(session, chain, first + count, storing=True)
                count = max(charge.blocks - first, 0)
                if count:
                    saving = self._context.chain.saving
                    plan = saving.plan_save(chain, self.root, first, count, tag, Fidelity.EXACT, hint)
                    plan = replace(plan, session=hint.session)
                self._context.sessions.stored(charge, chain.keys[: charge.blocks], len(plan.rows) if plan else 0)
        return plan if plan is not None and len(plan.rows) else None

    def finish_save(
        self, plan: SavePlan, filled: int, *, session: str | None = None, reuse_hint: ReuseHint = "unknown"
    ) -> None:
        """End a plan: its leading *filled* rows hold their blocks, the others are given back."""
        with self._context.guarded("save"):
            if self._context.chain.is_open:
                hint = self._hint(session if session is not None else plan.session or None, reuse_hint)
                keys = self._context.chain.tiers[0].index.keys[plan.rows[:filled]]
                self._context.chain.saving.finish_save(plan, filled, hint)
                self._context.sessions.finished(hint.session, keys)

    def holds(self, match: Match) -> bool:
        """Whether the lease of *match* is still there."""
        return self._context.chain.leases.holds(match.request_id, match.lease)

    def serve(self, match: Match, blocks: int, *, declined: bool = False) -> None:
        """For engines that plan loads: the leading *blocks* of *match* are used; the others are computed, by choice
        where they were *declined*."""
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
        with self._context.guarded("release", timed=False):
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
            found = self._context.sessions.book.find(owner)
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

    def _charge(
        self, session: str | None, chain: KeyChain, blocks: int, *, used: bool = False, storing: bool = False
    ) -> Charge:
        """Charge the leading *blocks* of *chain* to a session; how many of them it may have."""
        session = session if session is not None else current_session(self._context.number)
        charge = Charge(None, blocks)
        with self._context.guarded("charge", timed=session is not None):
            self._context.sessions.expire_if_due()
            if session is not None:
                charge = self._context.sessions.charge(session, chain.keys[:blocks], storing=storing)
                if used and charge.session is not None:
                    reused = blocks * self.block_tokens
                    self._context.sessions.book.used(charge.session, chain.num_tokens, reused)
        return charge
