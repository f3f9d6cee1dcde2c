"""Copies between engine tensors and the slots of a tier.  It never decides: it is told rows and positions."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from ..block.spec import Layout
from ..errors import ClosedError
from ..memory.move import gather, scatter
from ..memory.region import BlockPositions, Region
from ..store.base import SlotMemory
from .table import Rows
from .tier import Tier


class Mover:
    """Gather and scatter, one call per batch, counting the copies in flight so that memory outlives them."""

    def __init__(self) -> None:
        self._idle = threading.Condition()
        self._copies = 0
        self._closed = False

    @staticmethod
    def layout_code(tag: Layout) -> int:
        """The number under which an index keeps the order of a payload's bytes."""
        return tag.code

    def gather(self, tier: Tier, rows: Rows, region: Region, positions: BlockPositions) -> None:
        """Fill *rows* from *positions*, in the region's own order."""
        self.gather_into(tier.slots, tier.payload_offset, tier.slots_of(rows), region, positions)

    def gather_into(
        self, memory: SlotMemory, payload_offset: int, slots: Rows, region: Region, positions: BlockPositions
    ) -> None:
        """Fill *slots* of any memory from *positions*, in the region's own order."""
        with self:
            gather(region, positions, memory, slots, payload_offset, region.tag)

    def scatter(
        self,
        memory: SlotMemory,
        payload_offset: int,
        slots: Rows,
        codes: npt.NDArray[np.uint8],
        region: Region,
        positions: BlockPositions,
    ) -> None:
        """Copy *slots* to *positions*, converting those whose layout *codes* are not the region's own."""
        with self:
            first = int(codes[0])
            if (codes == first).all():
                scatter(region, positions, memory, slots, payload_offset, Layout.of_code(first))
                return
            for code in np.unique(codes).tolist():
                same = np.flatnonzero(codes == code)
                part = BlockPositions(positions.a[same], positions.b[same])
                scatter(region, part, memory, slots[same], payload_offset, Layout.of_code(code))

    def close(self) -> None:
        """Refuse new copies, and wait until none is in flight: after that, slots may be freed."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._copies)

    def __enter__(self) -> None:
        with self._idle:
            if self._closed:
                raise ClosedError("the manager was closed before this copy began")
            self._copies += 1

    def __exit__(self, *_: object) -> None:
        with self._idle:
            self._copies -= 1
            if not self._copies:
                self._idle.notify_all()
