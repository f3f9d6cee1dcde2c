"""Blocks that the first tier does not admit, on their way to the tiers below.

What a policy refuses is worth less than whatever would have to leave for it, in that tier.  Whether it is worth a place
in the next, the next one's policy says.  Until a background job has asked it, the blocks lie in transit slots; what
finds none there is not stored, and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..policy.base import RequestHint
from ..store.base import SlotMemory
from .images import seal
from .io import Lane
from .lasting import LastingTier
from .ledger import Event
from .roots import Roots
from .table import Rows
from .tier import Tier
from .values import NOT_ADMITTED, Chain, StoredChain

if TYPE_CHECKING:
    from .flow import Flow


def unstored(chain: Chain, root: int, roots: Roots, blocks: int, fidelity: int, layout: int) -> StoredChain:
    """The first *blocks* blocks of *chain*, of one fidelity and layout, as if a tier held them."""
    root_key, identity_digest = roots.origin(root)
    return StoredChain(
        root=root,
        root_key=root_key,
        identity_digest=identity_digest,
        rows=np.full(blocks, -1, np.int32),
        keys=chain.keys[:blocks],
        token_blocks=chain.token_blocks[:blocks],
        extras=chain.extras[:blocks],
        fidelity=np.full(blocks, fidelity, np.uint8),
        layout=np.full(blocks, layout, np.uint8),
        codings=np.zeros(blocks, np.uint8),
        memo={},
    )


class Passing:
    """The last blocks of *chain*, from number *first* on, which the first tier has refused.

    Parameters
    ----------
    fill:
        Copies the leading blocks, as many as there are slots, out of the engine: called at once with memory, offset of
        a payload in a slot, and slots.
    """

    def __init__(
        self,
        flow: Flow,
        chain: StoredChain,
        first: int,
        hint: RequestHint,
        fill: Callable[[SlotMemory, int, Rows], None],
    ) -> None:
        self._flow = flow
        self._hint = hint
        self._begin = self._first = first
        self._number = 1
        self._slots = flow.passing.take(chain.num_blocks - first)
        self._chain = chain.leading(first + len(self._slots))
        flow.tiers[1].count(Event.NOT_STORED, chain.num_blocks - self._chain.num_blocks, "transit_full")
        try:
            if len(self._slots):
                fill(flow.passing.memory, flow.passing.spec.header_bytes, self._slots)
        except BaseException:
            flow.passing.give_back(self._slots)
            raise

    def go(self) -> None:
        """Ask the tiers below, in the background."""
        if len(self._slots) and self._flow.io.submit(Lane.STORE, self._run) is None:
            left = self._chain.num_blocks - self._first
            self._flow.tiers[self._number].count(Event.NOT_STORED, left, "queue_full")
            self._flow.passing.give_back(self._slots)

    def _run(self) -> None:
        waits = False
        try:
            while self._number < len(self._flow.tiers):
                waits = self._waits()
                if waits or self._enter(self._number) != NOT_ADMITTED:
                    break
                self._number += 1
        finally:
            if not waits:
                self._flow.passing.give_back(self._slots)

    def _waits(self) -> bool:
        """Whether somebody still writes what these blocks build on, in the tier above; then this goes on after that.

        Until then it could not be copied down, and they not be stored on top of it.
        """
        index = self._flow.tiers[self._number - 1].index
        tip = index.hold(self._chain.keys[self._first - 1 : self._first]) if self._first else -1
        if tip < 0:
            return False
        try:
            return index.when_whole(tip, self.go)
        finally:
            index.unpin(tip)

    def _enter(self, number: int) -> str:
        """Store in tier *number* what it takes, behind what it builds on; returns why it did not take all."""
        flow, chain, first = self._flow, self._chain, self._first
        tier = flow.tiers[number]
        if first:
            flow.copy_down(number - 1, chain.keys[first - 1 : first], number)
        count = chain.num_blocks - first
        kinds = chain.fidelity[first:], chain.layout[first:]
        taken = tier.reserve(chain, chain.root, first, count, *kinds, self._hint)
        tier.count_left(taken, flow.below(number))
        if taken.reason == "parent_absent":
            tier.count(Event.NOT_STORED, count, taken.reason)
        rows = taken.rows
        if len(rows):
            flow.place(tier, rows, lambda: self._write(tier, rows, taken.first), hint=self._hint)
            flow.stored(number, int(rows[-1]), len(rows), self._hint)
        self._first = taken.first + len(rows)
        return taken.reason

    def _write(self, tier: Tier, rows: Rows, first: int) -> int:
        """Write the blocks from *first* on to *rows*; returns how many leading ones were."""
        pool, slots = self._flow.passing, self._slots[first - self._begin :][: len(rows)]
        if not isinstance(tier, LastingTier):
            return tier.store.write(tier.slots_of(rows), pool.memory, slots, pool.spec.header_bytes)
        seal(pool.spec, pool.memory.view, slots, self._chain, slice(first, first + len(rows)))
        exactly = tier.rule.exactly(self._chain.num_blocks, pool.spec.block_tokens)
        return tier.write_images(rows, pool.memory, slots, exactly)
