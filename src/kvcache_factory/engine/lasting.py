"""The tier of a store that is not memory, keeps its own records, and is shared with other processes.

Space is the store's to give.  Where a codec makes blocks smaller, that depends on what is in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from ..block.envelope import Fidelity, unpack_header
from ..block.spec import PAGE, BlockSpec, round_up
from ..codec.base import UNREADABLE_HERE
from ..errors import CapacityError, StoreError
from ..policy.base import NO_HINT, EvictionPolicy, RequestHint
from ..store.base import Changes, Entries, LastingStore, SlotMemory
from .coding import ImageCoder
from .compressing import NOTHING, Exactly
from .lasting_index import LastingIndex
from .ledger import Event, Ledger
from .roots import Roots
from .table import Keys, Rows
from .tier import Tier
from .transit import Transit
from .values import Chain, Reservation, StoredChain, runs

SPARE_ROWS = 4096
STAGING_BYTES = 32 << 20
"""Memory for images that are encoded and not written yet, all threads together."""
STAGED_BYTES = 8 << 20
"""What one thread encodes before it writes."""
MOST_EVICTED = 64
"""Blocks that leave by policy for one image of a size of which nothing is free, before a segment is emptied for it."""
Bytes = npt.NDArray[np.uint8]


class LastingTier(Tier):
    """A tier over a :class:`LastingStore`."""

    store: LastingStore

    def __init__(
        self,
        name: str,
        store: LastingStore,
        policy: EvictionPolicy,
        budget_bytes: int,
        ledger: Ledger,
        clock: Callable[[], float],
        roots: Roots,
    ) -> None:
        super().__init__(name, store, policy, budget_bytes, ledger, clock)
        store.report_to(lambda reason, times: ledger.add(name, Event.STORE_ERROR, times, reason=reason))
        self._roots = roots
        self._refreshed_s = clock()
        self.refreshing = False
        self._staging: Transit | None = None
        self.images: ImageCoder | None = None
        self._ageing = threading.Lock()
        self._recent = np.empty(0, np.uint32)
        """Generation of a row, plus one, whose block a lossy codec has left exact because of its place in its chain."""

    def open(self, spec: BlockSpec) -> None:
        if self.codec is not None:
            self.codec.open()
        self._charge(self.store.slot_bytes(spec))
        self.spec = spec
        self.store.open(spec, 0)
        if self.coder is not None:  # after the store: a calibration may lie beside the blocks
            self.coder.open(spec)
            self.images = ImageCoder(self.coder, spec, partial(self.count_encoded, self.coder.name))
        if self.codec is not None or self.encodes:
            self._staging = Transit(spec, STAGING_BYTES)
        entries = self.store.scan()
        try:
            index = LastingIndex(self._rows_for(len(entries)), self.policy, self._clock)
        except (MemoryError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"tier {self.name!r} of {self.budget_bytes:,} bytes needs an index larger than memory; give the disk a "
                "smaller size_gb"
            ) from error
        self._index = index
        self._recent = np.zeros(index.capacity, np.uint32)
        self._time_lock()
        self._enter(index, entries)

    def _rows_for(self, found: int) -> int:
        ratio = self.coder.largest_ratio if self.coder is not None else 1.0
        return int(self.budget_bytes // self.block_bytes * ratio) + found + found // 4 + SPARE_ROWS

    def _enter(self, index: LastingIndex, entries: Entries) -> None:
        rows = index.enter(entries, self._roots)
        exact = rows[(rows >= 0) & (entries.fidelity == Fidelity.EXACT)]
        self._recent[exact] = index.generation[exact] + np.uint32(1)
        bound = self.store.bind(rows, entries.places)
        self.count(Event.FOUND, int((rows >= 0).sum()))
        left = rows[(rows >= 0) & ~bound]
        if len(left):
            self.count(Event.DROPPED, index.lose(left), "owner_freed")

    @property
    def lasting(self) -> LastingIndex:
        """The index as what it is here."""
        assert isinstance(self._index, LastingIndex)
        return self._index

    def reserve(
        self,
        chain: Chain,
        root: int,
        first: int,
        count: int,
        fidelity: int | npt.NDArray[np.uint8] = 0,
        layout: int | npt.NDArray[np.uint8] = 0,
        hint: RequestHint = NO_HINT,
    ) -> Reservation:
        self.settle()
        room = self.store.room()
        taken = self.index.reserve(chain, root, first, count, fidelity, layout, hint, places=room)
        self.settle()
        evicted = taken.evicted
        short = len(taken.rows) - self.store.room()
        if short > 0:  # the reserved rows hold their ancestors, so that none of those can be evicted for them
            evicted = np.concatenate((evicted, self.evict(short)))
            self._clear_other_class()
            short = len(taken.rows) - self.store.room()
        if short <= 0:
            return Reservation(taken.rows, taken.first, taken.wanted, evicted, taken.replaced, taken.reason)
        kept = len(taken.rows) - short
        self.abort(taken.rows[max(kept, 0) :], "full")
        return Reservation(taken.rows[: max(kept, 0)], taken.first, taken.wanted, evicted, taken.replaced, "full")

    def evict(self, count: int) -> Keys:
        keys = super().evict(count)
        self.settle()
        return keys

    @property
    def encodes(self) -> bool:
        """Whether what is written goes through a payload codec."""
        return self.coder is not None and self.coder.encodes

    @property
    def held_bytes(self) -> int:
        stored = self.store.stored_bytes if self._index is not None and self.encodes else None
        return super().held_bytes if stored is None else stored

    def write_images(self, rows: Rows, memory: SlotMemory, slots: Rows, exactly: Exactly = NOTHING) -> int:
        """Write sealed images from *slots* of host memory to *rows*; returns how many leading ones were written.

        *exactly*: which blocks, of the chain that ends in a row given with it, no lossy codec may touch.
        """
        staging = self._staging
        if staging is None:
            return self.store.write(rows, memory, slots, 0, depths=self.index.depth[rows])
        written, each = 0, 2 if self.codec is not None and self.encodes else 1
        while written < len(rows):
            count = min(len(rows) - written, max(STAGED_BYTES // self.block_bytes, 1))
            staged = staging.take(count * each, wait=True, least=each)
            try:
                some = slice(written, written + len(staged) // each)
                done = self._write_encoded(staging, staged, rows[some], memory, slots[some], exactly)
            except StoreError:
                if not written:
                    raise
                break
            finally:
                staging.give_back(staged)
            written += done
            if done < len(rows[some]):
                break
        return written

    def encode_aged(self, chain: StoredChain, copy: Callable[[slice, Rows], int]) -> None:
        """Encode what a lossy codec left exact because it was recent, now that *chain* has grown beyond it.

        *copy* writes blocks of the chain to rows, as for the first time.  What somebody holds waits until the chain
        grows again: a lease promises that what is exact stays that.
        """
        index, coder, spec = self.lasting, self.coder, self.spec
        if coder is None or not (coder.encodes and coder.lossy and self.rule.behind_tokens) or spec is None:
            return
        with self._ageing:  # of two jobs, each would see the other's pins
            rows = index.rows_of(chain.keys)
            exact = (rows >= 0) & (self._recent[rows] == index.generation[rows] + np.uint32(1))
            exact &= (chain.fidelity == Fidelity.EXACT) | (chain.codings > 0)
            stays = self.rule.exactly(chain.num_blocks, spec.block_tokens)
            aged = np.array([n for n in np.flatnonzero(exact).tolist() if not stays(n)], np.int64)
            aged = aged[self.store.owned(rows[aged])]
            aged = aged[np.array([index.pin_ready(row) for row in rows[aged].tolist()], np.bool_)]
            try:
                self._encode_again(aged, rows[aged], copy)
            finally:
                for row in rows[aged].tolist():
                    index.unpin(row)
            self.settle()

    def _encode_again(self, numbers: npt.NDArray[np.int64], rows: Rows, copy: Callable[[slice, Rows], int]) -> None:
        """Write blocks again, those that nobody holds but by the one pin of each that the caller has."""
        index, before = self.lasting, self.index.fidelity[rows]

        def mark(free: Rows) -> None:  # before the bytes change: whoever asks from now on must not count on exact ones
            index.fidelity[free] = np.maximum(index.fidelity[free], Fidelity.BOUNDED)

        if not len(rows):
            return
        chosen = np.isin(rows, index.while_unheld(rows, 1, mark))
        written = np.zeros(len(rows), np.bool_)
        picked = np.flatnonzero(chosen)
        try:
            for run in np.split(picked, np.flatnonzero(np.diff(numbers[picked]) != 1) + 1) if len(picked) else []:
                done = copy(slice(int(numbers[run[0]]), int(numbers[run[-1]]) + 1), rows[run])
                written[run[:done]] = True
        finally:
            failed, exact = chosen & ~written, chosen & ~(written & (index.codings[rows] > 0))
            index.fidelity[rows[exact]] = before[exact]
            self._recent[rows[failed]] = index.generation[rows[failed]] + np.uint32(1)

    def _write_encoded(
        self, staging: Transit, staged: Rows, rows: Rows, memory: SlotMemory, slots: Rows, exactly: Exactly
    ) -> int:
        """Write by way of *staged*: the images in *memory* may be read by others and stay as they are."""
        sizes = np.full(len(rows), staging.spec.slot_bytes)
        final = staged[: len(rows)]
        for number, slot in enumerate(slots.tolist()):
            image, into = memory.view[slot], staging.memory.view[int(final[number])]
            if self.images is not None and self.encodes:
                target = staging.memory.view[int(staged[-1])] if self.codec is not None else into
                sizes[number] = self._encode(self.images, int(rows[number]), image, target, exactly)
                image = target
            if self.codec is not None:
                self.codec.encode(staging.spec, image, into)
                self.ledger.add(self.name, Event.ENCODED, 1, staging.spec.payload_bytes, self.codec.name)
        written = 0
        for first, last, size in runs(sizes):
            part = slice(first, last)
            done = self._write_run(rows[part], staging, final[part], size if size < staging.spec.slot_bytes else 0)
            written += done
            if done < last - first:
                break
        return written

    def _encode(self, images: ImageCoder, row: int, image: Bytes, out: Bytes, exactly: Exactly) -> int:
        """Encode an image, unless it is to stay exact; returns the bytes of it that must be stored."""
        index, depth = self.index, int(self.index.depth[row])
        if images.coder.lossy and exactly(depth):
            out[:] = image
            self._recent[row] = index.generation[row] + np.uint32(1)
            return len(image)
        reason = images.encode(image, depth, out)
        header = unpack_header(out[: images.spec.header_bytes].data)
        index.fidelity[row] = max(int(index.fidelity[row]), int(header.fidelity))
        index.codings[row] = header.generation
        self.count(Event.KEPT_RAW, 1 if reason else 0, reason)
        return images.spec.header_bytes + round_up(header.payload_bytes, PAGE)

    def _write_run(self, rows: Rows, staging: Transit, staged: Rows, image_bytes: int) -> int:
        """Write images of one size; where there is no room for that size, make some once for each that is left."""
        depths, written = self.index.depth[rows], 0
        while written < len(rows):
            part = slice(written, len(rows))
            try:
                written += self.store.write(
                    rows[part], staging.memory, staged[part], 0, depths=depths[part], image_bytes=image_bytes
                )
            except StoreError as error:
                if error.reason != "full" or not self._make_room(image_bytes):
                    if not written:
                        raise
                    break
        return written

    def _make_room(self, image_bytes: int) -> bool:
        """Have room for an image of another size than those that were evicted for it."""
        for _ in range(MOST_EVICTED):
            if self.store.room(image_bytes) > 0 or self.store.reassign(image_bytes):
                return True
            evicted = self.evict(1)
            self.count_evicted(evicted, None)
            if not len(evicted):
                break
        self._clear_other_class(image_bytes)
        return self.store.room(image_bytes) > 0

    def _clear_other_class(self, image_bytes: int = 0) -> None:
        """Make room by emptying a segment of blocks of another size, if this process owns one and needs it."""
        while self.store.room(image_bytes) <= 0:
            rows = self.store.fullest_other_class(image_bytes)
            if len(rows):
                self.count(Event.EVICTED, self.index.drop(rows), "other_size")
                self.settle()
            if not self.store.reassign(image_bytes):
                return

    def reject(self, rows: Rows, reason: str) -> None:
        bad = rows[:1]
        sound = reason in UNREADABLE_HERE  # its place is as good as any
        if len(bad) and not sound and self.store.owned(bad).all():
            self.store.quarantine(bad)
        super().reject(rows, reason)

    def close(self) -> None:
        super().close()
        if self.codec is not None:
            self.codec.close()
        if self.coder is not None:
            self.coder.close()
        if self._staging is not None:
            self._staging.close()

    def settle(self) -> None:
        """Let the store free the places of rows that have left."""
        rows = self.index.take_limbo()
        if not len(rows):
            return
        wiped = self.index.wipe[rows]
        try:
            if wiped.any():
                self.store.erase(rows[wiped])
            self.store.free(rows[~wiped])
        finally:
            self.index.recycle(rows)

    def refresh(self) -> None:
        """Learn what other processes have stored and freed, and take over what dead ones left."""
        self._refreshed_s = self._clock()
        try:
            self._refresh()
        finally:
            self.refreshing = False

    def _refresh(self) -> None:
        change = self.store.refresh()
        index = self.lasting
        self.count(Event.DROPPED, index.lose(change.gone[~self._moved(change)]), "owner_freed")
        index.own(change.adopted)
        self._enter(index, change.fresh)
        surplus = self.store.surplus()
        if len(surplus):
            self.count(Event.EVICTED, index.drop(surplus), "fair_share")
        self.settle()

    def _moved(self, change: Changes) -> npt.NDArray[np.bool_]:
        """Follow blocks of other processes that have another place now, because they were encoded; which are gone not.

        What was built on them stays.
        """
        index, fresh = self.lasting, change.fresh
        moved = np.zeros(len(change.gone), np.bool_)
        if not len(change.gone) or not len(fresh.keys):
            return moved
        places = {key.tobytes(): number for number, key in enumerate(fresh.keys)}
        there = np.array([places.get(key.tobytes(), -1) for key in index.keys[change.gone]])
        candidates = (there >= 0) & index.foreign[change.gone]

        def follow(free: Rows) -> None:
            at = there[np.isin(change.gone, free)]
            index.fidelity[free], index.layout[free] = fresh.fidelity[at], fresh.layout[at]

        own = 1  # every foreign row has one pin, so that only its owner lets it leave
        free = np.isin(change.gone, index.while_unheld(change.gone[candidates], own, follow))
        moved[free] = self.store.bind(change.gone[free], fresh.places[there[free]])
        return moved

    def begin_refresh(self, after_s: float) -> bool:
        """Whether the last :meth:`refresh` began longer ago than that, and none is on its way; it must follow then.

        A disk that hangs must not fill the lane with looks at it.
        """
        due = not self.refreshing and self._clock() - self._refreshed_s > after_s
        self.refreshing |= due
        return due
