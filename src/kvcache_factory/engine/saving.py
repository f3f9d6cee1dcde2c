"""Storing what is missing of a chain in the first tier, from where it flows down by itself."""

from __future__ import annotations

from collections.abc import Sequence

from ..block.envelope import Fidelity
from ..block.key import KeyChain
from ..block.plan import SavePlan
from ..block.spec import Layout
from ..memory.region import BlockPositions, Region
from ..policy.base import RequestHint
from ..store.base import SlotMemory
from .flow import Flow
from .lease import LeaseBook
from .ledger import Event
from .mover import Mover
from .passing import Passing, unstored
from .roots import Roots
from .seen import Seen
from .table import Rows
from .tier import Ingestion, Tier
from .values import NOT_ADMITTED, Reservation


class Saving:
    """The verb *save* over the tiers of a chain."""

    def __init__(self, tiers: Sequence[Tier], flow: Flow, leases: LeaseBook, mover: Mover, roots: Roots) -> None:
        self.tiers = tiers
        self.flow = flow
        self.leases = leases
        self.mover = mover
        self.roots = roots
        self.seen: Seen | None = None
        """Keys that were computed before; there once the tiers are open."""

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
        taken = self._reserve(chain, root, first, len(positions), region.tag, fidelity, hint)
        plan, filled = SavePlan(taken.first, taken.rows, taken.rows), 0
        try:
            if len(plan.rows):
                start = plan.first - first
                part = positions[start : start + len(plan.rows)]
                with self.tiers[0].timing("save"), self.flow.stages(self.tiers[0].name, "save_copy"):
                    self.mover.gather(self.tiers[0], plan.rows, region, part)
                filled = len(plan.rows)
        finally:
            self.finish_save(plan, filled, hint, request_id)
        if taken.reason == NOT_ADMITTED and filled == len(plan.rows):
            refused = plan.first + filled
            self._pass_on(chain, root, region, positions[refused - first :], refused, fidelity, hint)
        return filled

    def _pass_on(
        self,
        chain: KeyChain,
        root: int,
        region: Region,
        positions: BlockPositions,
        first: int,
        fidelity: Fidelity,
        hint: RequestHint,
    ) -> None:
        """Offer the tiers below the blocks from number *first* on, which the first tier does not admit."""
        below = self.flow.below(0)
        if below is None or below.ingestion == Ingestion.HOT:
            return
        layout = self.mover.layout_code(region.tag)
        refused = unstored(chain, root, self.roots, first + len(positions), fidelity, layout)

        def fill(memory: SlotMemory, payload_offset: int, slots: Rows) -> None:
            self.mover.gather_into(memory, payload_offset, slots, region, positions[: len(slots)])

        Passing(self.flow, refused, first, hint, fill).go()

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
        taken = self._reserve(chain, root, first, count, tag, fidelity, hint)
        return SavePlan(taken.first, taken.rows, self.tiers[0].slots_of(taken.rows))

    def _reserve(
        self,
        chain: KeyChain,
        root: int,
        first: int,
        count: int,
        tag: Layout,
        fidelity: Fidelity,
        hint: RequestHint,
    ) -> Reservation:
        tier = self.tiers[0]
        fidelity = max(fidelity, Fidelity(chain.found_fidelity))
        if self.seen is not None:
            self.seen.add(chain.keys[first : first + count])
        self.flow.demotion.make_room(chain, first, count)
        with self.flow.stages(tier.name, "save_reserve"):
            reservation = tier.reserve(chain, root, first, count, fidelity, self.mover.layout_code(tag), hint)
        tier.count_left(reservation, self.flow.below(0))
        if reservation.reason == "parent_absent":
            tier.count(Event.NOT_STORED, count, reservation.reason)
        else:
            tier.count(Event.DUPLICATE, count - reservation.wanted)
        return reservation

    def finish_save(self, plan: SavePlan, filled: int, hint: RequestHint, request_id: str | None = None) -> None:
        """The leading *filled* rows of *plan* hold their blocks, the lease of *request_id* too; the rest go back."""
        tier = self.tiers[0]
        rows, rest = plan.rows[:filled], plan.rows[filled:]
        if len(rows):
            with self.flow.stages(tier.name, "save_seal"):
                tier.seal(rows, self.flow.settings.integrity)
            tip = int(rows[-1])
            tier.index.pin(tip)
            with self.flow.stages(tier.name, "save_commit"):
                committed = tier.index.commit(rows, hint)
            tier.count(Event.STORED, committed)
            if request_id is not None:
                self.leases.extend(request_id, tier, tip)
            self.flow.stored(0, tip, len(rows), hint)
        if len(rest):
            tier.abort(rest)
            tier.count(Event.NOT_STORED, len(rest), "copy_failed")
