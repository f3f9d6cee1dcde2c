"""Files that were damaged, cut, swapped, copied or written by others: misses with a reason, never wrong bytes."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from tests.faults.conftest import DiskOpener
from tests.faults.harness import SPEC, DiskCache, files, flip, image_offsets, tokens_of

from kvcache_factory.block.envelope import MAGIC
from kvcache_factory.errors import CapacityError, ConfigError
from kvcache_factory.testing import tiny_identity

CHAIN = tokens_of(1, 6)
BAD = 2
"""Number of the block that is damaged."""

# Offset in the header, reason under which a flipped bit there is counted.
FIELDS = {
    "magic": (0, "header_magic"),
    "version": (8, "header_version"),
    "tokens_offset": (10, "header_size"),
    "header_bytes": (13, "header_size"),
    "header_checksum": (16, "header_checksum"),
    "num_tokens": (24, "header_checksum"),
    "fidelity": (28, "header_checksum"),
    "generation": (30, "header_checksum"),
    "identity": (32, "header_checksum"),
    "key": (48, "header_checksum"),
    "parent": (64, "header_checksum"),
    "extras": (80, "header_checksum"),
    "payload_bytes": (96, "header_checksum"),
    "payload_checksum": (104, "header_checksum"),
    "reserved": (112, "header_checksum"),
    "layout": (128, "header_checksum"),
    "codec": (160, "header_checksum"),
    "codec_params": (192, "header_checksum"),
    "tokens": (512, "header_checksum"),
    "padding": (4095, "header_checksum"),
    "first of payload": (4096, "payload_checksum"),
    "last of payload": (4096 + SPEC.payload_bytes - 1, "payload_checksum"),
}


@pytest.fixture
def stored(over: DiskOpener) -> Path:
    """A directory that holds the blocks of ``CHAIN``, and nobody who uses it."""
    cache = over()
    assert cache.save(CHAIN) == 6
    cache.manager.close()
    return over.path


def image_of(path: Path, cache: DiskCache, number: int) -> tuple[Path, int]:
    """Data file and offset of the image of block *number* of ``CHAIN``."""
    [place] = image_offsets(path, cache.space.chain(CHAIN).key_bytes(number))
    return place


def resealed(header: bytearray) -> bytes:
    """A header with a right checksum, whatever was written into it."""
    header[16:24] = bytes(8)
    header[16:24] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header)))
    return bytes(header)


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def rewrite(path: Path, cache: DiskCache, offset: int, data: bytes) -> None:
    """Overwrite part of the header of block ``BAD`` as a writer would, checksum and all."""
    file, at = image_of(path, cache, BAD)
    with open(file, "r+b") as stream:
        stream.seek(at)
        header = bytearray(stream.read(4096))
        header[offset : offset + len(data)] = data
        stream.seek(at)
        stream.write(resealed(header))


def expect_miss_at_bad(cache: DiskCache, reason: str) -> None:
    """The damaged block and those behind it are misses under *reason*, and the cache goes on without them."""
    assert cache.load(CHAIN) == BAD
    assert set(cache.counted("load_failed")) == {reason}
    assert cache.counted("dropped")[reason] == 6 - BAD
    assert cache.matched(CHAIN) == BAD, "what was found bad is still promised"
    assert cache.save(CHAIN) == 6 - BAD
    cache.forget_above()
    assert cache.load(CHAIN) == 6
    assert cache.errors() == {}


@pytest.mark.parametrize("field", FIELDS)
def test_one_flipped_bit_is_a_miss_with_a_reason(stored: Path, over: DiskOpener, field: str) -> None:
    """Wherever in an image a bit has changed, what was read is not used."""
    offset, reason = FIELDS[field]
    cache = over()
    file, at = image_of(stored, cache, BAD)
    flip(file, at + offset, bit=1)
    expect_miss_at_bad(cache, reason)


@pytest.mark.parametrize("kind", ["gpu", "three"])
def test_every_hierarchy_proves_what_it_reads(stored: Path, over: DiskOpener, kind: str) -> None:
    """Blocks that land in transit slots, or pass through DRAM on their way to a device, are proven too."""
    cache = over(kind=kind)
    file, at = image_of(stored, cache, BAD)
    flip(file, at + 4500)
    assert cache.load(CHAIN) == BAD
    assert set(cache.counted("load_failed")) == {"payload_checksum"}
    assert cache.load(CHAIN) == BAD


@pytest.mark.parametrize("bad", [0, BAD, 5])
def test_a_damaged_place_is_not_used_again(stored: Path, over: DiskOpener, bad: int) -> None:
    """The slot in which damage was found holds no other block in this run."""
    cache = over()
    file, at = image_of(stored, cache, bad)
    flip(file, at + 4096)
    before = file.read_bytes()[at : at + 8192]
    assert cache.load(CHAIN) == bad
    assert cache.store.stats()["reasons"]["quarantined"] == 1
    for conversation in range(2, 40):
        cache.save(tokens_of(conversation, 12))
    assert file.read_bytes()[at : at + 8192] == before


# Offset in the header, what is written there, and the reason under which that is counted.
LIES = {
    "version": (8, struct.pack("<H", 2), "header_version"),
    "identity": (32, bytes(16), "identity"),
    "key": (48, bytes(16), "key"),
    "parent": (64, bytes(16), "key"),
    "extras": (80, b"x" * 16, "record_differs"),
    "tokens": (512, struct.pack("<I", 77), "record_differs"),
    "number of tokens": (24, struct.pack("<I", 3), "record_differs"),
    "shorter payload": (96, struct.pack("<Q", SPEC.payload_bytes - 1), "codec"),
    "longer payload": (96, struct.pack("<Q", 1 << 60), "codec"),
    "layout": (128, b"LXYZ", "layout"),
    "codec": (160, b"int9", "no_codec"),
    "codec without parameters": (160, b"int8", "codec_params"),
    "payload checksum": (104, bytes(8), "payload_checksum"),
    "approximate": (28, struct.pack("<H", 2), "not_exact"),
    "bounded": (28, struct.pack("<H", 1), "not_exact"),
    "no fidelity": (28, struct.pack("<H", 9), "header_field"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_whole_image_of_something_else_is_a_miss(stored: Path, over: DiskOpener, lie: str) -> None:
    """Checksums find damage only: what the image says must also be what was asked for, field by field."""
    offset, data, reason = LIES[lie]
    cache = over()
    rewrite(stored, cache, offset, data)
    expect_miss_at_bad(cache, reason)


def test_an_image_of_the_same_key_and_another_prefix_is_a_miss(stored: Path, over: DiskOpener) -> None:
    """Planted: right identity, right key, other tokens, everything else in order."""
    cache = over()
    rewrite(stored, cache, 512, struct.pack("<4I", 9, 9, 9, 9))
    expect_miss_at_bad(cache, "record_differs")


def truncate_data(path: Path) -> None:
    """The data file ends in the middle of block ``BAD``."""
    [file] = files(path, ".data")
    with open(file, "r+b") as stream:
        stream.truncate(file.read_bytes().find(MAGIC) + BAD * 8192 + 5000)


def truncate_log(path: Path) -> None:
    """The log ends in the middle of the record of block ``BAD``."""
    [file] = files(path, ".log")
    with open(file, "r+b") as stream:
        stream.truncate(64 + (1 + BAD) * 88 + 40)


def empty_log(path: Path) -> None:
    """The log has lost everything, its header too."""
    [file] = files(path, ".log")
    file.write_bytes(b"")


def random_log(path: Path) -> None:
    """The log holds noise behind its header."""
    [file] = files(path, ".log")
    noise = b"".join(xxhash.xxh3_128_digest(b"%d" % i) for i in range(2000))
    file.write_bytes(file.read_bytes()[:64] + noise)


def zeroed_data(path: Path) -> None:
    """The data has never reached the disk, the log has."""
    [file] = files(path, ".data")
    file.write_bytes(bytes(file.stat().st_size))


def empty_data(path: Path) -> None:
    """The data file is there and empty."""
    [file] = files(path, ".data")
    file.write_bytes(b"")


def removed_data(path: Path) -> None:
    """The data file is gone, the log is there."""
    files(path, ".data")[0].unlink()


def removed_log(path: Path) -> None:
    """The log is gone, the data file is there."""
    files(path, ".log")[0].unlink()


@pytest.mark.parametrize(
    ("damage", "most"),
    [
        (truncate_data, BAD),
        (truncate_log, BAD),
        (empty_log, 0),
        (random_log, 0),
        (zeroed_data, 0),
        (empty_data, 0),
        (removed_data, 0),
        (removed_log, 0),
    ],
)
def test_cut_files_cost_misses_only(stored: Path, over: DiskOpener, damage: Callable[[Path], None], most: int) -> None:
    """Whatever is missing of a segment, the rest serves, and new blocks find a place."""
    damage(stored)
    cache = over()
    assert cache.load(CHAIN) == most
    assert cache.save(CHAIN) == 6 - most
    cache.forget_above()
    assert cache.load(CHAIN) == 6
    assert cache.errors() == {}


@pytest.mark.parametrize("record", range(1, 7))
def test_a_damaged_record_of_the_log_hides_its_block(stored: Path, over: DiskOpener, record: int) -> None:
    """A record that does not match its checksum is passed over and counted; its block's descendants go with it."""
    flip(files(stored, ".log")[0], 64 + record * 88 + 24)
    cache = over()
    assert cache.disk.index.used == record - 1
    assert cache.load(CHAIN) == record - 1
    assert cache.store.stats()["reasons"].get("damaged_record", 0) == (1 if record < 6 else 0)


