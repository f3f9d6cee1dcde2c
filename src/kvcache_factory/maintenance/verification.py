"""``verify``: read every block of a directory and compare it with its own checksums and with the log that names it."""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ..block.envelope import HeaderError, checksum, unpack_header
from ..block.spec import HEADER_FIXED, PAGE, Layout, round_up
from ..errors import FormatError
from ..store.disk import log, segment
from ..store.disk.aio import BATCH_BYTES, reason_of
from ..store.disk.directory import Directory
from ..store.disk.images import OTHER_LAYOUT
from .survey import SegmentView, Survey

Row = dict[str, Any]
Progress = Callable[..., None]
_LOOKS, _PAUSE_S = 3, 0.05


class Findings(msgspec.Struct):
    """What reading the blocks of one segment has shown: the slots that are bad, each with the reason."""

    bad: dict[int, str]
    changed: int = 0
    read: int = 0


def verify_rows(seen: Survey, *, quarantine: bool = False, progress: Progress) -> list[Row]:
    """Read everything in the directory; a row for each segment.

    Rows: ``segment``, ``owner``, ``blocks`` (named by the log), ``bytes`` (read), ``bad``, ``changed`` (rewritten or
    freed while we read: neither good nor bad), ``damaged_records``, ``quarantined``, ``reasons`` (words with counts)
    and ``trouble`` (why the segment as a whole could not be read, or empty).

    With *quarantine*, bad blocks are freed in the logs of segments that no living process owns.
    """
    total = max(sum(len(one.records) * one.slot_bytes for one in seen.whole), 1)
    done, rows = 0, []
    for one in seen.segments:
        found = check_segment(seen.directory, one, partial(_tell, progress, done, total))
        freed = set_aside(seen.directory, one, found) if quarantine and found.bad else 0
        done += len(one.records) * one.slot_bytes
        progress(done, total, "reading")
        rows.append(_row(one, found, freed))
    return rows


def _tell(progress: Progress, before: int, total: int, now: int) -> None:
    progress(before + now, total, "reading")


def is_good(row: Row) -> bool:
    """Whether nothing is wrong with the segment of a row of :func:`verify_rows`."""
    return not (row["bad"] or row["damaged_records"] or row["trouble"])


def _row(one: SegmentView, found: Findings, freed: int) -> Row:
    reasons = Counter(found.bad.values())
    return {
        "segment": one.name,
        "owner": "live" if one.live else "dead",
        "blocks": len(one.records),
        "bytes": found.read,
        "bad": len(found.bad),
        "changed": found.changed,
        "damaged_records": one.damaged,
        "quarantined": freed,
        "reasons": ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())),
        "trouble": one.trouble,
    }


def check_segment(directory: Directory, one: SegmentView, progress: Callable[[int], None]) -> Findings:
    """Read all blocks of a segment; those that look bad are looked at again, for their owner may be at work."""
    found = Findings({})
    if one.header is None or not len(one.records):
        return found
    try:
        files = segment.attach(directory, one.number)
    except FileNotFoundError:
        return Findings({}, changed=len(one.records))
    except (OSError, FormatError) as error:
        one.trouble = str(error)
        return found
    records = one.records[np.argsort(one.records["slot"])]
    with _buffers(files.slot_bytes) as buffers:
        for at in range(0, len(records), len(buffers)):
            batch = records[at : at + len(buffers)]
            found.bad.update(_check_batch(files, batch, buffers))
            found.read += len(batch) * files.slot_bytes
            progress(found.read)
        _look_again(files, records, buffers, found)
    return found


