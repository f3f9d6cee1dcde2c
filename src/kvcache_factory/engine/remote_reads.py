"""Bringing blocks from a remote level to the memory tier above, ahead of a look-up."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..block.plan import ChainView
from ..codec.base import UNREADABLE_HERE
from ..memory.move import copy_slots
from ..store.base import Operation
from .images import Image, prove
from .io import Lane, Ticket
from .ledger import Event
from .table import Rows
from .tier import Tier
from .transit import Transit
from .values import Reservation

if TYPE_CHECKING:
    from .remote import RemoteLevel

_KEPT = UNREADABLE_HERE | {"not_exact", "codec", "codec_params", "header_version"}
"""Reasons for a miss that say nothing against the value: somebody else can use it."""


class Reads:
    """The way up.

    Parameters
    ----------
    source:
        The memory tier in which blocks land.
    transit:
        Host memory for whole images, where *source* keeps payloads only.
    """

    def __init__(self, level: RemoteLevel, source: Tier, transit: Transit | None) -> None:
        self.source = source
        self._level = level
        self._transit = transit
        self._index = source.index  # outlives the tier: what is late may end after everything was closed

    def begin(self, chain: ChainView, root: int, after: Ticket | None, deadline_s: float) -> Ticket | None:
        """Start a read in the background; None when there is no room for it."""
        end = time.monotonic() + deadline_s
        return self._level.io.submit(Lane.LOAD, partial(self._run, chain, root, after, end))

    def _run(self, chain: ChainView, root: int, after: Ticket | None, end: float) -> None:
        """Batch by batch, until something is missing, fails or is late."""
        if after is not None:
            after.wait(max(end - time.monotonic(), 0))
        level, index = self._level, self.source.index
        at, hits, reason = index.peek(chain), 0, ""
        try:
            while at < chain.num_blocks and not reason:
                got, others, reason = self._read_batch(chain, root, at, end)
                at, hits = at + got + others, hits + got
        finally:
            missed = chain.num_blocks - at
            level.count(Event.ASKED, hits + missed)
            level.count(Event.HIT, hits)
            level.count(Event.MISS, missed, reason or "error")

    def _read_batch(self, chain: ChainView, root: int, first: int, end: float) -> tuple[int, int, str]:
        """Read some blocks from number *first* on.

        Returns how many came, how many somebody else has brought instead, and why no more can follow.
        """
        level = self._level
        wanted = min(chain.num_blocks - first, level.batch_blocks)
        names = level.names.of(chain, range(first, first + wanted))
        with level.timing("exists"):
            there = level.store.exists(names, end - time.monotonic())
        if not there.done or not there.count:
            return 0, 0, _reason(there)
        if end <= time.monotonic():
            return 0, 0, "timeout"
        reserved = self.source.reserve(chain, root, first, there.count)
        self.source.count_left(reserved)
        others = reserved.first - first
        if others > 0:
            self.source.abort(reserved.rows, "not_needed")
            return 0, others, ""
        if not len(reserved.rows):
            return 0, 0, reserved.reason or "not_reserved"
        good, reason = self._fill(chain, reserved, names[: len(reserved.rows)], end)
        if good < there.count:
            return good, 0, reason if good < len(reserved.rows) else reserved.reason or "not_reserved"
        return good, 0, "absent" if there.count < wanted else ""

    def _fill(self, chain: ChainView, reserved: Reservation, names: list[bytes], end: float) -> tuple[int, str]:
        """Read into reserved rows, prove what came, and commit the leading good ones."""
        slots = self.source.slots_of(reserved.rows) if self._transit is None else self._transit.take(len(names))
        rows, rest = reserved.rows[: len(slots)], reserved.rows[len(slots) :]
        self.source.abort(rest)
        names = names[: len(slots)]
        if not len(slots):
            return 0, "no_transit"
        with self._level.timing("get"):
            operation = self._get(names, self.source.slots_of(rows), slots, end)
        if not operation.done:
            operation.then(partial(self._let_go, rows, slots))
            return 0, "timeout"
        if operation.reason == "invalid" and not self._only_whole:  # of another size: no image of ours
            self._level.count(Event.LOAD_FAILED, 1, operation.reason)
            self._level.forget([names[operation.count]])
        images, reason = self._prove(chain, reserved.first, names, slots[: operation.count])
        good = len(images)
        self._keep(rows, slots, images)
        return good, reason or _reason(operation) or "no_transit"

    @property
    def _only_whole(self) -> bool:
        """Whether an encoded image cannot be got, as its place is in two memories."""
        store = self._level.store
        return self._transit is not None and store.takes_device_memory("get") and store.takes_shorter

    def _get(self, names: list[bytes], rows: Rows, slots: Rows, end: float) -> Operation:
        left, store = end - time.monotonic(), self._level.store
        if self._transit is None:
            return store.get(names, self.source.slots, slots, left)
        if not store.takes_device_memory("get"):
            return store.get(names, self._transit.memory, slots, left)
        operation = store.get(names, self.source.slots, rows, left, (self._transit.memory, slots))
        if operation.done and operation.count:
            # What is proven is what the device holds.
            spec, count = self._transit.spec, operation.count
            copy_slots(
                self.source.slots, rows[:count], self._transit.memory, slots[:count], spec.payload_bytes, 0,
                spec.header_bytes,
            )  # fmt: skip
        return operation

    def _prove(self, chain: ChainView, first: int, names: list[bytes], slots: Rows) -> tuple[list[Image], str]:
        spec = self._level.spec
        assert spec is not None
        view: npt.NDArray[np.uint8] = self.source.slots.view if self._transit is None else self._transit.memory.view
        images: list[Image] = []
        for number, slot in enumerate(slots.tolist()):
            refused = self._level.images.decode(view[slot]) if self._level.images is not None else None
            proven = refused or prove(spec, view[slot], chain, first + number)
            if isinstance(proven, Image) and proven.fidelity > self.source.index.accepts:
                proven = "not_exact"
            if isinstance(proven, str):
                self._level.count(Event.LOAD_FAILED, len(slots) - number, proven)
                if proven not in _KEPT:
                    self._level.forget([names[number]])
                return images, proven
            images.append(proven)
        return images, ""

    def _keep(self, rows: Rows, slots: Rows, images: list[Image]) -> None:
        """The leading rows hold proven *images*: let the tier have them; the others go back."""
        source, good = self.source, len(images)
        index, kept = source.index, rows[:good]
        if self._transit is not None:
            spec = self._transit.spec
            if good and not self._level.store.takes_device_memory("get"):
                copy_slots(
                    self._transit.memory, slots[:good], source.slots, source.slots_of(kept), spec.payload_bytes,
                    spec.header_bytes, 0,
                )  # fmt: skip
            self._transit.give_back(slots)
        if good:
            index.layout[kept] = [image.layout for image in images]
            index.fidelity[kept] = np.maximum(index.fidelity[kept], [image.fidelity for image in images])
            index.codings[kept] = [image.generation for image in images]
            index.checksum[kept] = [image.payload_checksum for image in images]
            tip = int(kept[-1])
            index.pin(tip)
            self._level.writes.mark(kept)
            committed = index.commit(kept)
            source.count(Event.STORED, committed)
            source.count(Event.PROMOTED, committed)
            self._level.landed(tip)
        source.abort(rows[good:])

    def _let_go(self, rows: Rows, slots: Rows) -> None:
        """What nobody waited for has ended: its slots are free."""
        if self._transit is not None:
            self._transit.give_back(slots)
        self._index.abort(rows)


def _reason(operation: Operation) -> str:
    return operation.reason if operation.done else "timeout"
