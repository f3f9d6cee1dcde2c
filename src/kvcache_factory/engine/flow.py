"""Movement between tiers: write-behind, promotion and demotion, by background jobs that pin what they copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ..block.spec import BlockSpec
from ..errors import StoreError
from ..policy.base import NO_HINT, RequestHint
from .copying import copy_part
from .decoding import Decoder
from .demotion import Demotion
from .fetch import Fetcher
from .io import IOPool, Lane, Ticket
from .lasting import LastingTier
from .ledger import Event
from .packed import PackedTier
from .remote import RemoteLevel
from .roots import Roots
from .stages import Stages
from .table import Keys, Rows
from .tier import Ingestion, Tier
from .transit import Transit
from .values import NOT_ADMITTED, StoredChain

ENCODED_AT_ONCE = 16
"""Blocks that one background job encodes in memory."""


class FlowSettings(msgspec.Struct, frozen=True):
    """Settings of the movement between tiers, each with its unit in the name."""

    demote_at: float = 0.95
    """Fill (0..1) of a tier at which background demotion begins."""
    demote_to: float = 0.9
    """Fill (0..1) at which it ends."""
    integrity: str = "off"
    """Verify payloads in memory on load: off, sample (one block in 16) or full."""
    lease_max_age_s: float = 600.0
    """A lease older than this is given back."""
    max_wait_s: float = 2.0
    """Longest time that one load waits for a slower tier."""
    refresh_s: float = 0.2
    """Age of what is known of other processes' blocks at which a look-up has it renewed in the background."""
    io_threads: int = 1
    """Background threads."""
    measure_stages: bool = False
    """Measure the time of each stage of an operation."""
    max_pending_jobs: int = 256
    """Background jobs that may wait in each lane."""