@contextmanager
def _buffers(slot_bytes: int) -> Iterator[list[memoryview]]:
    """Page-aligned memory for the slots of one call."""
    count = max(1, BATCH_BYTES // slot_bytes)
    memory = mmap.mmap(-1, count * slot_bytes)
    whole = memoryview(memory)
    views = [whole[i * slot_bytes : (i + 1) * slot_bytes] for i in range(count)]
    try:
        yield views
    finally:
        for view in (*views, whole):
            view.release()
        memory.close()


def _check_batch(files: segment.Segment, records: log.Records, buffers: list[memoryview]) -> dict[int, str]:
    """The bad slots among *records*, each with a reason; blocks behind one that cannot be read are still read."""
    slots, bad, at = records["slot"].astype(np.int64), {}, 0
    while at < len(slots):
        count, reason = _read(files, slots[at:], buffers[at : len(slots)])
        for i in range(at, at + count):
            reason_i = check_image(buffers[i], records[i : i + 1])
            if reason_i:
                bad[int(slots[i])] = reason_i
        at += count
        if at < len(slots):
            bad[int(slots[at])] = reason or "short_read"
            at += 1
    return bad


def _read(files: segment.Segment, slots: segment.SlotNumbers, buffers: list[memoryview]) -> tuple[int, str]:
    """How many leading slots were read, past the page cache where that works, and why not more."""
    reason = ""
    for direct in (True, False):
        try:
            return files.move(slots, buffers, write=False, direct=direct), ""
        except OSError as error:
            reason = reason_of(error)
    return 0, reason


def check_image(image: memoryview, record: log.Records) -> str:
    """Empty where *image* is whole and the block that *record* (one) names; else the reason in one word."""
    try:
        header = unpack_header(image)
    except HeaderError as error:
        return error.reason.value
    told = [record[name][0].tobytes() for name in ("identity", "key", "parent", "extras")]
    layout = Layout.named(header.layout)
    number = layout.code if layout is not None else OTHER_LAYOUT
    shown = [header.identity_digest, header.key, header.parent_key, header.extras]
    if told != shown or (number, int(header.fidelity)) != (int(record["layout"][0]), int(record["fidelity"][0])):
        return "record"
    start = round_up(HEADER_FIXED + 4 * len(header.tokens), PAGE)
    if start + header.payload_bytes > len(image):
        return "size"
    return "" if checksum(image[start : start + header.payload_bytes]) == header.payload_checksum else "payload"


def _look_again(files: segment.Segment, records: log.Records, buffers: list[memoryview], found: Findings) -> None:
    """Acquit slots that were rewritten or freed meanwhile: their log says something else by now."""
    for _ in range(_LOOKS):
        suspects = records[np.isin(records["slot"], list(found.bad))]
        if not len(suspects):
            return
        now = _log_of(files)
        same = np.array([_same(now, suspect) for suspect in suspects], np.bool_)
        for slot in suspects["slot"][~same].tolist():
            del found.bad[slot]
        found.changed += int(np.count_nonzero(~same))
        for suspect in suspects[same]:
            record = suspects[suspects["slot"] == suspect["slot"]]
            if not _check_batch(files, record, buffers):
                del found.bad[int(suspect["slot"])]
        time.sleep(_PAUSE_S if found.bad else 0)


def _log_of(files: segment.Segment) -> log.Records:
    """What the log of a segment says now; nothing where it was removed."""
    try:
        fd = os.open(files.directory.log_path(files.number), os.O_RDONLY)
    except FileNotFoundError:
        return np.empty(0, log.RECORD)
    try:
        tail = log.read_from(fd, files.number, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    return log.live(tail.records, files.slots)


def _same(now: log.Records, suspect: np.void) -> bool:
    record = now[now["slot"] == suspect["slot"]]
    return len(record) == 1 and record[0].tobytes() == suspect.tobytes()


def set_aside(directory: Directory, one: SegmentView, found: Findings) -> int:
    """Free the bad blocks of a segment in its log, so that nobody reads them again; 0 where somebody owns it."""
    try:
        files = segment.attach(directory, one.number)
        poll = files.poll()
    except (OSError, FormatError):
        return 0
    try:
        if not poll.adopted:
            return 0
        now = log.live(poll.tail.records, files.slots)
        slots = [s for s in found.bad if any(_same(now, r) for r in one.records[one.records["slot"] == s])]
        files.append(log.make(log.Kind.FREE, slots))
        return len(slots)
    finally:
        files.let_go()
