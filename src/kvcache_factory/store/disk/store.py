"""The disk store: rows of the index on one side, slots of segments on the other, whole images in between."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...block.spec import BlockSpec, round_up
from ...errors import CapacityError, ConfigError, StoreError
from ..base import Changes, Entries, LastingStore, Mask, Places, SlotMemory, Slots
from . import log, segment
from .aio import SlotFile, probe_direct, reason_of
from .directory import Directory
from .health import Health
from .images import Images, describe, zeros
from .pool import Pool, Seen, SizeClass, budget_error, places
from .segment import Segment, SlotNumbers

SEGMENT_BYTES = 256 << 20
_MOST_SEGMENTS = 512
NOWHERE = -1


class DiskStore(LastingStore):
    """Blocks in a directory of the local disk.

    Any number of processes of one machine use the directory at once: each writes its own segments, reads all, and
    takes over those of a process that has died.

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
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if direct not in ("auto", "never"):
            raise ConfigError(f"direct must be 'auto' or 'never', not {direct!r}")
        self.directory = Directory(path)
        self.budget_bytes = budget_bytes
        self.segment_bytes = segment_bytes
        self.direct = direct
        self._clock, self._now_ns = clock, now_ns
        self._pool: Pool | None = None
        self._spec: BlockSpec | None = None
        self._use_direct = False
        self._places: Places = np.empty(0, np.int64)
        self._look_lock = threading.Lock()
        self._zeros = memoryview(b"")

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, spec: BlockSpec, slots: int) -> None:
        """Use the directory for blocks of *spec*, of which the index has *slots* rows.

        Raises CapacityError for a budget below one segment, ConfigError for a directory that cannot be used, StoreError
        when the disk fails.
        """
        assert self._pool is None, "the store is open"
        size = self._size_class(spec)
        if self.budget_bytes < size.bytes:
            raise CapacityError(budget_error(self.budget_bytes, size))
        self.directory.prepare()
        health = Health(self._clock)
        try:
            pool = Pool(self.directory, size, self.budget_bytes, health, self._now_ns)
        except OSError as error:
            raise self.directory.refusal(error) from error
        probe = f"kvcache-factory.probe-{pool.presence.name}"
        self._use_direct = self.direct == "auto" and probe_direct(self.directory.path, probe)
        self._places = np.full(slots, NOWHERE, np.int64)
        self._zeros = zeros(size.slot_bytes)
        self._spec, self._pool = spec, pool

    def _size_class(self, spec: BlockSpec) -> SizeClass:
        nominal = max(self.segment_bytes, round_up(self.budget_bytes // _MOST_SEGMENTS, 1 << 20))
        return SizeClass.within(spec.slot_bytes, spec.block_tokens, nominal)

    def smallest_budget(self, spec: BlockSpec) -> int:
        """Bytes of the smallest budget that works for *spec*."""
        return SizeClass.within(spec.slot_bytes, spec.block_tokens, self.segment_bytes).bytes

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
        """Take over what dead processes left, and return everything that is there; more than the budget is removed."""
        changes = self.refresh()
        pool = self._open
        if pool.used_bytes <= pool.budget or not pool.shrink():
            return changes.fresh
        kept = np.isin(changes.fresh.places >> 32, list(pool.segments))
        return Entries(*(getattr(changes.fresh, name)[kept] for name in Entries.__struct_fields__))

    def bind(self, rows: Slots, places: Places) -> Mask:
        assert len(rows) == len(places)
        pool = self._open
        bound = np.zeros(len(rows), np.bool_)
        unwanted: list[tuple[Segment, SlotNumbers]] = []
        for one, at, slots in self._by_segment(places):
            with pool.lock:
                self._make_rows(rows[at])
                here = (one.state[slots] == segment.USED) & (one.rows[slots] < 0)
                keep = here & (rows[at] >= 0)
                one.rows[slots[keep]] = rows[at[keep]]
                self._places[rows[at[keep]]] = places[at[keep]]
                bound[at[keep]] = True
                drop = slots[here & ~keep]
                if one.owned and len(drop):
                    one.state[drop] = segment.BUSY
                    unwanted.append((one, drop))
        for one, drop in unwanted:
            self._give_back(one, drop)
        return bound

    def refresh(self) -> Changes:
        """See the contract; while the directory cannot be read, every row is still where it was."""
        pool = self._open
        with self._look_lock:
            try:
                seen = pool.look()
            except OSError as error:
                seen = self._look_failed(pool, error)
            adopted = [one.rows[one.rows >= 0] for one in seen.adopted]
            return Changes(self._rows_gone(pool, seen), _joined(adopted), self._entries(seen))

    def _look_failed(self, pool: Pool, error: OSError) -> Seen:
        pool.health.failed(f"cannot look at {self.directory.path}", error)
        return pool.lose_all() if reason_of(error) == "gone" else Seen([], [], [])

    def _rows_gone(self, pool: Pool, seen: Seen) -> Slots:
        gone = []
        with pool.lock:
            for one, slots in seen.gone:
                rows = one.rows[slots]
                one.rows[slots] = -1
                rows = rows[rows >= 0]
                self._places[rows] = NOWHERE
                gone.append(rows)
        return _joined(gone)

    def _entries(self, seen: Seen) -> Entries:
        records = np.concatenate([r for _, r in seen.fresh]) if seen.fresh else np.empty(0, log.RECORD)
        at = [places(one.number, r["slot"].astype(np.int64)) for one, r in seen.fresh]
        owned = [np.full(len(r), one.owned) for one, r in seen.fresh]
        return Entries(
            keys=np.ascontiguousarray(records["key"]),
            parents=np.ascontiguousarray(records["parent"]),
            identities=np.ascontiguousarray(records["identity"]),
            extras=np.ascontiguousarray(records["extras"]),
            depth=np.ascontiguousarray(records["depth"]),
            time_ns=np.ascontiguousarray(records["time_ns"]),
            fidelity=np.ascontiguousarray(records["fidelity"]),
            layout=np.ascontiguousarray(records["layout"]),
            owned=np.concatenate(owned) if owned else np.empty(0, np.bool_),
            places=np.concatenate(at) if at else np.empty(0, np.int64),
        )

    def present(self, rows: Slots) -> Mask:
        found: Mask = self._places_of(rows) != NOWHERE
        return found

    def owned(self, rows: Slots) -> Mask:
        return np.isin(self._places_of(rows) >> 32, [one.number for one in self._open.own()])

    def room(self) -> int:
        return self._open.room()

    # -- moving images ------------------------------------------------------------------------------------------------

    def write(
        self,
        slots: Slots,
        source: SlotMemory,
        source_slots: Slots,
        source_offset: int,
        *,
        depths: npt.NDArray[np.int32] | None = None,
    ) -> int:
        """Write whole images, header included, data first and then the log; *depths* are hints for those who scan.

        Returns how many of the leading rows were written; StoreError, with a reason, when none was (``full``: nothing
        free and no budget).
        """
        pool = self._open
        if not len(slots):
            return 0
        pool.health.check()
        done = 0
        while done < len(slots):
            try:
                images = Images(source, source_slots[done:], source_offset)
                count = self._write_part(pool, slots[done:], images, _part(depths, done))
            except (OSError, StoreError) as error:
                failure = pool.health.failed(f"cannot write to {self.directory.path}", error)
                if done:
                    break
                raise failure from error
            if not count:
                break
            done += count
        if not done:
            pool.health.count("full")
            raise StoreError(f"{self.directory.path} is full: nothing is free, and the budget is used up", "full")
        return done

    def _write_part(self, pool: Pool, rows: Slots, images: Images, depths: npt.NDArray[np.int32] | None) -> int:
        """Write to one segment; returns how many rows were, 0 when nothing is free."""
        taken = pool.take(len(rows))
        if taken is None:
            return 0
        one, slots = taken
        done = 0
        try:
            done = self._move(one, slots, images.views(0, len(slots), one.slot_bytes), write=True)
            records = describe(images.headers(done), slots[:done], self._now_ns(), _part(depths, 0, done))
            one.append(records)
        except OSError as error:
            with pool.lock:
                bad = slots[:1] if reason_of(error) == "eio" else slots[:0]
                one.release(slots[len(bad) :])
                one.state[bad] = segment.BAD
            raise
        with pool.lock:
            one.release(slots[done:])
            self._make_rows(rows[:done])
            before = self._places[rows[:done]]
            one.fill(slots[:done], rows[:done], records)
            self._places[rows[:done]] = places(one.number, slots[:done])
        self._free_places(before[before != NOWHERE])
        return done

    def read(self, slots: Slots, target: SlotMemory, target_slots: Slots, target_offset: int) -> int:
        """Read whole images into *target_slots*; the caller verifies them.

        Returns how many of the leading rows were read: fewer at a row that has no place any more or cannot be read.
        """
        pool = self._open
        images = Images(target, target_slots, target_offset)
        runs = self._begin_read(pool, slots, target.slot_bytes - target_offset)
        done = 0
        try:
            for one, at in runs:
                count = self._move(one, at, images.views(done, len(at), one.slot_bytes), write=False)
                done += count
                if count < len(at):
                    pool.health.count("short_read")
                    break
        except OSError as error:
            pool.health.count(reason_of(error))
        finally:
            with pool.lock:
                for one, at in runs:
                    one.end_read(at)
        return done

    def _begin_read(self, pool: Pool, rows: Slots, slot_bytes: int) -> list[tuple[Segment, SlotNumbers]]:
        """The leading rows that have a place, as runs of one segment each; their slots are not reused meanwhile."""
        with pool.lock:
            at = self._places_of(rows)
            at = at[: int((at == NOWHERE).argmax())] if (at == NOWHERE).any() else at
            runs = []
            numbers = at >> 32
            cuts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
            for part in np.split(at, cuts) if len(at) else []:
                one = pool.segments.get(int(part[0] >> 32))
                if one is None or one.slot_bytes > slot_bytes:
                    break
                slots = part & 0xFFFFFFFF
                np.add.at(one.readers, slots, 1)
                runs.append((one, slots))
            return runs

    def _move(self, one: Segment, slots: SlotNumbers, images: Sequence[memoryview], *, write: bool) -> int:
        """Move images to or from *slots*, neighbours in one call; leading images moved.  OSError when none was."""
        path = self.directory.data_path(one.number)
        done = 0
        with SlotFile(path, write=write, direct=self._use_direct) as file:
            call = file.write if write else file.read
            for first, last in _runs(slots):
                try:
                    count = call(int(slots[first]) * one.slot_bytes, images[first:last])
                except OSError:
                    if not done:
                        raise
                    break
                done += count
                if count < last - first:
                    break
        return done

    # -- letting go ---------------------------------------------------------------------------------------------------

    def free(self, rows: Slots) -> None:
        self._free_places(self._forget(rows))

    def erase(self, rows: Slots) -> int:
        """See the contract.  Blocks of live other processes cannot be overwritten: they are forgotten here."""
        pool, at = self._open, self._forget(rows)
        erased = 0
        for one, _, slots in self._by_segment(at):
            if one.owned:
                try:
                    count = self._move(one, slots, [self._zeros[: one.slot_bytes]] * len(slots), write=True)
                    one.sync()
                    erased += count
                except OSError as error:
                    pool.health.failed(f"cannot erase blocks in {self.directory.path}", error)
        self._free_places(at)
        return erased

    def quarantine(self, rows: Slots) -> None:
        at = self._forget(rows)
        self._open.health.count("quarantined", len(at))
        self._free_places(at, segment.BAD)

    def _make_rows(self, rows: Slots) -> None:
        """Have a place for each of *rows*, however many the index has become; hold the lock."""
        more = int(rows.max(initial=-1)) + 1 - len(self._places)
        if more > 0:
            room = np.full(max(more, len(self._places) // 2, 1024), NOWHERE, np.int64)
            self._places = np.concatenate((self._places, room))

    def _places_of(self, rows: Slots) -> Places:
        """Where *rows* are; hold the lock where that may change meanwhile."""
        known = self._places
        at = np.full(len(rows), NOWHERE, np.int64)
        inside = rows < len(known)
        at[inside] = known[rows[inside]]
        return at

    def _forget(self, rows: Slots) -> Places:
        """Take their places from *rows*; the slots are out of use from now on, but not yet free."""
        with self._open.lock:
            at = self._places_of(rows)
            self._places[rows[at != NOWHERE]] = NOWHERE
            taken: Places = at[at != NOWHERE]
            return taken

    def _free_places(self, at: Places, state: int = segment.FREE) -> None:
        pool = self._open
        for one, _, slots in self._by_segment(at):
            with pool.lock:
                one.rows[slots] = -1
                if one.owned:
                    one.state[slots] = segment.BUSY
            if one.owned:
                self._give_back(one, slots, state)

    def _give_back(self, one: Segment, slots: SlotNumbers, state: int = segment.FREE) -> None:
        """Say in the log that *slots* hold nothing any more, and only then let them be used again."""
        pool = self._open
        try:
            one.append(log.make(log.Kind.FREE, slots))
        except OSError as error:  # whoever still believes the old record reads a block that proves to be another
            pool.health.count(reason_of(error))
        with pool.lock:
            if state == segment.FREE:
                one.release(slots)
            else:
                one.state[slots] = state

    def reassign(self) -> bool:
        pool = self._open
        try:
            return pool.remove_empty([s for s in pool.own() if s.slot_bytes != pool.size.slot_bytes], grow=True)
        except (OSError, StoreError) as error:
            pool.health.failed(f"cannot reassign a segment of {self.directory.path}", error)
            return False

    def fullest_other_class(self) -> Slots:
        pool = self._open
        with pool.lock:
            others = [s for s in pool.own() if s.slot_bytes != pool.size.slot_bytes]
            return _rows_of(min(others, key=lambda s: s.num_used)) if others else _joined([])

    def surplus(self) -> Slots:
        """See the contract: the rows of the coldest segment, which is removed once they are freed."""
        pool = self._open
        if not pool.must_yield():
            for one in pool.own():
                one.leaving = False
            return _joined([])
        try:
            pool.remove_empty(pool.own())
        except (OSError, StoreError) as error:
            pool.health.failed(f"cannot remove a segment of {self.directory.path}", error)
        own = pool.own()
        if not own or not pool.must_yield():
            return _joined([])
        coldest = min(own, key=lambda s: (not s.leaving, s.mean_time_ns))
        coldest.leaving = True
        with pool.lock:
            return _rows_of(coldest)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def live_processes(self) -> list[int]:
        """Process ids of those that use the directory, this one first."""
        return [os.getpid(), *(process.pid for process in self._open.others)]

    def stats(self) -> dict[str, Any]:
        """What is there and what went wrong, as plain data."""
        pool = self._open
        own = pool.own()
        return {
            "path": str(self.directory.path),
            "budget_bytes": pool.budget,
            "used_bytes": pool.used_bytes,
            "owned_bytes": pool.owned_bytes,
            "segments": len(pool.segments),
            "owned_segments": len(own),
            "free_slots": sum(s.num_free for s in pool.ours()),
            "processes": len(pool.others) + 1,
            "io": "direct" if self._use_direct else "buffered",
            "reasons": dict(pool.health.reasons),
        }

    def close(self) -> None:
        """Let go of segments and files, which stay for whoever comes next; idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
            self._places = np.empty(0, np.int64)

    def _by_segment(self, at: Places) -> Iterator[tuple[Segment, npt.NDArray[np.int64], SlotNumbers]]:
        """Segments that are still there, with the positions in *at* and the slots that are theirs."""
        numbers = at >> 32
        for number in np.unique(numbers):
            one = self._open.segments.get(int(number))
            if one is not None:
                mine = np.flatnonzero(numbers == number)
                yield one, mine, at[mine] & 0xFFFFFFFF


def _runs(slots: SlotNumbers) -> Iterator[tuple[int, int]]:
    """Bounds of the runs of neighbours in *slots*."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    edges = [0, *cuts.tolist(), len(slots)]
    yield from ((a, b) for a, b in itertools.pairwise(edges) if b > a)


def _part(depths: npt.NDArray[np.int32] | None, start: int, stop: int | None = None) -> npt.NDArray[np.int32] | None:
    return None if depths is None else depths[start:stop]


def _rows_of(one: Segment) -> Slots:
    rows: Slots = one.rows[(one.state == segment.USED) & (one.rows >= 0)]
    return rows


def _joined(rows: list[Slots]) -> Slots:
    return np.concatenate(rows) if rows else np.empty(0, np.int32)