def two_segments(over: DiskOpener) -> tuple[list[int], list[int]]:
    """Two conversations, each in a segment of its own; the tokens of both."""
    first, second = over(), over()
    a, b = tokens_of(1, 6), tokens_of(2, 6)
    assert first.save(a) == second.save(b) == 6
    first.manager.close()
    second.manager.close()
    assert len(files(over.path, ".data")) == 2
    return a, b


def test_swapped_data_files_are_misses(over: DiskOpener) -> None:
    """Each log speaks of blocks that are in the other's data now."""
    a, b = two_segments(over)
    one, two = files(over.path, ".data")
    spare = over.path / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    cache = over()
    assert cache.load(a) == cache.load(b) == 0
    assert set(cache.counted("load_failed")) == {"key"}
    assert cache.save(a) == cache.save(b) == 6
    cache.forget_above()
    assert cache.load(a) == cache.load(b) == 6


def test_swapped_logs_are_no_segments(over: DiskOpener) -> None:
    """A log carries the number of its segment: under another name it says nothing."""
    a, b = two_segments(over)
    one, two = files(over.path, ".log")
    spare = over.path / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    cache = over()
    assert cache.load(a) == cache.load(b) == 0
    assert cache.store.stats()["reasons"]["bad_segment"] == 2
    assert cache.save(a) == 6


