"""The tiers of one manager, the fastest first, and the verbs over them.

Decide here, move there: the indexes decide under their locks and hand out rows; the mover copies without any lock.

* Each tier is closed under prefix, so tier t serves the blocks [covered by faster tiers, its own run).
* What is saved goes to the first tier at once, and from there to the next by background jobs (write-behind), ancestors
  first; so eviction of a block that is already below is a drop.
* A job pins the chain it copies until it has ended.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..block.envelope import Fidelity
from ..block.key import KeyChain
from ..block.plan import ChainView, LoadPlan, Match, SavePlan, Segment
from ..block.spec import BlockSpec, Layout
from ..errors import ClosedError, ConfigError
from ..memory.region import BlockPositions, Region
from ..policy.base import NO_HINT, RequestHint
from .fetch import Fetch
from .flow import Flow, FlowSettings
from .io import IOPool, Lane, Ticket
from .lasting import LastingTier
from .lease import LeaseBook
from .ledger import MANAGER, Event, Ledger
from .mover import Mover
from .prefetch import Prefetch
from .roots import Roots
from .table import Keys
from .tier import Tier


class TierChain:
    """The verbs of the cache over an ordered list of tiers.

    Parameters
    ----------
    tiers:
        The fastest first, unopened.
    on_error:
        Called with whatever a background job raised.
    io:
        Who runs background jobs; by default threads of its own.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: FlowSettings,
        roots: Roots,
        ledger: Ledger,
        clock: Callable[[], float],
        on_error: Callable[[Exception], None],
        io: IOPool | None = None,
    ) -> None:
        assert tiers, "a chain needs a tier"
        self.tiers = list(tiers)
        self.roots = roots
        self.flow = Flow(self.tiers, settings, self.roots, on_error, io)
        self.ledger = ledger
        self.mover = Mover()
        self.leases = LeaseBook(settings.lease_max_age_s, clock, self._count_expired)
        self._spec: BlockSpec | None = None
        self._open_lock = threading.Lock()
        self._closed = False
        self._prefetches = itertools.count()

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
            self.flow.open(spec)
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
        self.flow.close()
        self.mover.close()
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
            self.ledger.add(MANAGER, Event.ASKED, limit)
            self.ledger.add(MANAGER, Event.HIT, covered)
        if counted and covered < limit:
            self.ledger.add(MANAGER, Event.MISS, limit - covered, reason=reason)
        lease = self.leases.open(request_id, pins)
        self.flow.settle()
        tokens = covered * chain.identity.block_tokens
        stored = any(self.tiers[segment.tier].store.memory is None for segment in segments)
        view = self._view(chain, covered) if stored else None
        return Match(request_id, covered, tokens, tuple(segments), reason, lease, root, view)

    @staticmethod
    def _view(chain: KeyChain, blocks: int) -> ChainView:
        return ChainView(
            root_key=chain.root,
            identity_digest=chain.identity.digest,
            keys=chain.keys[:blocks],
            token_blocks=chain.token_blocks[:blocks],
            extras=chain.extras[:blocks],
            memo={},
        )

    def refresh(self) -> None:
        """Learn now what other processes have stored in shared tiers."""
        for tier in self.tiers:
            if isinstance(tier, LastingTier):
                tier.refresh()

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
        if self.roots.crowded and self.is_open:
            asked, used = self.roots.asked, set[int]()
            for tier in self._tiers_twice():  # a block on its way up leaves the lower tier after it has come
                used |= tier.index.roots()
            self.roots.forget(used, asked)

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
            found = tier.index.match(chain, root, limit, worst, hint)
            served = max(len(found.rows) - covered, 0)
            if counted:
                tier.count(Event.ASKED, limit - covered)
                tier.count(Event.HIT, served)
                tier.count(Event.MISS, limit - covered - served, found.reason)
            reason = found.reason
            if served:
                segments.append(Segment(number, covered, found.rows[covered:]))
                pins.append((tier, int(found.rows[-1])))
                self.flow.used(number, found.rows)
                covered += served
            elif len(found.rows):
                tier.index.unpin(int(found.rows[-1]))
        return segments, covered, reason

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
            self.flow.settle()

    def _load_segments(self, match: Match, region: Region, positions: BlockPositions) -> int:
        loaded = 0
        for segment in match.segments:
            tier = self.tiers[segment.tier]
            wanted = min(len(segment.rows), len(positions) - loaded)
            part = positions[loaded : loaded + wanted]
            if tier.store.memory is not None:
                got = self._load_memory(segment, wanted, region, part)
            else:
                got = self._load_stored(match, segment, wanted, region, part)
            tier.count(Event.LOADED, got)
            loaded += got
            if got < len(segment.rows):
                break
        return loaded

    def _load_memory(self, segment: Segment, wanted: int, region: Region, positions: BlockPositions) -> int:
        tier = self.tiers[segment.tier]
        rows = segment.rows[:wanted]
        sound = tier.sound(rows, self.flow.settings.integrity)
        if sound < len(rows):
            tier.reject(rows[sound:], "checksum")
        rows = rows[:sound]
        if sound:
            codes = tier.index.layout[rows]
            self.mover.scatter(tier.slots, tier.payload_offset, rows, codes, region, positions[:sound])
            self.flow.promote(segment.tier, int(rows[-1]))
        return sound

    def _load_stored(
        self, match: Match, segment: Segment, wanted: int, region: Region, positions: BlockPositions
    ) -> int:
        assert match.chain is not None

        def use(fetch: Fetch, at: int) -> None:
            landing, good = fetch.landing, fetch.good
            part = positions[at : at + good]
            if good:
                self.mover.scatter(
                    landing.memory, landing.payload_offset, landing.slots[:good], landing.codes[:good], region, part
                )

        fetcher = self.flow.fetcher(segment.tier)
        return fetcher.fetch(match.chain, match.root, segment.first, segment.rows[:wanted], use)

    def release(self, request_id: str, output_tokens: int = 0) -> bool:
        """Give back what a request holds, saying how much it generated; False when it holds nothing (any more)."""
        released = self.leases.release(request_id, output_tokens)
        self.flow.settle()
        return released

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
        request_id: str | None = None,
    ) -> int:
        """Store what is missing of the blocks *first* .. of *chain*, which are at *positions* of the engine's tensors.

        The lease of *request_id* holds it too.
        """
        plan = self.plan_save(chain, root, first, len(positions), region.tag, fidelity, hint)
        filled = 0
        try:
            if len(plan.rows):
                start = plan.first - first
                part = positions[start : start + len(plan.rows)]
                self.mover.gather(self.tiers[0], plan.rows, region, part)
                filled = len(plan.rows)
        finally:
            self.finish_save(plan, filled, hint, request_id)
        return filled

    def plan_save(
        self,
        chain: KeyChain,
        root: int,
        first: int,
        count: int,
        tag: Layout,
        fidelity: Fidelity,
        hint: RequestHint,
    ) -> SavePlan:
        """Reserve rows for those of the blocks *first* to *first* + *count* - 1 that are missing.

        Whoever copies them, here or in another process, must end with :meth:`finish_save`.
        """
        tier = self.tiers[0]
        reservation = tier.reserve(chain, root, first, count, fidelity, self.mover.layout_code(tag), hint)
        tier.count_left(reservation, self.flow.below(0))
        if reservation.reason == "parent_absent":
            tier.count(Event.NOT_STORED, count, reservation.reason)
        else:
            tier.count(Event.DUPLICATE, count - reservation.wanted)
        return SavePlan(reservation.first, reservation.rows)

    def finish_save(self, plan: SavePlan, filled: int, hint: RequestHint, request_id: str | None = None) -> None:
        """The leading *filled* rows of *plan* hold their blocks, the lease of *request_id* too; the rest go back."""
        tier = self.tiers[0]
        rows, rest = plan.rows[:filled], plan.rows[filled:]
        if len(rows):
            tier.seal(rows, self.flow.settings.integrity)
            tip = int(rows[-1])
            tier.index.pin(tip)
            tier.count(Event.STORED, tier.index.commit(rows, hint))
            if request_id is not None:
                self.leases.extend(request_id, tier, tip)
            self.flow.stored(0, tip)
        if len(rest):
            tier.abort(rest)
            tier.count(Event.NOT_STORED, len(rest), "copy_failed")

    def plan_load(self, match: Match, count: int) -> LoadPlan:
        """Rows of the first tier that hold the leading blocks of *match*, at most *count*, sound and leased.

        They stay where they are while the lease lasts; whoever copies them need not ask again.
        """
        tier = self.tiers[0]
        segment = match.segments[0] if match.segments else None
        if segment is None or segment.tier or not self.leases.holds(match.request_id, match.lease):
            return LoadPlan()
        rows = segment.rows[:count]
        sound = tier.sound(rows, self.flow.settings.integrity)
        if sound < len(rows):
            tier.reject(rows[sound:], "checksum")
        tier.count(Event.LOADED, sound)
        return LoadPlan(rows[:sound], tier.index.layout[rows[:sound]])

    # -- leaving ------------------------------------------------------------------------------------------------------

    def prefetch(self, chain: KeyChain, root: int) -> Ticket | None:
        """Start to bring what slower tiers hold of *chain* to a faster one; None when there is nothing to do."""
        request_id = f"prefetch-{next(self._prefetches)}"
        match = self._lease(chain, root, request_id, chain.num_blocks, Fidelity.EXACT, NO_HINT, counted=False)
        deeper = [segment for segment in match.segments if segment.tier]
        # Entered, so that the lease cannot grow too old while the work waits for a thread.
        lease = self.leases.enter(request_id, match.lease) if deeper else None

        def end() -> None:
            if lease is not None:
                self.leases.leave(lease)
            self.release(request_id)

        if lease is None:
            end()
            return None
        return Prefetch(self.flow, match, deeper, end).start(max(self.flow.settings.io_threads - 1, 1))

    def evict(self, blocks: int, number: int = 0) -> int:
        """Let up to *blocks* blocks leave tier *number* by policy; returns how many did."""
        tier = self.tiers[number]
        keys = tier.evict(blocks)
        tier.count_evicted(keys, self.flow.below(number))
        return len(keys)

    def drop(self, chain: KeyChain, first: int = 0, reason: str = "asked") -> int:
        """Drop the blocks of *chain* from number *first* on, and all that was built on them, from every tier."""
        dropped = 0
        for tier in self._tiers_twice():
            rows = tier.index.rows_of(chain.keys[first:])
            dropped += tier.drop(rows[rows >= 0], reason)
        return dropped

    def drop_unshared(self, keys: Keys, reason: str, wipe: bool = False) -> int:
        """Drop the blocks of *keys* ``[n, 2]`` that nothing else is built on, from every tier; copies on their way too.

        *wipe*: stores overwrite their bytes.
        """
        if not self.is_open:
            return 0
        return sum(tier.drop_unshared(keys, reason, wipe) for tier in self._tiers_twice())

    def _tiers_twice(self) -> list[Tier]:
        """To look everywhere: a copy that began before the first look ends before the second, or its source is gone."""
        return [*self.tiers, *self.tiers[:-1]]

    def holds(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of *keys* ``[n, 2]`` some tier can find, or is about to."""
        held = np.zeros(len(keys), np.bool_)
        for tier in self.tiers:
            held |= tier.index.knows(keys)
        return held

    def clear(self, reason: str) -> None:
        """Drop every block from every tier."""
        self.flow.io.wait()
        for tier in self.tiers:
            if tier.is_open:
                tier.count(Event.DROPPED, tier.index.clear(), reason)
                tier.settle()

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
            came, left = (
                sum(self.ledger.total(event, tier.name).blocks for event in events)
                for events in ((Event.STORED, Event.FOUND), (Event.EVICTED, Event.DROPPED))
            )
            if came != tier.index.ready + left:
                problems.append(f"tier {tier.name}: {came} blocks came, but {tier.index.ready} are held, {left} left")
        return problems

    def _count_expired(self) -> None:
        self.ledger.add(MANAGER, Event.LEASE_EXPIRED)
