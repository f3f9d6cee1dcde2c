"""Who leaves a tier that becomes full, and by which way: to the tier below, to a remote level, or altogether."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .io import Lane
from .ledger import Event
from .table import Rows
from .tier import Tier
from .values import Chain

if TYPE_CHECKING:
    from .flow import Flow
    from .remote import RemoteLevel


class Demotion:
    """Lets blocks leave the tiers of *flow* once they are where they belong then."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._demoting = [False] * len(flow.tiers)

    def begin_if_full(self, number: int) -> None:
        """Start to move blocks out of tier *number* where it is as full as it may become."""
        goes_on = self._flow.below(number) is not None or self._takes_leaving(number) is not None
        full = goes_on and self._flow.tiers[number].surplus(self._flow.settings.demote_at) > 0
        if full and not self._demoting[number]:
            self._demoting[number] = True
            if self._flow.io.submit(Lane.STORE, partial(self._demote, number)) is None:
                self._demoting[number] = False

    def _demote(self, number: int) -> None:
        """Move the blocks that would leave first one tier down, until the tier is as empty as it should be."""
        self._demoting[number] = False
        tier = self._flow.tiers[number]
        surplus = math.ceil(tier.surplus(self._flow.settings.demote_to))
        if surplus > 0:
            self.move_out(number, surplus)

    def move_out(self, number: int, count: int) -> int:
        """Let up to *count* blocks leave tier *number* by policy once they are where they belong then.

        Returns how many left; a level below that is out of order keeps them here, a remote one does not.
        """
        tier, outside = self._flow.tiers[number], self._takes_leaving(number)
        rows = tier.index.select_victims(count)
        try:
            written = outside.take_leaving(rows) if outside is not None else None
            below = self._move_down(number, rows) if self._flow.below(number) is not None else None
        except BaseException:  # the tier below is out of order: what it did not get stays here
            for row in rows.tolist():
                tier.index.unpin(row)
            raise
        kept = tier.index.keys[rows[written]] if written is not None else None
        left = tier.index.remove_selected(rows)
        tier.count_evicted(left, below, kept)
        return len(left)

    def make_room(self, chain: Chain, first: int, count: int) -> None:
        """Before a save: let what must leave the first tier for it leave by way of the remote level, if that takes it.

        *chain* is saved from number *first* on, *count* blocks of it.
        """
        leaving = self._flow.remote.leaving if self._flow.remote is not None else None
        if leaving is None:
            return
        tier, index = self._flow.tiers[0], self._flow.tiers[0].index
        short = int(np.count_nonzero(~index.knows(chain.keys[first : first + count]))) - index.capacity + index.used
        if short <= 0:
            return
        resident = index.peek(chain)
        held = index.hold(chain.keys[resident - 1 : resident]) if resident else -1
        rows = index.select_victims(short)
        kept = np.zeros(len(rows), np.bool_)
        try:
            kept = leaving.send(rows, "transit_full")
        finally:
            keys = index.keys[rows[kept]]
            tier.count_evicted(index.remove_selected(rows), self._flow.below(0), keys)
            if held >= 0:
                index.unpin(held)

    def _move_down(self, number: int, rows: Rows) -> Tier:
        """Have what is missing of *rows* in the tier that they go to when they leave; returns that tier."""
        tier = self._flow.tiers[number]
        lower = number + 1 if tier.swap_to is None else tier.swap_to
        below = self._flow.tiers[lower]
        missing = rows[below.index.rows_of(tier.index.keys[rows]) < 0]
        while len(missing):
            tip = int(missing[tier.index.depth[missing].argmax()])
            tier.index.pin(tip)
            covered = tier.index.stored_chain(tip, self._flow.roots).rows
            self._flow.copy_chain(number, tip, lower, Event.DEMOTED)
            missing = missing[~np.isin(missing, covered) & (missing != tip)]
        return below

    def _takes_leaving(self, number: int) -> RemoteLevel | None:
        """The remote level, if it takes what leaves tier *number*."""
        return self._flow.remote if self._flow.remote is not None and self._flow.remote.takes_leaving(number) else None
