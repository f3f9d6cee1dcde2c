"""The log's bytes, as ``docs/format.md`` fixes them, and how fast many of them are taken in."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.store.disk.blocks import SPEC, key_of

from kvcache_factory.errors import FormatError
from kvcache_factory.store.disk import DiskStore, log
from kvcache_factory.store.disk.directory import Directory
from kvcache_factory.store.disk.segment import create

HEADER = log.LogHeader(number=0x1234, slot_bytes=8192, slots=28, block_tokens=16, created_ns=1_700_000_000_000_000_000)


def plain_check(record: bytes, number: int) -> int:
    """The checksum of a record, written the way the format page tells it."""
    multipliers = [xxhash.xxh3_64_intdigest(f"kvcache-factory log {i}".encode()) | 1 for i in range(12)]
    words = [*struct.unpack("<10Q", record[:80]), struct.unpack("<I", record[80:84])[0], number]
    total = sum(word * multiplier for word, multiplier in zip(words, multipliers, strict=True)) % 2**64
    return (total ^ total >> 29) >> 32


def one_record() -> log.Records:
    """A PUT with every field set."""
    record = log.make(log.Kind.PUT, [3])
    record["fidelity"], record["layout"], record["time_ns"], record["depth"] = 1, 1, -5, 7
    for i, name in enumerate(("identity", "key", "parent", "extras")):
        record[name] = [[2 * i + 1, 2**64 - 2 * i - 1]]
    return log.seal(record, 0x1234)


def test_a_record_has_the_bytes_of_the_format_page() -> None:
    """Offsets, sizes and checksum, computed here a second time."""
    record = one_record().tobytes()
    fields = struct.unpack("<BBBBI8QqiI", record)
    assert len(record) == 88
    assert fields[:5] == (1, 1, 1, 0, 3)
    assert fields[5:13] == (1, 2**64 - 1, 3, 2**64 - 3, 5, 2**64 - 5, 7, 2**64 - 7)
    assert fields[13:15] == (-5, 7)
    assert fields[15] == plain_check(record, 0x1234)


def test_the_vectors_of_the_format_page_never_change() -> None:
    """These bytes are on disks: another value here is another format version."""
    page = (Path(__file__).parents[3] / "docs" / "format.md").read_text(encoding="utf-8")
    header = (
        "4b564346534c4f470100400058000000341200000000000000200000000000001c00000010000000"
        "00002a36fe9c971700000000000000007b9245ce0f6f64a0"
    )
    record = (
        "01010100030000000100000000000000ffffffffffffffff0300000000000000fdffffffffffffff"
        "0500000000000000fbffffffffffffff0700000000000000f9fffffffffffffffbffffffffffffff"
        "070000001b788fdf"
    )
    assert HEADER.pack().hex() == header
    assert one_record().tobytes().hex() == record
    assert header in page
    assert record in page


def test_a_header_survives_the_trip_and_nothing_else_does() -> None:
    """What is packed is unpacked; foreign magic, other sizes and impossible slots are refused."""
    image = HEADER.pack()
    assert log.LogHeader.unpack(image) == HEADER
    for broken in (b"", image[:-1], b"x" + image[1:], image[:20] + b"\1" + image[21:]):
        with pytest.raises(FormatError):
            log.LogHeader.unpack(broken)
    for slot_bytes, slots in ((0, 1), (4095, 1), (4096, 0)):
        with pytest.raises(FormatError, match="cannot be"):
            log.LogHeader.unpack(log.LogHeader(1, slot_bytes, slots, 16, 0).pack())


@given(st.integers(0, 8 * 88 - 1))
def test_no_flipped_bit_goes_unnoticed(bit: int) -> None:
    """Each bit of a record is under its checksum, and so is the number of the segment."""
    damaged = bytearray(one_record().tobytes())
    damaged[bit // 8] ^= 1 << bit % 8
    assert not log.valid(np.frombuffer(bytes(damaged), log.RECORD), 0x1234)[0]


def test_records_of_another_segment_are_not_valid() -> None:
    """A record that was pasted from another log proves nothing here."""
    assert log.valid(one_record(), 0x1234).all()
    assert not log.valid(one_record(), 0x1235).any()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 5)), max_size=40))
def test_the_last_word_on_a_slot_is_what_is_live(said: list[tuple[bool, int, int]]) -> None:
    """Replaying records one by one in a dict gives the same blocks."""
    expected: dict[int, int] = {}
    records = np.empty(0, log.RECORD)
    for put, slot, key in said:
        record = log.make(log.Kind.PUT if put else log.Kind.FREE, [slot])
        record["key"] = key
        records = np.concatenate((records, record))
        if put:
            expected[slot] = key
        else:
            expected.pop(slot, None)
    live = log.live(records, 8)
    found = dict(zip(live["slot"].tolist(), live["key"][:, 0].tolist(), strict=True))
    assert found == {slot: key for slot, key in expected.items() if slot < 8}
    assert log.said(records, 8).tolist() == sorted({slot for _, slot, _ in said if slot < 8})


def test_reading_in_pieces_reads_the_same(tmp_path: Path) -> None:
    """A reader that comes back finds what was added, and never passes over what was not finished."""
    path = tmp_path / "log"
    records = log.make(log.Kind.PUT, np.arange(5000))
    sealed = log.seal(records, 9).tobytes()
    whole = bytes(log.HEADER_BYTES) + sealed + bytes(3000 * log.RECORD_BYTES)
    torn = log.HEADER_BYTES + 4321 * log.RECORD_BYTES + 13
    path.write_bytes(whole[:torn] + bytes(len(whole) - torn))
    fd = os.open(path, os.O_RDWR)
    first = log.read_from(fd, 9, 0, len(whole))
    assert (len(first.records), first.position, first.damaged) == (4321, 4321, 0)
    os.pwrite(fd, whole[torn:], torn)
    second = log.read_from(fd, 9, first.position, len(whole))
    os.close(fd)
    assert (len(second.records), second.position, second.damaged) == (679, 5000, 0)
    assert (np.concatenate((first.records, second.records)) == log.seal(records, 9)).all()


def directory_of(path: Path, blocks: int, slots: int) -> None:
    """A directory as a process would leave it that has stored chains of a thousand blocks; data files are sparse."""
    directory = Directory(path)
    directory.prepare()
    number = 0
    with directory.locked(), pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "posix_fallocate")
        for segment_number in range(1, -(-blocks // slots) + 1):
            one = create(directory, log.LogHeader(segment_number, SPEC.slot_bytes, slots, SPEC.block_tokens, 0))
            count = min(slots, blocks - number)
            records = log.make(log.Kind.PUT, np.arange(count))
            records["key"][:, 0] = np.arange(number, number + count)
            records["key"][:, 1] = int.from_bytes(key_of(0)[8:], "little")
            records["depth"] = np.arange(number, number + count) % 1000
            one.append(records)
            one.let_go()
            number += count


def test_a_directory_of_many_blocks_is_taken_in_whole(tmp_path: Path) -> None:
    """Fifty thousand blocks in seventy segments, every one of them found, bound and let go by batches."""
    directory_of(tmp_path / "cache", 50_000, 720)
    store = DiskStore(tmp_path / "cache", 1 << 30, 6 << 20)
    store.open(SPEC, 0)
    entries = store.scan()
    assert sorted(entries.keys[:, 0].tolist()) == list(range(50_000))
    rows = np.arange(50_000, dtype=np.int32)
    assert store.bind(rows, entries.places).all()
    assert store.owned(rows).all()
    store.free(rows[::2])
    assert store.present(rows).sum() == 25_000
    store.close()
    store.open(SPEC, 0)
    assert len(store.scan()) == 25_000
    store.close()