def test_a_copied_segment_adds_nothing(over: DiskOpener) -> None:
    """A segment copied under another number is refused, one copied onto another is read with care."""
    a, b = two_segments(over)
    one, two = files(over.path, ".data")
    shutil.copy(one, over.path / "00000007.data")
    shutil.copy(one.with_suffix(".log"), over.path / "00000007.log")
    shutil.copy(one, two)
    cache = over()
    assert sorted((cache.load(a), cache.load(b))) == [0, 6]
    assert cache.store.stats()["reasons"]["bad_segment"] == 1


def test_a_segment_of_another_model_is_not_ours(over: DiskOpener) -> None:
    """The same tokens under another identity have other keys; data of another model under our log is a miss."""
    other = over(identity=tiny_identity(SPEC, "another-model"))
    assert other.save(CHAIN) == 6
    other.manager.close()
    theirs = files(over.path, ".data")[0]
    cache = over()
    assert cache.load(CHAIN) == 0
    assert cache.save(CHAIN) == 6
    cache.forget_above()
    ours = next(p for p in files(over.path, ".data") if image_offsets(over.path, cache.space.chain(CHAIN).key_bytes(0)))
    [(ours, at)] = image_offsets(over.path, cache.space.chain(CHAIN).key_bytes(0))
    [(theirs, there)] = image_offsets(over.path, other.space.chain(CHAIN).key_bytes(0))
    data = theirs.read_bytes()[there : there + 8192]
    with open(ours, "r+b") as stream:
        stream.seek(at)
        stream.write(data)
    assert cache.load(CHAIN) == 0
    assert cache.counted("load_failed") == {"identity": 6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kvcache-factory disk directory\nversion 2\n", "version 2"),
        ("kvcache-factory disk directory\nversion 99999999999\n", "something else"),
        ("hello", "something else"),
        ("", "something else"),
    ],
)
def test_a_marker_of_something_else_is_refused(stored: Path, over: DiskOpener, text: str, message: str) -> None:
    """A newer version, or no marker of ours, is a typed error at open, and nothing is touched."""
    (stored / "kvcache-factory.format").write_text(text)
    before = contents(stored)
    with pytest.raises(ConfigError, match=message):
        over()
    assert contents(stored) == before


def test_a_log_of_a_newer_version_is_left_alone(stored: Path, over: DiskOpener) -> None:
    """A segment that a newer library wrote is not read, not adopted and not changed."""
    [file] = files(stored, ".log")
    header = bytearray(file.read_bytes()[:64])
    header[8:10] = struct.pack("<H", 2)
    header[56:64] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header[:56])))
    file.write_bytes(bytes(header) + file.read_bytes()[64:])
    before = file.read_bytes()
    cache = over()
    assert cache.load(CHAIN) == 0
    assert cache.save(CHAIN) == 6
    assert file.read_bytes() == before


def test_a_path_that_cannot_be_a_directory_of_ours_is_refused(over: DiskOpener, tmp_path: Path) -> None:
    """A file, a path below a file, somebody else's files, a budget that is too small: said at open."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("mine")
    for name in ("file", "file/below", "theirs"):
        with pytest.raises(ConfigError, match="give the disk tier a directory"):
            over(tmp_path / name)
    with pytest.raises(CapacityError, match="segment"):
        over(disk_mb=0.5)
    assert (tmp_path / "theirs" / "thesis.tex").read_text() == "mine"
    assert len(list((tmp_path / "theirs").iterdir())) == 1
