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


class Proof:
    """What came of a batch, proven piece by piece: the leading good images, and why the next is none.

    Parameters
    ----------
    first:
        Number in *chain* of the first block of the batch.
    view, slots:
        The images are in these rows of *view* ``[n, slot_bytes]``.
    accepts:
        The worst fidelity that is good.
    """

    def __init__(
        self, level: RemoteLevel, chain: ChainView, first: int, view: npt.NDArray[np.uint8], slots: Rows, accepts: int
    ) -> None:
        self.images: list[Image] = []
        self.reason = ""
        self._level = level
        self._chain = chain
        self._first = first
        self._view = view
        self._slots = slots
        self._accepts = accepts

    def check(self, part: slice) -> None:
        """Prove the images of a part of the batch, in order, unless one before them was bad."""
        for number in range(part.start, part.stop):
            if self.reason:
                return
            proven = self._prove(self._view[self._slots[number]], self._first + number)
            if isinstance(proven, str):
                self.reason = proven
            else:
                self.images.append(proven)

    def _prove(self, image: npt.NDArray[np.uint8], number: int) -> Image | str:
        level = self._level
        assert level.spec is not None
        refused = level.images.decode(image) if level.images is not None else None
        proven = refused or prove(level.spec, image, self._chain, number)
        return "not_exact" if isinstance(proven, Image) and proven.fidelity > self._accepts else proven


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
        proof = Proof(self._level, chain, reserved.first, *self._images(slots), accepts=self.source.index.accepts)
        with self._level.timing("get"):
            operation = self._get(names, self.source.slots_of(rows), slots, end, proof)
        if not operation.done:
            operation.then(partial(self._let_go, rows, slots))
            return 0, "timeout"
        if operation.reason == "invalid" and not self._only_whole:  # of another size: no image of ours
            self._level.count(Event.LOAD_FAILED, 1, operation.reason)
            self._level.forget([names[operation.count]])
        images = proof.images[: operation.count]
        good, bad = len(images), proof.reason if len(images) < operation.count else ""
        if bad:
            self._level.count(Event.LOAD_FAILED, operation.count - good, bad)
            if bad not in _KEPT:
                self._level.forget([names[good]])
        self._keep(rows, slots, images)
        return good, bad or _reason(operation) or ("not_proven" if good < operation.count else "no_transit")

    def _images(self, slots: Rows) -> tuple[npt.NDArray[np.uint8], Rows]:
        """Host memory in which the images of a batch are proven, and where they are in it."""
        return (self.source.slots if self._transit is None else self._transit.memory).view, slots

    @property
    def _only_whole(self) -> bool:
        """Whether an encoded image cannot be got, as its place is in two memories."""
        store = self._level.store
        return self._transit is not None and store.takes_device_memory("get") and store.takes_shorter

    def _get(self, names: list[bytes], rows: Rows, slots: Rows, end: float, proof: Proof) -> Operation:
        """Get images and prove them, each piece while others are on their way."""
        left, store = end - time.monotonic(), self._level.store
        if self._transit is None:
            return store.get(names, self.source.slots, slots, left, check=proof.check)
        memory, spec = self._transit.memory, self._transit.spec
        if not store.takes_device_memory("get"):
            return store.get(names, memory, slots, left, check=proof.check)

        def check(part: slice) -> None:  # what is proven is what the device holds
            copy_slots(self.source.slots, rows[part], memory, slots[part], spec.payload_bytes, 0, spec.header_bytes)
            proof.check(part)

        return store.get(names, self.source.slots, rows, left, (memory, slots), check=check)

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
