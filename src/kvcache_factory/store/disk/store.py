"""The disk store: rows of the index on one side, slots of segments on the other, whole images in between."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...block.spec import BlockSpec
from ...errors import CapacityError, ConfigError, StoreError
from ..base import Changes, Entries, LastingStore, Mask, Places, SlotMemory, Slots
from . import segment
from .aio import probe, probe_direct, reason_of
from .directory import Directory
from .entries import joined, rows_gone, rows_in, to_entries
from .freeing import Freeing
from .health import Health
from .images import Images, describe
from .pool import Pool, Seen, SizeClass, smaller_classes
from .rows import NOWHERE, PlaceColumn, in_order, places, segments_of, slots_of
from .segment import Segment, SlotNumbers

SEGMENT_BYTES = 256 << 20
_MOST_SEGMENTS = 512
Depths = npt.NDArray[np.int32]


class DiskStore(LastingStore):
    """Blocks in a directory of the local disk.

    Any number of processes of one machine use the directory at once: each writes its own segments, reads all, and
    takes over those of a process that has died.  All methods are safe across threads once the store is open.

    Parameters
    ----------
    path:
        The directory; made when it is absent.
    budget_bytes:
        Hard cap on all files of the directory together, whoever wrote them.
    segment_bytes:
        Bytes of one segment; larger where a budget would otherwise make more than 512 of them.
    direct:
        ``auto`` goes past the page cache where a probe proves that it works, ``never`` does not try.
    encoded:
        Have slots of smaller sizes too, for images that were encoded.
    clock, now_ns:
        Seconds that only grow, for pauses; the wall clock in nanoseconds, for the order of entries.
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        direct: str = "auto",
        encoded: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if direct not in ("auto", "never"):
            raise ConfigError(f"direct must be 'auto' or 'never', not {direct!r}")
        self.directory = Directory(path)
        self.budget_bytes = budget_bytes
        self.segment_bytes = segment_bytes
        self.direct = direct
        self.encoded = encoded
        self._clock, self._now_ns = clock, now_ns
        self._pool: Pool | None = None
        self._spec: BlockSpec | None = None
        self._use_direct = self._tested = False
        self._rows = PlaceColumn(0)
        self._report: Callable[[str, int], object] = lambda *_: None
        self._look_lock = threading.Lock()
        self._freeing: Freeing

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, spec: BlockSpec, slots: int) -> None:
        """Use the directory for blocks of *spec*; *slots* is a guess at the rows of the index, which may become more.

        Raises CapacityError for a budget below one segment, ConfigError for a directory that cannot be used, StoreError
        when the disk fails.
        """
        assert self._pool is None, "the store is open"
        size, smaller = self._sizes(spec)
        if self.budget_bytes < size.bytes:
            raise CapacityError(size.refusal(self.budget_bytes))
        self.directory.prepare()
        try:
            health = Health(self._clock, self._report)
            pool = Pool(self.directory, size, self.budget_bytes, health, self._now_ns, smaller)
        except OSError as error:
            raise self.directory.refusal(error) from error
        name = f"kvcache-factory.probe-{pool.presence.name}"
        self._use_direct = self.direct == "auto" and probe_direct(self.directory.path, name)
        self._tested = self._use_direct or probe(self.directory.path, name, direct=False)
        self._rows = PlaceColumn(slots)
        self._freeing = Freeing(pool, size.slot_bytes, self._use_direct)
        self._spec, self._pool = spec, pool

    def _sizes(self, spec: BlockSpec) -> tuple[SizeClass, list[SizeClass]]:
        share = max(self.segment_bytes, self.budget_bytes // _MOST_SEGMENTS)
        smaller = smaller_classes(spec, share) if self.encoded else []
        return SizeClass.within(spec.slot_bytes, spec.block_tokens, share), smaller

    def slot_bytes(self, spec: BlockSpec) -> int:
        return spec.slot_bytes

    @property
    def memory(self) -> SlotMemory | None:
        return None

    @property
    def payload_offset(self) -> int:
        return self._spec.header_bytes if self._spec else 0

    @property
    def _open(self) -> Pool:
        assert self._pool is not None, "the store is not open"
        return self._pool

    # -- what is there ------------------------------------------------------------------------------------------------

    def scan(self) -> Entries:
        """Take over what dead processes left, and return everything that is there.

        Where that is more than the budget, whole segments are removed first, those with the oldest blocks.
        """
        fresh, pool = self.refresh().fresh, self._open
        try:
            removed = pool.shrink() if pool.used_bytes > pool.budget else 0
        except (OSError, StoreError) as error:
            pool.health.failed(f"cannot remove a segment of {self.directory.path}", error)
            removed = 1
        if not removed:
            return fresh
        kept = np.isin(segments_of(fresh.places), list(pool.segments))
        return Entries(*(getattr(fresh, name)[kept] for name in Entries.__struct_fields__))

    def bind(self, rows: Slots, places: Places) -> Mask:
        assert len(rows) == len(places)
        pool = self._open
        bound = np.zeros(len(rows), np.bool_)
        for one, at, slots in self._freeing.segments(places):
            with pool.lock:
                here = (one.state[slots] == segment.USED) & (one.rows[slots] < 0)
                keep = here & (rows[at] >= 0)
                one.rows[slots[keep]] = rows[at[keep]]
                self._rows.set(rows[at[keep]], places[at[keep]])
                bound[at[keep]] = True
                unwanted = slots[here & ~keep]
                if one.owned:
                    one.state[unwanted] = segment.BUSY
            if one.owned and len(unwanted):
                self._freeing.give_back(one, unwanted, segment.FREE)
        return bound

    def refresh(self) -> Changes:
        """See the contract.  While the directory cannot be read, every row is still where it was; one that is no longer
        there has taken all rows with it, those of our own included.
        """
        pool = self._open
        with self._look_lock:
            try:
                seen = pool.look()
            except OSError as error:
                pool.health.failed(f"cannot look at {self.directory.path}", error)
                seen = pool.lose_all() if reason_of(error) == "gone" else Seen([], [], [])
            with pool.lock:
                gone = rows_gone(seen)
                self._rows.clear(gone)
                adopted = joined([one.rows[one.rows >= 0] for one in seen.adopted])
            return Changes(gone, adopted, to_entries(seen))

    def present(self, rows: Slots) -> Mask:
        found: Mask = self._rows.of(rows) != NOWHERE
        return found

    def owned(self, rows: Slots) -> Mask:
        return np.isin(segments_of(self._rows.of(rows)), [one.number for one in self._open.own()])

    def room(self, image_bytes: int = 0) -> int:
        pool = self._open
        return pool.room(pool.class_of(image_bytes) if image_bytes else None)

    @property
    def stored_bytes(self) -> int:
        return self._open.stored_bytes

    # -- moving images ------------------------------------------------------------------------------------------------

    def write(
        self,
        slots: Slots,
        source: SlotMemory,
        source_slots: Slots,
        source_offset: int,
        *,
        depths: Depths | None = None,
        image_bytes: int = 0,
    ) -> int:
        """See the contract: data first and then the log, so that a record never speaks of what is not there yet.

        After a failure other than ``full``, the same error is raised at once for a second.
        """
        pool = self._open
        paused = pool.health.writing.error
        if paused is not None:
            raise paused
        images, done = Images(source, source_slots, source_offset), 0
        size = pool.class_of(image_bytes) if image_bytes else pool.whole
        while done < len(slots):
            try:
                count = self._write_part(pool, size, slots, images, depths, done)
            except OSError as error:
                failure = pool.health.failed(f"cannot write to {self.directory.path}", error)
                pool.health.writing.begin(failure)
                if not done:
                    raise failure from error
                break
            if not count:
                break
            done += count
        if len(slots) and not done:
            raise self._full(pool)
        return done

    def _full(self, pool: Pool) -> StoreError:
        why = pool.health.growing.error
        if why is not None:
            return why
        pool.health.count("full")
        return StoreError(f"{self.directory.path} is full: nothing is free, and the budget is used up", "full")

    def _write_part(
        self, pool: Pool, size: SizeClass, rows: Slots, images: Images, depths: Depths | None, start: int
    ) -> int:
        """Write the rows from number *start* on to one segment; returns how many were, 0 when nothing is free."""
        taken = pool.take(len(rows) - start, size)
        if taken is None:
            return 0
        one, slots = taken
        try:
            views = images.views(start, len(slots), one.slot_bytes)
            done = one.move(slots, views, write=True, direct=self._use_direct)
            part = slice(start, start + done)
            records = describe(images.headers(part), slots[:done], self._now_ns())
            if depths is not None:
                records["depth"] = depths[part]
            one.append(records)
        except OSError as error:
            with pool.lock:
                bad = slots[:1] if reason_of(error) == "eio" else slots[:0]
                one.release(slots[len(bad) :])
                one.state[bad] = segment.BAD
            raise
        with pool.lock:
            one.release(slots[done:])
            one.fill(slots[:done], rows[part], records)
            before = self._rows.set(rows[part], places(one.number, slots[:done]))
        # Whoever purges these rows later finds their new places only.
        self._freeing.let_go(before[before != NOWHERE], blank=True)
        return done

    def read(self, slots: Slots, target: SlotMemory, target_slots: Slots, target_offset: int) -> int:
        """Read whole images into *target_slots*; the caller verifies them.

        Returns how many of the leading rows were read: fewer at a row that has no place any more or cannot be read.
        Raises StoreError, with the reason that is counted, when the first cannot.
        """
        pool, images = self._open, Images(target, target_slots, target_offset)
        parts = self._begin_read(pool, slots, target.slot_bytes - target_offset)
        done, reason = 0, ""
        try:
            for one, at in parts:
                views = images.views(done, len(at), one.slot_bytes)
                count = one.move(at, views, write=False, direct=self._use_direct)
                done += count
                if count < len(at):
                    reason = "short_read"
                    break
        except OSError as error:
            reason = reason_of(error)
        finally:
            self._freeing.end_read(parts)
        pool.health.count(reason, bool(reason))
        if reason and not done:
            raise StoreError(f"blocks cannot be read from {pool.directory.path}: {reason}", reason)
        return done

    def _begin_read(self, pool: Pool, rows: Slots, slot_bytes: int) -> list[tuple[Segment, SlotNumbers]]:
        """The leading rows that have a place, cut where the segment changes; their slots are not reused meanwhile."""
        parts = []
        with pool.lock:
            at = self._rows.of(rows)
            lost = at == NOWHERE
            for part in in_order(at[: int(lost.argmax())] if lost.any() else at):
                one = pool.segments.get(int(segments_of(part[:1])[0]))
                if one is None or one.slot_bytes > slot_bytes:
                    break
                one.begin_read(slots_of(part))
                parts.append((one, slots_of(part)))
        return parts

    # -- letting go ---------------------------------------------------------------------------------------------------

    def free(self, rows: Slots) -> None:
        self._freeing.let_go(self._forget(rows))

    def erase(self, rows: Slots) -> int:
        """See the contract.  Blocks of live other processes cannot be overwritten: they are forgotten here."""
        return self._freeing.erase(self._forget(rows))

    def quarantine(self, rows: Slots) -> None:
        at = self._forget(rows)
        self._open.health.count("quarantined", len(at))
        self._freeing.let_go(at, segment.BAD)

    def _forget(self, rows: Slots) -> Places:
        """Take their places from *rows*; nobody begins to read them any more, but they are not free yet."""
        with self._open.lock:
            return self._rows.clear(rows)

    def reassign(self, image_bytes: int = 0) -> bool:
        pool = self._open
        size = pool.class_of(image_bytes) if image_bytes else pool.size
        try:
            return pool.remove_empty(pool.of_other_sizes(size), grow=size)
        except (OSError, StoreError) as error:
            pool.health.failed(f"cannot reassign a segment of {self.directory.path}", error)
            return False

    def fullest_other_class(self, image_bytes: int = 0) -> Slots:
        pool = self._open
        with pool.lock:
            others = pool.of_other_sizes(pool.class_of(image_bytes) if image_bytes else None)
            return rows_in(min(others, key=lambda s: s.num_used)) if others else joined([])

    def surplus(self) -> Slots:
        """See the contract: the rows of the coldest segment, which is removed once they are freed."""
        pool = self._open
        try:
            if pool.must_yield():
                pool.remove_empty(pool.own())
        except (OSError, StoreError) as error:
            pool.health.failed(f"cannot remove a segment of {self.directory.path}", error)
        coldest = pool.choose_leaving()
        with pool.lock:
            return rows_in(coldest) if coldest is not None else joined([])

    # -- the rest -----------------------------------------------------------------------------------------------------

    def live_processes(self) -> list[int]:
        """Process ids of those that use the directory, this one first."""
        return [os.getpid(), *(process.pid for process in self._open.others)]

    def report_to(self, count: Callable[[str, int], object]) -> None:
        self._report = count

    def figures(self) -> dict[str, Any]:
        pool = self._pool
        if pool is None:
            return {}
        pauses = {"write": pool.health.writing, "grow": pool.health.growing}
        return {
            "fragmentation": pool.lost_bytes(),
            "breakers": {name: pause.error is not None for name, pause in pauses.items()},
            "self_test": self._tested,
            "writable": os.access(self.directory.path, os.W_OK) and pool.health.writing.error is None,
        }

    def stats(self) -> dict[str, Any]:
        """What is there and what went wrong, as plain data."""
        pool = self._open
        return {
            "path": str(self.directory.path),
            "io": "direct" if self._use_direct else "buffered",
            "processes": len(pool.others) + 1,
            **pool.stats(),
            "reasons": dict(pool.health.reasons),
        }

    def close(self) -> None:
        """Let go of segments and files, which stay for whoever comes next; idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
            self._rows = PlaceColumn(0)
