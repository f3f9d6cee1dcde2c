"""The tiers of one manager, the fastest first, and the verbs over them.

Decide here, move there: the indexes decide under their locks and hand out rows; the mover copies without any lock.

* Each tier is closed under prefix, so tier t serves the blocks [covered by faster tiers, its own run).
* What is saved goes to the first tier at once, and from there to the next by background jobs (write-behind), ancestors
  first; so eviction of a block that is already below is a drop.
* A job pins the chain it copies until it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from ..block.envelope import Fidelity
from ..block.key import KeyChain
from ..block.plan import Match, Segment
from ..block.spec import BlockSpec
from ..errors import ClosedError, ConfigError
from ..memory.region import BlockPositions, Region
from ..policy.base import RequestHint
from .flow import Flow, FlowSettings
from .io import Lane, Ticket
from .lease import LeaseBook
from .ledger import MANAGER, Event, Ledger
from .mover import Mover
from .table import Keys, Rows
from .tier import Tier


class TierChain:
    """The verbs of the cache over an ordered list of tiers.

    Parameters
    ----------
    tiers:
        The fastest first, unopened.
    on_error:
        Called with whatever a background job raised.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: FlowSettings,
        ledger: Ledger,
        clock: Callable[[], float],
        on_error: Callable[[Exception], None],
    ) -> None:
        assert tiers, "a chain needs a tier"
        self.tiers = list(tiers)
        self.flow = Flow(self.tiers, settings, on_error)
        self.ledger = ledger
        self.mover = Mover()
        self.leases = LeaseBook(settings.lease_max_age_s, clock, self._count_expired)
        self._spec: BlockSpec | None = None
        self._open_lock = threading.Lock()
        self._closed = False

    # -- open and close -----------------------------------------------------------------------------------------------

    def open(self, spec: BlockSpec) -> None:
        """Allocate every tier for blocks of *spec*; a second geometry is a ConfigError."""
        with self._open_lock:
            if self._closed:
                raise ClosedError("this manager is closed; make a new one")
            if self._spec is not None:
                self._check_same_geometry(self._spec, spec)
                return
            opened: list[Tier] = []
            try:
                for tier in self.tiers:
                    opened.append(tier)
                    tier.open(spec)
            except BaseException:
                for tier in opened:
                    tier.close()
                raise
            self._spec = spec

    @staticmethod
    def _check_same_geometry(opened: BlockSpec, spec: BlockSpec) -> None:
        same = (opened.payload_bytes, opened.block_tokens) == (spec.payload_bytes, spec.block_tokens)
        if not same:
            raise ConfigError(
                f"this manager holds blocks of {opened.block_tokens} tokens and {opened.payload_bytes:,} bytes; a "
                f"model with blocks of {spec.block_tokens} tokens and {spec.payload_bytes:,} bytes needs its own"
            )

    @property
    def is_open(self) -> bool:
        """Whether tiers are allocated and not closed."""
        return self._spec is not None and not self._closed

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for background work; False when *timeout* seconds were not enough."""
        return self.flow.io.wait(timeout)

    def close(self) -> None:
        """Stop intake, end background work, free everything; idempotent."""
        with self._open_lock:
            if self._closed:
                return
            self._closed = True
        self.flow.io.close()
        self.mover.drain()
        self.leases.clear()
        for tier in self.tiers:
            tier.close()

    # -- match and load -----------------------------------------------------------------------------------------------

    def peek(self, chain: KeyChain) -> int:
        """Leading blocks of *chain* that some tier holds, by key alone."""
        return max(tier.index.peek(chain) for tier in self.tiers) if self.is_open else 0

    def match(
        self, chain: KeyChain, root: int, request_id: str, limit: int, worst: Fidelity, hint: RequestHint
    ) -> Match:
        """The verified leading run of at most *limit* blocks, leased to *request_id*."""
        limit = min(limit, chain.num_blocks)
        segments: list[Segment] = []
        pins: list[tuple[Tier, int]] = []
        covered, reason = 0, ""
        for number, tier in enumerate(self.tiers):
            if covered == limit:
                break
            found = tier.index.match(chain, root, limit, worst, hint)
            served = max(len(found.rows) - covered, 0)
            tier.count(Event.ASKED, limit - covered)
            tier.count(Event.HIT, served)
            tier.count(Event.MISS, limit - covered - served, found.reason)
            reason = found.reason
            if served:
                segments.append(Segment(number, covered, found.rows[covered:]))
                pins.append((tier, int(found.rows[-1])))
                covered += served
            elif len(found.rows):
                tier.index.unpin(int(found.rows[-1]))
        self.ledger.add(MANAGER, Event.ASKED, limit)
        self.ledger.add(MANAGER, Event.HIT, covered)
        if covered < limit:
            self.ledger.add(MANAGER, Event.MISS, limit - covered, reason=reason)
        lease = self.leases.open(request_id, pins)
        tokens = covered * chain.identity.block_tokens
        return Match(request_id, covered, tokens, tuple(segments), reason, lease)

    def load(self, match: Match, region: Region, positions: BlockPositions) -> int:
        """Copy the matched blocks to *positions* of the engine's tensors; returns the leading blocks copied.

        *positions* describe the blocks from number 0 of the match on, and may be fewer than it has.
        """
        lease = self.leases.enter(match.request_id, match.lease)
        if lease is None:
            self.ledger.add(MANAGER, Event.LOAD_FAILED, match.blocks, reason="lease_gone")
            return 0
        try:
            return self._load_segments(match, region, positions)
        finally:
            self.leases.leave(lease)

    def _load_segments(self, match: Match, region: Region, positions: BlockPositions) -> int:
        loaded = 0
        for segment in match.segments:
            tier = self.tiers[segment.tier]
            rows = segment.rows[: len(positions) - loaded]
            sound = tier.sound(rows, self.flow.settings.integrity)
            if sound < len(rows):
                tier.count(Event.LOAD_FAILED, len(rows) - sound, "checksum")
                tier.count(Event.DROPPED, tier.index.drop(rows[sound : sound + 1]), "checksum")
            self.mover.scatter(tier, rows[:sound], region, positions[loaded : loaded + sound])
            tier.count(Event.LOADED, sound)
            loaded += sound
            if sound:
                self.flow.promote(segment.tier, int(rows[sound - 1]))
            if sound < len(segment.rows):
                break
        return loaded

    def release(self, request_id: str, output_tokens: int = 0) -> bool:
        """Give back what a request holds, saying how much it generated; False when it holds nothing (any more)."""
        return self.leases.release(request_id, output_tokens)

    # -- save ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        chain: KeyChain,
        root: int,
        region: Region,
        positions: BlockPositions,
        first: int,
        fidelity: Fidelity,
        hint: RequestHint,
    ) -> int:
        """Store blocks *first* .. of *chain*, which are at *positions* of the engine's tensors, where missing."""
        tier = self.tiers[0]
        layout = self.mover.layout_code(region.tag)
        reservation = tier.index.reserve(chain, root, first, len(positions), fidelity, layout, hint)
        self.flow.count_reservation(0, reservation, len(positions))
        rows = reservation.rows
        if not len(rows):
            return 0
        start = reservation.first - first
        self._fill(
            tier, rows, hint, lambda: self.mover.gather(tier, rows, region, positions[start : start + len(rows)])
        )
        return len(rows)

    def _fill(self, tier: Tier, rows: Rows, hint: RequestHint, copy: Callable[[], None]) -> None:
        """Fill reserved *rows* by *copy*, commit them, and send them on; give them back when the copy fails."""
        try:
            copy()
            tier.seal(rows, self.flow.settings.integrity)
        except BaseException:
            tier.index.abort(rows)
            tier.count(Event.NOT_STORED, len(rows), "copy_failed")
            raise
        tip = int(rows[-1])
        tier.index.pin(tip)
        tier.count(Event.STORED, tier.index.commit(rows, hint))
        self.flow.send_down(self.tiers.index(tier), tip)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def prefetch(self, chain: KeyChain, root: int) -> Ticket | None:
        """Start to bring what slower tiers hold of *chain* to the first tier; None when there is nothing to do."""
        present = self.tiers[0].index.peek(chain)
        for number, tier in enumerate(self.tiers[1:], 1):
            found = tier.index.match(chain, root, chain.num_blocks)
            if not len(found.rows):
                continue
            tip = int(found.rows[-1])
            ticket = self.flow.promote(number, tip) if len(found.rows) > present else None
            tier.index.unpin(tip)
            if ticket is not None:
                return ticket
        return None

    def evict(self, blocks: int, number: int = 0) -> int:
        """Let up to *blocks* blocks leave tier *number* by policy; returns how many did."""
        tier = self.tiers[number]
        below = self.tiers[number + 1] if number + 1 < len(self.tiers) else None
        keys = tier.index.evict(blocks)
        tier.count_evicted(keys, below)
        return len(keys)

    def drop(self, chain: KeyChain, first: int = 0, reason: str = "asked") -> int:
        """Drop the blocks of *chain* from number *first* on, and all that was built on them, from every tier."""
        dropped = 0
        for tier in self.tiers:
            rows = tier.index.rows_of(chain.keys[first:])
            gone = tier.index.drop(rows[rows >= 0])
            tier.count(Event.DROPPED, gone, reason)
            dropped += gone
        return dropped

    def drop_unshared(self, keys: Keys, reason: str) -> int:
        """Drop the blocks of *keys* ``[n, 2]`` that nothing else is built on or holds, from every tier."""
        if not self.is_open:
            return 0
        dropped = self._drop_leaves(keys, reason)
        if len(self.tiers) > 1:  # what is on its way down now arrives before this runs
            self.flow.io.submit(Lane.STORE, partial(self._drop_leaves, keys, reason))
        return dropped

    def _drop_leaves(self, keys: Keys, reason: str) -> int:
        dropped = 0
        for tier in self.tiers:
            gone = tier.index.drop_unshared(tier.index.rows_of(keys))
            tier.count(Event.DROPPED, gone, reason)
            dropped += gone
        return dropped

    def clear(self, reason: str) -> None:
        """Drop every block from every tier."""
        self.flow.io.wait()
        for tier in self.tiers:
            if tier.is_open:
                tier.count(Event.DROPPED, tier.index.clear(), reason)

    def check(self) -> list[str]:
        """Violated invariants of indexes and ledger, as sentences."""
        problems = []
        for tier in self.tiers:
            if not tier.is_open:
                continue
            problems += [f"tier {tier.name}: {sentence}" for sentence in tier.index.check()]
            asked, hit, miss = (self.ledger.total(e, tier.name).blocks for e in (Event.ASKED, Event.HIT, Event.MISS))
            if asked != hit + miss:
                problems.append(f"tier {tier.name}: asked {asked} blocks, but hits {hit} + misses {miss}")
            stored, evicted, dropped = (
                self.ledger.total(e, tier.name).blocks for e in (Event.STORED, Event.EVICTED, Event.DROPPED)
            )
            if stored != tier.index.ready + evicted + dropped:
                problems.append(
                    f"tier {tier.name}: stored {stored} blocks, but holds {tier.index.ready}, evicted {evicted} and "
                    f"dropped {dropped}"
                )
        return problems

    def _count_expired(self) -> None:
        self.ledger.add(MANAGER, Event.LEASE_EXPIRED)
