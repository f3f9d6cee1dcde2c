"""The metadata log of one segment: fixed-size records that say what is in which slot; ``docs/format.md`` section 7.

The log is a hint.  Headers and payloads prove themselves when they are read, so a record that was lost costs a miss and
a record that lies costs a read.  Each record carries its own checksum, mixed with the number of its segment: what is
torn, damaged or from elsewhere is passed over, whatever stands around it.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ...block.spec import PAGE
from ...errors import FormatError

MAGIC = b"KVCFSLOG"
LOG_VERSION = 1


class Kind(IntEnum):
    """What a record says.  Zero is space that was never written."""

    PUT = 1
    FREE = 2
    OWNER = 3


RECORD = np.dtype(
    [
        ("kind", "u1"),
        ("fidelity", "u1"),
        ("layout", "u1"),
        ("reserved", "u1"),
        ("slot", "<u4"),
        ("identity", "<u8", 2),
        ("key", "<u8", 2),
        ("parent", "<u8", 2),
        ("extras", "<u8", 2),
        ("time_ns", "<i8"),
        ("depth", "<i4"),
        ("check", "<u4"),
    ]
)
RECORD_BYTES = RECORD.itemsize
_WORDS = RECORD_BYTES // 8
assert RECORD_BYTES == 88

Mask: TypeAlias = npt.NDArray[np.bool_]
Records: TypeAlias = np.ndarray[tuple[int], np.dtype[np.void]]

_HEADER = struct.Struct("<8s H H I Q Q I I q 8x Q")
HEADER_BYTES = _HEADER.size
_CHECKED = HEADER_BYTES - 8
_MULTIPLIERS = np.array([xxhash.xxh3_64_intdigest(b"kvcache-factory log %d" % i) | 1 for i in range(12)], np.uint64)
_CHUNK = 2048  # records: enough for most segments in one read


class LogHeader(msgspec.Struct, frozen=True):
    """What a log says about its segment; *number* ties it to its name, so that a copy is no segment."""

    number: int
    slot_bytes: int
    slots: int
    block_tokens: int
    created_ns: int

    @property
    def file_bytes(self) -> int:
        """Bytes of the log file."""
        return HEADER_BYTES + capacity(self.slots) * RECORD_BYTES

    def pack(self) -> bytes:
        """The header's bytes."""
        fields = (self.number, self.slot_bytes, self.slots, self.block_tokens, self.created_ns)
        image = _HEADER.pack(MAGIC, LOG_VERSION, HEADER_BYTES, RECORD_BYTES, *fields, 0)
        return image[:_CHECKED] + struct.pack("<Q", xxhash.xxh3_64_intdigest(image[:_CHECKED]))

    @classmethod
    def unpack(cls, image: bytes) -> LogHeader:
        """Read a header; FormatError when it is damaged or of a version that is not known."""
        if len(image) < HEADER_BYTES:
            raise FormatError(f"{len(image)} bytes are no header of a log")
        magic, version, header_bytes, record_bytes, *fields, expected = _HEADER.unpack_from(image)
        if magic != MAGIC:
            raise FormatError(f"no log begins with {magic!r}")
        if version != LOG_VERSION:
            raise FormatError(f"a log of version {version}; this library reads {LOG_VERSION}")
        if xxhash.xxh3_64_intdigest(image[:_CHECKED]) != expected:
            raise FormatError("the header of a log does not match its checksum")
        header = cls(*fields)
        sizes_known = (header_bytes, record_bytes) == (HEADER_BYTES, RECORD_BYTES)
        if not sizes_known or not header.slots or not header.slot_bytes or header.slot_bytes % PAGE:
            raise FormatError("the header of a log holds sizes that cannot be")
        return header


def capacity(slots: int) -> int:
    """Records that the log of a segment of *slots* slots has room for before it is compacted."""
    return max(4 * slots, 64)


def make(kind: Kind, slots: npt.ArrayLike) -> Records:
    """Records of one kind for *slots*, everything else zero."""
    numbers = np.asarray(slots)
    records: Records = np.zeros(len(numbers), RECORD)
    records["kind"] = kind
    records["slot"] = numbers
    return records


def seal(records: Records, number: int) -> Records:
    """Write the checksums of *records*, which belong to segment *number*, in place; returns them."""
    records["check"] = _checks(records, number)
    return records


def valid(records: Records, number: int) -> Mask:
    """Which *records* are whole and belong to segment *number*."""
    kinds = records["kind"]
    good: Mask = (kinds >= Kind.PUT) & (kinds <= Kind.OWNER) & (records["check"] == _checks(records, number))
    return good


def _checks(records: Records, number: int) -> npt.NDArray[np.uint32]:
    words = np.frombuffer(records, np.uint64).reshape(-1, _WORDS)
    sums = words[:, : _WORDS - 1] @ _MULTIPLIERS[: _WORDS - 1]  # modulo 2**64, as the format says
    sums += (words[:, _WORDS - 1] & np.uint64(0xFFFFFFFF)) * _MULTIPLIERS[_WORDS - 1]
    sums += np.array([number], np.uint64) * _MULTIPLIERS[_WORDS]
    sums ^= sums >> np.uint64(29)
    return (sums >> np.uint64(32)).astype(np.uint32)


class Tail(msgspec.Struct, frozen=True):
    """Records that follow a position, the good ones in order, and the position behind the last good one."""

    records: Records
    position: int
    damaged: int


def read_from(fd: int, number: int, position: int, size: int) -> Tail:
    """Read the log of segment *number* from record *position*; *size* is the size of the file in bytes.

    The end is where nothing but zeros follows.  Damaged records at the very end are left for the next time: their
    writer may not have finished them.
    """
    limit = (size - HEADER_BYTES) // RECORD_BYTES
    pieces, at = [], position
    while at < limit:
        count = min(_CHUNK, limit - at)
        data = os.pread(fd, count * RECORD_BYTES, HEADER_BYTES + at * RECORD_BYTES)
        piece: Records = np.frombuffer(data, RECORD, len(data) // RECORD_BYTES)
        pieces.append(piece)
        at += len(piece)
        if len(piece) < count or not _written(piece[-1:])[0]:
            break
    if not pieces:
        return Tail(np.empty(0, RECORD), position, 0)
    records = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    good = valid(records, number)
    if good.all():
        return Tail(records, position + len(records), 0)
    last = int(np.flatnonzero(good)[-1]) + 1 if good.any() else 0
    records, good = records[:last], good[:last]
    return Tail(records[good], position + last, int(_written(records[~good]).sum()))


def _written(records: Records) -> Mask:
    written: Mask = np.frombuffer(records, np.uint64).reshape(-1, _WORDS).max(axis=1, initial=0) > 0
    return written


def live(records: Records, slots: int) -> Records:
    """The blocks that *records* leave in a segment of *slots* slots: the last word on each slot, if it is a PUT."""
    last = _last_word(records, slots)
    at = last[last >= 0]
    blocks: Records = records[at[records["kind"][at] == Kind.PUT]]
    return blocks


def said(records: Records, slots: int) -> npt.NDArray[np.int64]:
    """Slots that *records* say anything about, in order."""
    return np.flatnonzero(_last_word(records, slots) >= 0).astype(np.int64, copy=False)


def _last_word(records: Records, slots: int) -> npt.NDArray[np.int64]:
    about = np.flatnonzero((records["kind"] != Kind.OWNER) & (records["slot"] < slots))
    last = np.full(slots, -1, np.int64)
    last[records["slot"][about]] = about  # of several values for one slot, numpy keeps the last
    return last
