"""Encoded blocks of a tier in memory on their way to an engine: decoded by background threads, as a disk's are read.

What is decoded lands in a slot of the tier itself, beside the encoded bytes, so that everybody who holds the block
copies from there; where no slot is free, in transit slots of whoever asked.  The bytes that are encoded stay what is
stored: letting a decoded copy go costs nothing, and no lossy codec is asked again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..block.plan import ChainView
from ..memory.chunks import write_slot
from .fetch import Fetch, Fetcher, Landing
from .images import Image
from .io import IOPool
from .packed import PackedTier
from .table import Rows
from .tier import Tier
from .transit import Transit


class Beside(Landing):
    """Slots of a tier for decoded copies of its *rows*."""

    def __init__(self, tier: PackedTier, slots: Rows, pool: Transit, rows: Rows) -> None:
        super().__init__(tier.slots, tier.payload_offset, slots, None, pool, rows)
        self._packed = tier

    def keep(self, images: Sequence[Image]) -> None:
        good = len(images)
        self._packed.give_staging(self.slots[good:])
        self._packed.stage(self._rows[:good], self.slots[:good])
        self.slots = self._packed.slots_of(self._rows[:good])
        super().keep(images)

    def release(self) -> None:
        """The copies are there for as long as somebody holds their blocks."""


class Decode(Fetch):
    """One job: a few blocks are decoded."""

    def __init__(self, source: PackedTier, rows: Rows, chain: ChainView, first: int, landing: Landing) -> None:
        super().__init__(source, rows, chain, first, landing)
        self._tier = source

    def _read(self) -> Iterator[int]:
        yield from range(len(self.rows))

    def _prove(self, number: int) -> Image | str:
        tier, landing, row = self._tier, self.landing, int(self.rows[number])
        index, spec = tier.index, tier.spec
        assert spec is not None
        # Somebody else may have been quicker: then there is nothing to do but to copy, if that.
        if not (isinstance(landing, Beside) and tier.ready(self.rows[number : number + 1]).all()):
            on_host = landing.memory.device == "cpu"
            slot, offset = int(landing.slots[number]), landing.payload_offset
            size = spec.payload_bytes
            out = landing.memory.view[slot, offset : offset + size] if on_host else np.empty(size, np.uint8)
            with tier.timing("decode"):
                reason = tier.decode(row, out)
            if reason is not None:
                return reason
            if not on_host:
                write_slot(landing.memory, slot, offset, out)
        return Image(int(index.layout[row]), int(index.fidelity[row]), 0, int(index.codings[row]))


class Decoder(Fetcher):
    """Decodes runs of blocks of one tier; see :class:`Fetcher` for deadlines and what is given up."""

    def __init__(self, tier: PackedTier, below: Tier | None, io: IOPool, transit: Transit, max_wait_s: float) -> None:
        super().__init__(tier, tier, io, transit, max_wait_s)
        self._tier = tier
        self._below = below

    def prepare(self, chain: ChainView, root: int, first: int, rows: Rows) -> Fetch | None:
        if self.out_of_service:
            return None
        slots, evicted = self._tier.take_staging(self._read_size(rows), evict=True)
        self._tier.count_evicted(evicted, self._below)
        landing = self._beside(rows, slots)
        return self._make(rows[: len(slots)], chain, first, landing) if landing is not None else None

    def _reserve(self, chain: ChainView, root: int, first: int, rows: Rows) -> Landing | None:
        return self._beside(rows, self._tier.take_staging(len(rows))[0])

    def _beside(self, rows: Rows, slots: Rows) -> Landing | None:
        return Beside(self._tier, slots, self._transit, rows[: len(slots)]) if len(slots) else None

    def _make(self, rows: Rows, chain: ChainView, first: int, landing: Landing) -> Fetch:
        return Decode(self._tier, rows, chain, first, landing)
