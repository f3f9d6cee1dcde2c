"""Copying matched blocks to an engine's tensors, out of memory or by way of it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from msgspec.structs import replace

from ..block.plan import LoadPlan, Match, Segment
from ..memory.region import BlockPositions, Region
from .fetch import Fetch
from .flow import Flow
from .lease import LeaseBook
from .ledger import MANAGER, Event, Ledger
from .mover import Mover
from .table import Rows, pick
from .tier import Tier
from .values import leading, runs


class Loading:
    """The verb *load* over the tiers of a chain."""

    def __init__(self, tiers: Sequence[Tier], flow: Flow, leases: LeaseBook, mover: Mover, ledger: Ledger) -> None:
        self.tiers = tiers
        self.flow = flow
        self.leases = leases
        self.mover = mover
        self.ledger = ledger

    def load(self, match: Match, region: Region, positions: BlockPositions) -> int:
        """Copy the matched blocks to *positions* of the engine's tensors; returns the leading blocks copied.

        *positions* describe the blocks from number 0 of the match on, and may be fewer than it has.
        """
        lease = self.leases.enter(match.request_id, match.lease)
        if lease is None:
            self.ledger.add(MANAGER, Event.LOAD_FAILED, match.blocks, reason="lease_gone")
            return 0
        try:
            loaded = self._load_segments(match, region, positions)
            lease.usage.served = max(lease.usage.served, loaded)
            return loaded
        finally:
            self.leases.leave(lease)
            self.flow.settle()
            if lease.closed:  # released while it was in use
                self.flow.encode_all_soon()

    def _load_segments(self, match: Match, region: Region, positions: BlockPositions) -> int:
        loaded = 0
        for segment in match.segments:
            tier = self.tiers[segment.tier]
            wanted = min(len(segment.rows), len(positions) - loaded)
            part = positions[loaded : loaded + wanted]
            begun = perf_counter()
            if tier.store.memory is not None:
                got = self._load_memory(match, segment, wanted, region, part)
            else:
                rows = segment.rows[:wanted]
                got = self._load_fetched(match, segment.tier, segment.first, rows, region, part)
            if self.ledger.timed:
                tier.load_times.add(perf_counter() - begun)
            if got:
                tier.loaded.add(got, got * tier.block_bytes)
                loaded += got
            if got < len(segment.rows):
                break
        return loaded

    def _load_memory(
        self, match: Match, segment: Segment, wanted: int, region: Region, positions: BlockPositions
    ) -> int:
        tier = self.tiers[segment.tier]
        rows = segment.rows[:wanted]
        with self.flow.stages(tier.name, "load_verify"):
            sound = tier.sound(rows, self.flow.settings.integrity)
        if sound < len(rows):
            tier.reject(rows[sound:], "checksum")
        if sound:
            sound = self._copy(match, replace(segment, rows=rows[:sound]), region, positions[:sound])
        if sound:
            tier.touched(rows[:sound])
            self.flow.promote(segment.tier, int(rows[sound - 1]))
        return sound

    def _copy(self, match: Match, segment: Segment, region: Region, positions: BlockPositions) -> int:
        """Copy blocks from slots, once those are decoded that are encoded; returns how many leading ones."""
        tier, done = self.tiers[segment.tier], 0
        for first, last, ready in runs(tier.ready(segment.rows)):
            rows, part = segment.rows[first:last], positions[first:last]
            if ready:
                with self.flow.stages(tier.name, "load_copy"):
                    source = tier.slots, tier.payload_offset, tier.slots_of(rows)
                    self.mover.scatter(*source, pick(tier.index.layout, rows), region, part)
                copied = last - first
            else:
                copied = self._load_fetched(match, segment.tier, segment.first + first, rows, region, part)
            done += copied
            if copied < last - first:
                break
        return done

    def _load_fetched(
        self, match: Match, number: int, first: int, rows: Rows, region: Region, positions: BlockPositions
    ) -> int:
        """Have background threads read or decode the blocks *rows* of *match*, from number *first* on, and copy them.

        Waits for them no longer than a load may.
        """
        assert match.chain is not None
        name = self.tiers[number].name

        def use(fetch: Fetch, at: int) -> None:
            landing, good = fetch.landing, fetch.good
            part = positions[at : at + good]
            if good:
                source = landing.memory, landing.payload_offset, landing.slots[:good], landing.codes[:good]
                with self.flow.stages(name, "load_copy"):
                    self.mover.scatter(*source, region, part)

        return self.flow.fetcher(number).fetch(match.chain, match.root, first, rows, use)

    def plan_load(self, match: Match, count: int) -> LoadPlan:
        """Rows of the first tier that hold the leading blocks of *match*, at most *count*, sound and leased.

        They stay where they are while the lease lasts; whoever copies them need not ask again.  Blocks that are encoded
        there end the run, as those in slower tiers do: a prefetch decodes them.
        """
        tier = self.tiers[0]
        segment = match.segments[0] if match.segments else None
        lease = self.leases.find(match.request_id, match.lease)
        if segment is None or segment.tier or lease is None:
            return LoadPlan()
        rows = segment.rows[:count]
        sound = tier.sound(rows, self.flow.settings.integrity)
        if sound < len(rows):
            tier.reject(rows[sound:], "checksum")
        sound = leading(tier.ready(rows[:sound]))
        tier.touched(rows[:sound])
        if sound < len(rows):
            lease.usage.served = min(lease.usage.served, sound)
        tier.count(Event.LOADED, sound)
        return LoadPlan(tier.slots_of(rows[:sound]), tier.index.layout[rows[:sound]])
