"""Movement between tiers: write-behind, promotion and demotion, by background jobs that pin what they copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from .index import Reservation
from .io import IOPool, Lane, Ticket
from .ledger import Event
from .table import Rows
from .tier import Tier


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
    io_threads: int = 1
    """Background threads."""
    max_pending_jobs: int = 256
    """Background jobs that may wait in each lane."""


class Flow:
    """Moves chains of blocks between the tiers of one manager.

    What is saved in a tier is copied to the next (write-behind), ancestors first, so that eviction of a block that is
    already below is a drop.  What is used in a slower tier is copied to the first.  Lanes are bounded: what does not
    fit is counted and left where it is.
    """

    def __init__(self, tiers: Sequence[Tier], settings: FlowSettings, on_error: Callable[[Exception], None]) -> None:
        self.tiers = tiers
        self.settings = settings
        self.io = IOPool(settings.io_threads, settings.max_pending_jobs, on_error)

    def count_reservation(self, number: int, reservation: Reservation, asked: int) -> None:
        tier = self.tiers[number]
        below = self.tiers[number + 1] if number + 1 < len(self.tiers) else None
        tier.count_evicted(reservation.evicted, below)
        tier.count(Event.DROPPED, reservation.replaced, "replaced")
        tier.count(Event.NOT_STORED, reservation.wanted - len(reservation.rows), reservation.reason)
        if reservation.reason == "parent_absent":
            tier.count(Event.NOT_STORED, asked, reservation.reason)
        else:
            tier.count(Event.DUPLICATE, asked - reservation.wanted)

    def send_down(self, number: int, tip: int) -> None:
        """Copy the chain that ends in *tip* one tier down, in the background; takes over one pin of *tip*."""
        tier = self.tiers[number]
        if number + 1 == len(self.tiers):
            tier.index.unpin(tip)
            return
        job = partial(self._copy_chain, number, tip, number + 1, Event.DEMOTED)
        if self.io.submit(Lane.STORE, job) is None:
            tier.index.unpin(tip)
            self.tiers[number + 1].count(Event.NOT_STORED, 1, "queue_full")
        self._demote_if_full(number)

    def promote(self, number: int, tip: int) -> Ticket | None:
        """Copy the chain that ends in *tip*, which the caller holds, to the first tier in the background."""
        if number == 0:
            return None
        tier = self.tiers[number]
        tier.index.pin(tip)
        ticket = self.io.submit(Lane.LOAD, partial(self._copy_chain, number, tip, 0, Event.PROMOTED))
        if ticket is None:
            tier.index.unpin(tip)
        return ticket

    def _copy_chain(self, source_number: int, tip: int, target_number: int, event: Event) -> None:
        """Make the chain that ends in the pinned row *tip* present in another tier, then unpin it."""
        source, target = self.tiers[source_number], self.tiers[target_number]
        try:
            chain = source.index.stored_chain(tip)
            reservation = target.index.reserve(chain, chain.root, 0, chain.num_blocks, chain.fidelity, chain.layout)
            self.count_reservation(target_number, reservation, reservation.wanted)
            rows = reservation.rows
            if len(rows):
                source_rows = chain.rows[reservation.first : reservation.first + len(rows)]
                self._fill_from_tier(source, source_rows, target, rows)
                target.count(event, len(rows))
                if event is Event.DEMOTED:
                    self.send_down(target_number, int(rows[-1]))
                else:
                    target.index.unpin(int(rows[-1]))
        finally:
            source.index.unpin(tip)

    def _fill_from_tier(self, source: Tier, source_rows: Rows, target: Tier, rows: Rows) -> None:
        """Copy pinned rows of one tier into reserved ones of another, commit them, and pin the last."""
        try:
            target.store.write(rows, source.slots, source_rows, source.payload_offset)
            target.index.checksum[rows] = source.index.checksum[source_rows]
        except BaseException:
            target.count(Event.DROPPED, target.index.abort(rows), "copy_failed")
            target.count(Event.NOT_STORED, len(rows), "copy_failed")
            raise
        target.index.pin(int(rows[-1]))
        target.count(Event.STORED, target.index.commit(rows))
        gone = source.index.gone(source_rows)
        if gone < len(rows):  # dropped meanwhile: whoever dropped it could not see the copy yet
            target.count(Event.DROPPED, target.index.drop(rows[gone : gone + 1]), "dropped_above")

    def _demote_if_full(self, number: int) -> None:
        index = self.tiers[number].index
        if index.used > self.settings.demote_at * index.capacity:
            self.io.submit(Lane.STORE, partial(self._demote, number))

    def _demote(self, number: int) -> None:
        """Move the blocks that would leave first one tier down, until the tier is as empty as it should be."""
        tier, below = self.tiers[number], self.tiers[number + 1]
        surplus = tier.index.used - int(self.settings.demote_to * tier.index.capacity)
        if surplus <= 0:
            return
        rows = tier.index.select_victims(surplus)
        try:
            missing = rows[below.index.rows_of(tier.index.keys[rows]) < 0]
            while len(missing):
                tip = int(missing[tier.index.depth[missing].argmax()])
                tier.index.pin(tip)
                covered = tier.index.stored_chain(tip).rows
                self._copy_chain(number, tip, number + 1, Event.DEMOTED)
                missing = missing[~np.isin(missing, covered)]
        except BaseException:  # the tier below is out of order: what it did not get stays here
            for row in rows.tolist():
                tier.index.unpin(row)
            raise
        tier.count_evicted(tier.index.remove_selected(rows), below)
