"""One segment: a data file of equal slots, the log beside it, and what this process knows of both.

Whoever holds the lock of the log owns the segment: only the owner writes slots and records.  The lock goes with the
process, however that ends, and the next process that tries gets it.  Methods that touch files take no part in the
store's lock; methods that touch columns expect it to be held.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import FormatError
from . import log
from .aio import SlotFile, allocate
from .directory import Directory, Holder, is_still, open_private, try_lock, unfinished_log

FREE, USED, BUSY, DRAINING, BAD = 0, 1, 2, 3, 4
"""States of a slot: free, holds a block, being written, freed but still being read, not to be used in this run."""

SlotNumbers = npt.NDArray[np.int64]


class Poll(msgspec.Struct, frozen=True):
    """What a look at a log has found: new records, or all of them where the log is another file than before."""

    tail: log.Tail
    whole: bool
    adopted: bool


class Segment(Holder):
    """A segment of this process, or another's as seen from here; made by :func:`create` and :func:`attach`."""

    def __init__(self, directory: Directory, header: log.LogHeader, data_bytes: int) -> None:
        super().__init__()
        self._fd = -1
        self.directory = directory
        self.header = header
        self.number = header.number
        self.slot_bytes = header.slot_bytes
        self.slots = min(header.slots, data_bytes // header.slot_bytes)
        self.bytes = data_bytes + 2 * header.file_bytes
        self.state = np.zeros(self.slots, np.uint8)
        self.rows = np.full(self.slots, -1, np.int32)
        self.readers = np.zeros(self.slots, np.int32)
        self.aside = np.zeros(self.slots, np.bool_)
        self.marks = np.zeros(self.slots, np.uint64)
        self.time_ns = np.zeros(self.slots, np.int64)
        self.num_free = self.slots
        self.owned = False
        self.leaving = False
        self.damaged = 0
        self._inode = 0
        self._position = 0
        self._log_lock = threading.Lock()

    # -- files --------------------------------------------------------------------------------------------------------

    def poll(self) -> Poll:
        """Look at the log of a segment that is not ours, and take the segment over if its owner is dead.

        Raises OSError, FileNotFoundError where the segment has been removed.
        """
        path = self.directory.log_path(self.number)
        fd, can_write = _open_log(path)
        try:
            status = os.fstat(fd)
            mine = can_write and try_lock(fd) and is_still(fd, path)
            whole = status.st_ino != self._inode
            tail = log.read_from(fd, self.number, 0 if whole else self._position, status.st_size)
            self._inode, self._position = status.st_ino, tail.position
            if mine:
                self._become_owner(fd)
                fd = -1
            return Poll(tail, whole, mine)
        finally:
            if fd >= 0:
                os.close(fd)

    def _become_owner(self, fd: int) -> None:
        self._fd, self.owned = fd, True
        unfinished_log(self.directory.log_path(self.number)).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # says who it is to those who look; nothing depends on it
            self.append(_owner_record())

    def append(self, records: log.Records) -> None:
        """Write *records* behind the others, compacting first where they do not fit; raises OSError."""
        with self._log_lock:
            if self._position + len(records) > log.capacity(self.header.slots):
                self._compact()
            log.seal(records, self.number)
            _write_all(self._fd, records.tobytes(), log.HEADER_BYTES + self._position * log.RECORD_BYTES)
            self._position += len(records)

    def _compact(self) -> None:
        """Replace the log by one that holds only what is live; readers notice that it is another file."""
        size = os.fstat(self._fd).st_size
        records = log.live(log.read_from(self._fd, self.number, 0, size).records, self.slots)
        path = self.directory.log_path(self.number)
        fd = _write_log(path, self.header, np.concatenate((_owner_record(), records)))
        os.close(self._fd)
        self._fd, self._inode, self._position = fd, os.fstat(fd).st_ino, len(records) + 1

    def move(self, slots: SlotNumbers, images: Sequence[memoryview], *, write: bool, direct: bool) -> int:
        """Write *images* to *slots* or read them from there, neighbours in one call.

        Returns how many of the leading images were moved; raises OSError when the first could not be.
        """
        done = 0
        with SlotFile(self.directory.data_path(self.number), write=write, direct=direct) as file:
            call = file.write if write else file.read
            for first, last in _runs(slots):
                try:
                    count = call(int(slots[first]) * self.slot_bytes, images[first:last])
                except OSError:
                    if not done:
                        raise
                    break
                done += count
                if count < last - first:
                    break
        return done

    def sync(self) -> None:
        """Wait until the data is on the disk; raises OSError."""
        fd = os.open(self.directory.data_path(self.number), os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Remove an own segment's files; hold the directory's lock.  The log goes first: without it, data is litter."""
        self.directory.log_path(self.number).unlink(missing_ok=True)
        self.directory.data_path(self.number).unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        fd, self._fd = self._fd, -1
        self.owned = False
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.let_go()

    # -- columns ------------------------------------------------------------------------------------------------------

    def apply(self, poll: Poll) -> tuple[SlotNumbers, log.Records]:
        """Take in what a look has found; returns slots whose block is gone, and records of blocks that are new."""
        self.damaged += poll.tail.damaged
        records = log.live(poll.tail.records, self.slots)
        slots = records["slot"].astype(np.int64)
        marks = records["key"][:, 0] ^ records["time_ns"].astype(np.uint64)
        known = (self.state[slots] == USED) & (self.marks[slots] == marks)
        kept = np.zeros(self.slots, np.bool_)
        kept[slots[known]] = True
        said = np.arange(self.slots) if poll.whole else log.said(poll.tail.records, self.slots)
        gone = said[(self.state[said] == USED) & ~kept[said]]
        self.state[gone] = FREE
        fresh, at = records[~known], slots[~known]
        self.state[at] = USED
        self.marks[at] = marks[~known]
        self.time_ns[at] = fresh["time_ns"]
        self.num_free = int(np.count_nonzero(self.state == FREE))
        return gone, fresh

    def take(self, count: int) -> SlotNumbers:
        """Take up to *count* free slots for writing, neighbours where there are enough."""
        free = np.flatnonzero(self.state == FREE)
        if len(free) > count:
            span = free[count - 1 :] - free[: len(free) - count + 1]
            start = int(span.argmin())
            free = free[start : start + count]
        self.state[free] = BUSY
        self.num_free -= len(free)
        return free

    def fill(self, slots: SlotNumbers, rows: npt.NDArray[np.int32], records: log.Records) -> None:
        """Note that slots which were taken hold the blocks of *rows* now."""
        self.state[slots] = USED
        self.rows[slots] = rows
        self.marks[slots] = records["key"][:, 0] ^ records["time_ns"].astype(np.uint64)
        self.time_ns[slots] = records["time_ns"]

    def release(self, slots: SlotNumbers) -> None:
        """Make slots free, or have the last reader do it."""
        self.rows[slots] = -1
        reading = self.readers[slots] > 0
        self.state[slots[reading]] = DRAINING
        self.state[slots[~reading]] = FREE
        self.num_free += int(np.count_nonzero(~reading))

    def set_aside(self, slots: SlotNumbers) -> SlotNumbers:
        """Keep slots from being used again; returns those that nobody reads.  The last reader has the others."""
        self.rows[slots] = -1
        reading = self.readers[slots] > 0
        self.state[slots[reading]] = DRAINING
        self.aside[slots[reading]] = True
        return slots[~reading]

    def begin_read(self, slots: SlotNumbers) -> None:
        """Count one reader more for each of *slots* (no slot twice)."""
        self.readers[slots] += 1

    def end_read(self, slots: SlotNumbers) -> SlotNumbers:
        """Count one reader less for each of *slots* (no slot twice); returns those that were set aside until now."""
        self.readers[slots] -= 1
        drained = slots[(self.readers[slots] == 0) & (self.state[slots] == DRAINING)]
        kept = self.aside[drained]
        self.state[drained[~kept]] = FREE
        self.num_free += int(np.count_nonzero(~kept))
        self.state[drained[kept]] = BUSY
        self.aside[drained[kept]] = False
        waited: SlotNumbers = drained[kept]
        return waited

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept, written or read here."""
        return not np.isin(self.state, (USED, BUSY, DRAINING)).any() and not self.readers.any()

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return int(np.count_nonzero(self.state == USED))

    @property
    def mean_time_ns(self) -> float:
        """Mean time of the blocks, as far as a wall clock can say."""
        times = self.time_ns[self.state == USED]
        return float(times.mean()) if len(times) else 0.0


def create(directory: Directory, header: log.LogHeader) -> Segment:
    """Make a segment of our own; hold the directory's lock.  Raises OSError, and leaves nothing behind then."""
    data, path = directory.data_path(header.number), directory.log_path(header.number)
    size = header.slots * header.slot_bytes
    try:
        fd = open_private(data, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            allocate(fd, size)
        finally:
            os.close(fd)
        log_fd = _write_log(path, header, _owner_record())
    except BaseException:
        with contextlib.suppress(OSError):
            data.unlink()
        raise
    segment = Segment(directory, header, size)
    segment._fd, segment._inode, segment._position = log_fd, os.fstat(log_fd).st_ino, 1
    segment.owned = True
    return segment


def attach(directory: Directory, number: int) -> Segment:
    """A segment as the files describe it, not yet looked at; raises OSError, or FormatError for what is none."""
    fd = os.open(directory.log_path(number), os.O_RDONLY)
    try:
        header = log.LogHeader.unpack(os.pread(fd, log.HEADER_BYTES, 0))
    finally:
        os.close(fd)
    if header.number != number or not 0 < number < 2**31:
        raise FormatError(f"the log of segment {number:08x} was written for {header.number:08x}: a copy")
    return Segment(directory, header, directory.data_path(number).stat().st_size)


def _open_log(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR), True
    except FileNotFoundError:
        raise
    except OSError:  # a read-only mount or somebody else's file: it can still be read
        return os.open(path, os.O_RDONLY), False


def _write_log(path: Path, header: log.LogHeader, records: log.Records) -> int:
    """Put a whole log in the place of *path*, locked from its first moment, and return it open; raises OSError.

    Space for all records that it may ever hold is allocated now: a full disk must not keep a block from being freed.
    """
    unfinished = unfinished_log(path)
    fd = open_private(unfinished, os.O_CREAT | os.O_TRUNC | os.O_RDWR)
    try:
        allocate(fd, header.file_bytes)
        _write_all(fd, header.pack() + log.seal(records, header.number).tobytes(), 0)
        if not try_lock(fd):
            raise BlockingIOError(errno.EWOULDBLOCK, "the new log is locked by somebody else", str(unfinished))
        unfinished.replace(path)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return fd


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _owner_record() -> log.Records:
    record = log.make(log.Kind.OWNER, [0])
    record["depth"] = os.getpid()
    return record


def _runs(slots: SlotNumbers) -> Iterator[tuple[int, int]]:
    """Bounds of the runs of neighbours in *slots*."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    return ((a, b) for a, b in itertools.pairwise([0, *cuts.tolist(), len(slots)]) if b > a)
