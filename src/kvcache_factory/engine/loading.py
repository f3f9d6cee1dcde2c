"""Copying matched blocks to an engine's tensors, out of memory or by way of it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..block.plan import LoadPlan, Match, Segment
from ..memory.region import BlockPositions, Region
from .fetch import Fetch
from .flow import Flow
from .lease import LeaseBook
from .ledger import MANAGER, Event, Ledger
from .mover import Mover
from .packed import PackedTier
from .table import Rows, pick
from .tier import Tier
from .values import runs


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

    def _load_segments(self, match: Match, region: Region, positions: BlockPositions) -> int:
        loaded = 0
        for segment in match.segments:
            tier = self.tiers[segment.tier]
            wanted = min(len(segment.rows), len(positions) - loaded)
            part = positions[loaded : loaded + wanted]
            begun = perf_counter()
            if tier.store.memory is not None:
                got = self._load_memory(segment, wanted, region, part)
            else:
                got = self._load_stored(match, segment, wanted, region, part)
            if self.ledger.timed:
                tier.load_times.add(perf_counter() - begun)
            if got:
                tier.loaded.add(got, got * tier.block_bytes)
                loaded += got
            if got < len(segment.rows):
                break
        return loaded

    def _load_memory(self, segment: Segment, wanted: int, region: Region, positions: BlockPositions) -> int:
        tier = self.tiers[segment.tier]
        rows = segment.rows[:wanted]
        with self.flow.stages(tier.name, "load_verify"):
            sound = tier.sound(rows, self.flow.settings.integrity)
        if sound < len(rows):
            tier.reject(rows[sound:], "checksum")
        rows = rows[:sound]
        if sound:
            with self.flow.stages(tier.name, "load_copy"):
                sound = self._scatter(tier, rows, region, positions[:sound])
        if sound:
            tier.touched(rows[:sound])
            self.flow.promote(segment.tier, int(rows[sound - 1]))
        return sound

    def _scatter(self, tier: Tier, rows: Rows, region: Region, positions: BlockPositions) -> int:
        """Copy the blocks of *rows*, by way of transit slots where they are encoded; returns how many leading ones."""
        done = 0
        for first, last, whole in runs(tier.whole(rows)):
            while first < last:
                part = rows[first:last]
                if whole:
                    copied = last - first
                    source = tier.slots, tier.payload_offset, tier.slots_of(part)
                    self.mover.scatter(*source, pick(tier.index.layout, part), region, positions[first:last])
                else:
                    copied = self._scatter_encoded(tier, part, region, positions[first:last])
                done += copied
                first += copied
                if not copied:
                    tier.reject(part, "codec")
                    return done
        return done

    def _scatter_encoded(self, tier: Tier, rows: Rows, region: Region, positions: BlockPositions) -> int:
        assert isinstance(tier, PackedTier)
        transit = self.flow.transit
        slots = transit.take(len(rows), wait=True)
        try:
            offset = transit.spec.header_bytes
            good = tier.copy_payloads(rows[: len(slots)], transit.memory, slots, offset)
            if good:
                codes = tier.index.layout[rows[:good]]
                self.mover.scatter(transit.memory, offset, slots[:good], codes, region, positions[:good])
            return good
        finally:
            transit.give_back(slots)

    def _load_stored(
        self, match: Match, segment: Segment, wanted: int, region: Region, positions: BlockPositions
    ) -> int:
        assert match.chain is not None

        def use(fetch: Fetch, at: int) -> None:
            landing, good = fetch.landing, fetch.good
            part = positions[at : at + good]
            if good:
                source = landing.memory, landing.payload_offset, landing.slots[:good], landing.codes[:good]
                with self.flow.stages(name, "load_copy"):
                    self.mover.scatter(*source, region, part)

        fetcher, name = self.flow.fetcher(segment.tier), self.tiers[segment.tier].name
        return fetcher.fetch(match.chain, match.root, segment.first, segment.rows[:wanted], use)

    def plan_load(self, match: Match, count: int) -> LoadPlan:
        """Rows of the first tier that hold the leading blocks of *match*, at most *count*, sound and leased.

        They stay where they are while the lease lasts; whoever copies them need not ask again.
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
        if isinstance(tier, PackedTier):
            sound = tier.make_whole(rows[:sound])
        tier.touched(rows[:sound])
        if sound < len(rows):
            lease.usage.served = min(lease.usage.served, sound)
        tier.count(Event.LOADED, sound)
        return LoadPlan(tier.slots_of(rows[:sound]), tier.index.layout[rows[:sound]])
