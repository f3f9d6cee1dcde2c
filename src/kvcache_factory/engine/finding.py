"""Finding what is stored of a chain: each tier is asked for what faster ones do not have, and what is found is held."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from ..block.envelope import Fidelity
from ..block.key import KeyChain
from ..block.plan import ChainView, Match, Segment
from ..policy.base import NO_HINT, RequestHint
from .flow import Flow
from .io import Joint, Lane, Ticket
from .lasting import LastingTier
from .lease import LeaseBook, Usage
from .ledger import MANAGER, Event, Ledger
from .prefetch import Prefetch
from .seen import Seen
from .table import pick
from .tier import Tier


class Finding:
    """The verbs *match* and *prefetch* over the tiers of a chain."""

    def __init__(self, tiers: Sequence[Tier], flow: Flow, leases: LeaseBook, ledger: Ledger) -> None:
        self.tiers = tiers
        self.flow = flow
        self.leases = leases
        self.ledger = ledger
        self._asked = ledger.pair(MANAGER, Event.ASKED, Event.HIT)
        coders = [tier.coder for tier in tiers] + ([flow.remote.coder] if flow.remote is not None else [])
        lossy = any(coder is not None and coder.lossy for coder in coders)
        self.worst = Fidelity.BOUNDED if lossy else Fidelity.EXACT
        """What requests of this manager accept."""
        self.seen: Seen | None = None
        """Keys that were computed before; there once the tiers are open."""
        self._prefetches = itertools.count()

    def match(
        self, chain: KeyChain, root: int, request_id: str, limit: int, worst: Fidelity, hint: RequestHint
    ) -> Match:
        """The verified leading run of at most *limit* blocks, leased to *request_id*."""
        return self._lease(chain, root, request_id, limit, worst, hint, counted=True)

    def _lease(
        self,
        chain: KeyChain,
        root: int,
        request_id: str,
        limit: int,
        worst: Fidelity,
        hint: RequestHint,
        *,
        counted: bool,
    ) -> Match:
        limit = min(limit, chain.num_blocks)
        self.refresh_if_stale()
        pins: list[tuple[Tier, int]] = []
        try:
            segments, covered, reason = self._match_tiers(chain, root, limit, worst, hint, pins, counted)
        except BaseException:
            for tier, row in pins:
                tier.index.unpin(row)
            raise
        if counted:
            self._asked.add(limit, covered)
        if counted and covered < limit:
            self.ledger.add(MANAGER, Event.MISS, limit - covered, reason=reason)
        with self.flow.stages(MANAGER, "match_lease"):
            lease = self.leases.open(request_id, pins, self._usage(chain, limit, covered) if counted else None)
            self.flow.settle()
        tokens = covered * chain.identity.block_tokens
        stored = not all(self._in_slots(segment) for segment in segments)
        view = view_of(chain, covered) if stored else None
        return Match(request_id, covered, tokens, tuple(segments), reason, lease, root, view)

    def _in_slots(self, segment: Segment) -> bool:
        """Whether *segment* can be copied from where it is."""
        tier = self.tiers[segment.tier]
        return tier.store.memory is not None and bool(tier.ready(segment.rows).all())

    def _usage(self, chain: KeyChain, limit: int, covered: int) -> Usage:
        """Of a request's *limit* blocks, *covered* were found; the others count as history where they were seen."""
        missed = chain.keys[covered:limit]
        return Usage(covered + (self.seen.leading(missed) if self.seen is not None and len(missed) else 0), covered)

    def refresh_if_stale(self) -> Ticket | None:
        """Begin to learn what other processes have stored, where the last look is old; None when there is no need."""
        ticket = None
        for tier in self.tiers:
            if not isinstance(tier, LastingTier) or not tier.begin_refresh(self.flow.settings.refresh_s):
                continue
            ticket = self.flow.io.submit(Lane.LOAD, tier.refresh)
            if ticket is None:
                tier.refreshing = False
            self.forget_idle_roots()
        return ticket

    def forget_idle_roots(self) -> None:
        """Where roots have become many, forget those that no model and no block stands on."""
        roots = self.flow.roots
        if roots.crowded:
            asked, used = roots.asked, set[int]()
            for tier in (
                *self.tiers,
                *self.tiers[:-1],
            ):  # a block on its way up leaves the lower tier after it has come
                used |= tier.index.roots()
            roots.forget(used, asked)

    def _match_tiers(
        self,
        chain: KeyChain,
        root: int,
        limit: int,
        worst: Fidelity,
        hint: RequestHint,
        pins: list[tuple[Tier, int]],
        counted: bool,
    ) -> tuple[list[Segment], int, str]:
        """Ask one tier after the other; what is pinned is in *pins* also when a later one fails."""
        segments: list[Segment] = []
        covered, reason = 0, ""
        for number, tier in enumerate(self.tiers):
            if covered == limit:
                break
            with self.flow.stages(tier.name, "match_find"):
                found = tier.index.match(chain, root, limit, worst, hint)
            served = max(len(found.rows) - covered, 0)
            if counted:
                tier.asked.add(limit - covered, served)
                if covered + served < limit:
                    tier.count(Event.MISS, limit - covered - served, found.reason)
            reason = found.reason
            if served:
                chain.found_fidelity = max(chain.found_fidelity, int(pick(tier.index.fidelity, found.rows).max()))
                segments.append(Segment(number, covered, found.rows[covered:]))
                pins.append((tier, int(found.rows[-1])))
                self.flow.used(number, found.rows)
                covered += served
            elif len(found.rows):
                tier.index.unpin(int(found.rows[-1]))
        return segments, covered, reason

    def prefetch(self, chain: KeyChain, root: int, wait_s: float | None = None) -> Ticket | None:
        """Start to bring what slower tiers hold of *chain* to a faster one, and what none has from the remote level.

        *wait_s*: what the caller would wait at most for the remote level.  None when there is nothing to do.
        """
        local, covered = self._prefetch_local(chain, root)
        if self.flow.remote is None:
            return local
        outside = self.flow.remote.ask(view_of(chain, chain.num_blocks), root, covered, local, wait_s)
        tickets = [ticket for ticket in (local, outside) if ticket is not None]
        return Joint(tickets) if tickets else None

    def _prefetch_local(self, chain: KeyChain, root: int) -> tuple[Ticket | None, int]:
        """What is on its way from slower tiers, and how many blocks the tiers have together."""
        request_id = f"prefetch-{next(self._prefetches)}"
        match = self._lease(chain, root, request_id, chain.num_blocks, self.worst, NO_HINT, counted=False)
        deeper = self._deeper(match)
        # Entered, so that the lease cannot grow too old while the work waits for a thread.
        lease = self.leases.enter(request_id, match.lease) if deeper else None

        def end() -> None:
            if lease is not None:
                self.leases.leave(lease)
            self.leases.release(request_id)
            self.flow.settle()

        if lease is None:
            end()
            return None, match.blocks
        threads = max(self.flow.settings.io_threads - 1, 1)
        return Prefetch(self.flow, match, deeper, end).start(threads), match.blocks

    def _deeper(self, match: Match) -> list[Segment]:
        """What the engine would have to wait for: what is below the first tier, and what is encoded there."""
        found = []
        for segment in match.segments:
            rows = segment.rows if segment.tier else segment.rows[~self.tiers[0].ready(segment.rows)]
            if len(rows):
                found.append(replace(segment, rows=rows))
        return found


def view_of(chain: KeyChain, blocks: int) -> ChainView:
    """The leading *blocks* of *chain* as they are now."""
    return ChainView(
        root_key=chain.root,
        identity_digest=chain.identity.digest,
        keys=chain.keys[:blocks],
        token_blocks=chain.token_blocks[:blocks],
        extras=chain.extras[:blocks],
        memo={},
    )