class Flow:
    """Moves chains of blocks between the tiers of one manager.

    What is saved in a tier is copied to the next (write-behind), ancestors first, so that eviction of a block that is
    already below is a drop.  What is used in a slower tier is copied to the first.  Lanes are bounded: what does not
    fit is counted and left where it is.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: FlowSettings,
        roots: Roots,
        on_error: Callable[[Exception], None],
        io: IOPool | None = None,
    ) -> None:
        self.tiers = tiers
        self.settings = settings
        self.roots = roots
        self.demotion = Demotion(self)
        self._encoding = [False] * len(tiers)
        self._encodes = [threading.Lock() for _ in tiers]
        self._transit: Transit | None = None
        self._passing: Transit | None = None
        self._fetchers: dict[int, Fetcher] = {}
        self.remote: RemoteLevel | None = None
        self.stages: Stages
        """What measures the stages of operations."""
        self.io = io or IOPool(settings.io_threads, settings.max_pending_jobs, on_error)
        for tier in tiers:
            tier.policy.use_worker(self._in_background)

    def open(self, spec: BlockSpec) -> None:
        """Prepare for blocks of *spec*."""
        self._transit, self._passing = Transit(spec), Transit(spec)

    def close(self) -> None:
        """End background work and free what it used."""
        self.io.close()
        if self.remote is not None:
            self.remote.close()
        for pool in (self._transit, self._passing):
            if pool is not None:
                pool.close()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for background work; False when *timeout* seconds were not enough."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:  # what moves between tiers may have blocks written outside, and what comes from there moved on
            for io in (self.io, self.remote.io) if self.remote is not None else (self.io,):
                if not io.wait(None if end is None else max(end - time.monotonic(), 0)):
                    return False
            if self.remote is None or (self.io.is_idle and self.remote.io.is_idle):
                return True

    @property
    def transit(self) -> Transit:
        """Slots for blocks that pass through."""
        assert self._transit is not None, "not open"
        return self._transit

    @property
    def passing(self) -> Transit:
        """Slots for blocks that wait for a job; those of :attr:`transit` are waited for, so they must not wait."""
        assert self._passing is not None, "not open"
        return self._passing

    def fetcher(self, number: int) -> Fetcher:
        """What reads blocks of tier *number*, whose store is not memory, into the memory tier above it.

        Where the tier is in memory and encodes: what decodes blocks in it.
        """
        tier = self.tiers[number]
        if number not in self._fetchers and isinstance(tier, PackedTier):
            decoder = Decoder(tier, self.below(number), self.io, self.transit, self.settings.max_wait_s)
            self._fetchers.setdefault(number, decoder)
        elif number not in self._fetchers:
            above = next(t for t in reversed(self.tiers[:number]) if t.store.memory is not None)
            made = Fetcher(tier, above, self.io, self.transit, self.settings.max_wait_s)
            self._fetchers.setdefault(number, made)
        return self._fetchers[number]

    def known_fetcher(self, number: int) -> Fetcher | None:
        """What reads blocks of tier *number*, if it was needed so far."""
        return self._fetchers.get(number)

    @property
    def abandoned_reads(self) -> int:
        """Blocks whose reads nobody waits for any more, but which have not ended."""
        return sum(fetcher.abandoned for fetcher in list(self._fetchers.values()))

    def below(self, number: int) -> Tier | None:
        """The tier below tier *number*."""
        return self.tiers[number + 1] if number + 1 < len(self.tiers) else None

    def stored(self, number: int, tip: int, blocks: int, hint: RequestHint = NO_HINT) -> None:
        """*blocks* new blocks, up to the row *tip*, are in tier *number*; takes over one pin of *tip*.

        0 blocks: they came from the remote level, which need not have them again.
        """
        if self.remote is not None:
            self.remote.stored(number, tip, blocks)
        below = self.below(number)
        if below is not None and below.ingestion == Ingestion.ALL:
            self._send_down(number, tip, hint)
        else:
            self.tiers[number].index.unpin(tip)
        self.encode_soon(number)
        self.demotion.begin_if_full(number)

    def encode_all_soon(self) -> None:
        """As :meth:`encode_soon`, for every tier."""
        for number in range(len(self.tiers)):
            self.encode_soon(number)

    def encode_soon(self, number: int) -> None:
        """Encode, in the background, what tier *number* has that its rule says is to be encoded by now.

        Decoded copies that nobody holds any more go, too.
        """
        tier = self.tiers[number]
        if isinstance(tier, PackedTier) and tier.is_open and not self._encoding[number]:
            self._encoding[number] = True
            if self.io.submit(Lane.STORE, partial(self._encode, number)) is None:
                self._encoding[number] = False

    def _encode(self, number: int) -> None:
        """A few blocks at a time, so that copies that wait in the lane are not held up.

        One job at a time: of two, each would hold the blocks that the other is about to encode.
        """
        tier = self.tiers[number]
        assert isinstance(tier, PackedTier)
        with self._encodes[number]:
            self._encoding[number] = False  # only now: no more than one job may wait for this one
            tier.fold()
            if tier.rule.when_full and tier.surplus(self.settings.demote_at) <= 0:
                return
            rows = tier.candidates(ENCODED_AT_ONCE)
            again = tier.encode(rows) and len(rows) == ENCODED_AT_ONCE
        if again:
            self.encode_soon(number)

    def used(self, number: int, rows: Rows) -> None:
        """A request has hit *rows*, the leading blocks of a chain, in tier *number*; it holds them."""
        if self.remote is not None:
            self.remote.used(number, rows)
        tier, below = self.tiers[number], self.below(number)
        tier.touched(rows)
        if below is None or below.ingestion != Ingestion.HOT:
            return
        hot = rows[tier.index.hits[rows] >= below.hot_hits]
        if len(hot) and below.index.rows_of(tier.index.keys[hot[-1:]])[0] < 0:
            tier.index.pin(int(hot[-1]))
            self._send_down(number, int(hot[-1]))

    def _in_background(self, job: Callable[[], None]) -> bool:
        return self.io.submit(Lane.STORE, job) is not None

    def settle(self) -> None:
        """Have stores let go, in the background, of what requests held until now."""
        for tier in self.tiers:
            if tier.is_open and tier.index.in_limbo:
                self.io.submit(Lane.STORE, tier.settle)

    def _send_down(self, number: int, tip: int, hint: RequestHint = NO_HINT) -> None:
        """Copy the chain that ends in *tip* one tier down, in the background; takes over one pin of *tip*."""
        job = partial(self._copy_whole, number, tip, hint)
        if self.io.submit(Lane.STORE, job) is None:
            self.tiers[number].index.unpin(tip)
            self.tiers[number + 1].count(Event.NOT_STORED, 1, "queue_full")

    def _copy_whole(self, number: int, tip: int, hint: RequestHint) -> None:
        """Copy a chain down, once nobody writes to it any more.

        What lies behind blocks that are being written would not be copied: neither now, nor by the job that follows
        their end, which knows nothing of it.
        """
        again = partial(self._send_down, number, tip, hint)
        if not self.tiers[number].index.when_whole(tip, again):
            self.copy_chain(number, tip, number + 1, Event.DEMOTED, hint)

    def promote(self, number: int, tip: int) -> Ticket | None:
        """Copy the chain that ends in *tip*, which the caller holds, to the first tier in the background."""
        if number == 0:
            return None
        tier = self.tiers[number]
        tier.index.pin(tip)
        ticket = self.io.submit(Lane.LOAD, partial(self.copy_chain, number, tip, 0, Event.PROMOTED))
        if ticket is None:
            tier.index.unpin(tip)
        return ticket

    def copy_down(self, number: int, key: Keys, target_number: int) -> None:
        """Make the chain that ends in the block of *key* ``[1, 2]`` in tier *number*, if it is there, present in
        another."""
        tip = self.tiers[number].index.hold(key)
        if tip >= 0:
            self.copy_chain(number, tip, target_number, Event.DEMOTED)

    def copy_chain(
        self, source_number: int, tip: int, target_number: int, event: Event, hint: RequestHint = NO_HINT
    ) -> None:
        """Make the chain that ends in the pinned row *tip* present in another tier, then unpin it.

        What a tier does not admit on its way down goes on to the next.  What the copy held can be encoded after it.
        """
        source, target = self.tiers[source_number], self.tiers[target_number]
        try:
            chain = source.index.stored_chain(tip, self.roots)
            if isinstance(target, LastingTier):
                target.encode_aged(chain, partial(self._copy_again, source, chain, target))
            reservation = target.reserve(chain, chain.root, 0, chain.num_blocks, chain.fidelity, chain.layout, hint)
            target.count_left(reservation, self.below(target_number))
            if len(reservation.rows):
                part = slice(reservation.first, reservation.first + len(reservation.rows))
                with target.timing("demote" if event is Event.DEMOTED else "promote"):
                    self._fill(source, chain, part, target, reservation.rows, event, hint)
                if event is Event.DEMOTED:
                    self.stored(target_number, int(reservation.rows[-1]), len(reservation.rows), hint)
                else:
                    target.index.unpin(int(reservation.rows[-1]))
            further = target_number + 1
            if reservation.reason == NOT_ADMITTED and event is Event.DEMOTED and further < len(self.tiers):
                source.index.pin(tip)
                self.copy_chain(source_number, tip, further, event, hint)
        finally:
            source.index.unpin(tip)
            source.settle()
            target.settle()
            self.encode_soon(source_number)

    def _copy_again(self, source: Tier, chain: StoredChain, target: Tier, part: slice, rows: Rows) -> int:
        try:
            return copy_part(source, chain, part, target, rows, self.transit)
        except StoreError as error:
            if error.reason != "full":
                raise
            return 0

    def _fill(
        self,
        source: Tier,
        chain: StoredChain,
        part: slice,
        target: Tier,
        rows: Rows,
        event: Event,
        hint: RequestHint,
    ) -> None:
        """Copy blocks into reserved *rows* of another tier, commit what was copied, and pin the last of *rows*."""
        source_rows = chain.rows[part]

        def write() -> int:
            target.index.checksum[rows] = source.known_sums(source_rows)
            target.index.codings[rows] = chain.codings[part]
            return copy_part(source, chain, part, target, rows, self.transit)

        written = self.place(target, rows, write, event, hint)
        copied = source_rows[:written]
        gone = source.index.gone(copied)
        if gone < written:  # dropped meanwhile: whoever dropped it could not see the copy yet
            target.index.wipe[rows[gone:written]] = source.index.wipe[copied[gone:]]
            target.drop(rows[gone : gone + 1], "dropped_above")

    def place(
        self,
        target: Tier,
        rows: Rows,
        write: Callable[[], int],
        event: Event | None = None,
        hint: RequestHint = NO_HINT,
    ) -> int:
        """Have *write* fill reserved *rows*, commit as many leading ones as it says, and pin the last of *rows*."""
        written, failed, reason = 0, True, "copy_failed"
        try:
            written = write()
            failed = False
        except StoreError as error:
            reason = error.reason
            failed = reason != "full"  # somebody else was quicker to take what was free: that is no failure
            if failed:
                raise
        finally:
            target.index.pin(int(rows[-1]))
            committed = target.index.commit(rows[:written], hint)
            target.abort(rows[written:])
            target.count(Event.STORED, committed)
            if event is not None:
                target.count(event, committed)
            target.count(Event.NOT_STORED, len(rows) - written, reason)
            if failed:
                target.index.unpin(int(rows[-1]))
            target.settle()
        return written
