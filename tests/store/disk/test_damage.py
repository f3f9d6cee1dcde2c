"""Logs and data that were damaged, truncated, swapped, copied, or written by a later version: misses, with a reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.store.disk.blocks import SPEC, Cache, open_store, rows, span

from kvcache_factory.errors import ConfigError
from kvcache_factory.store.disk import log
from kvcache_factory.store.disk.directory import MARKER

Opened = Callable[..., Cache]


@pytest.fixture
def left_behind(opened: Opened, directory: Path) -> Path:
    """A directory with two segments of forty blocks, whose writer is gone."""
    cache = opened()
    for number in range(0, 40, 10):
        cache.save(*range(number, number + 10))
    cache.close()
    assert len(list(directory.glob("*.log"))) == 2
    return directory


def largest_log(directory: Path) -> Path:
    """The log of the segment that is full."""
    return max(directory.glob("*.log"), key=lambda path: path.read_bytes().count(b"a key of"))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def test_one_flipped_bit_anywhere_in_a_record_costs_that_record_only(opened: Opened, left_behind: Path) -> None:
    """A damaged record is passed over and counted, whatever bit it is; those around it are read."""
    path = largest_log(left_behind)
    whole = path.read_bytes()
    for at in range(log.RECORD_BYTES):
        flip(path, log.HEADER_BYTES + 5 * log.RECORD_BYTES + at, at % 8)
        store = open_store(left_behind)
        assert len(store.scan()) == 39, f"byte {at}"
        assert store.stats()["reasons"] == {"damaged_record": 1}, f"byte {at}"
        store.close()
        path.write_bytes(whole)
    assert opened().found == 40


def test_a_torn_last_record_is_as_if_it_had_not_been_written(opened: Opened, left_behind: Path) -> None:
    """The next owner writes over the torn end, and what it writes is found."""
    path = largest_log(left_behind)
    written = path.read_bytes().rstrip(b"\0")
    path.write_bytes(written[: len(written) - 40])
    cache = opened()
    assert cache.found == 39
    cache.save(*range(100, 120))
    cache.close()
    again = opened()
    assert again.found == 59
    assert again.check() == 0


@pytest.mark.parametrize("keep", [0, 10, log.HEADER_BYTES - 1, log.HEADER_BYTES, log.HEADER_BYTES + 7])
def test_a_truncated_log_costs_its_segment_at_most(opened: Opened, left_behind: Path, keep: int) -> None:
    """Blocks that no record speaks of are misses; the other segment is as it was, and the store works."""
    path = largest_log(left_behind)
    path.write_bytes(path.read_bytes()[:keep])
    cache = opened()
    assert 0 < cache.found < 40
    assert (cache.store.stats()["reasons"].get("bad_segment", 0) == 1) == (keep < log.HEADER_BYTES)
    assert cache.check() == 0
    cache.save(*range(100, 140))
    assert cache.check() == 0


def test_every_bit_of_a_logs_header_is_guarded(opened: Opened, left_behind: Path) -> None:
    """A segment whose header does not prove itself is not used."""
    path = largest_log(left_behind)
    whole = path.read_bytes()
    for at in range(log.HEADER_BYTES):
        flip(path, at, at % 8)
        store = open_store(left_behind)
        assert 0 < len(store.scan()) < 40, f"byte {at}"
        assert store.stats()["reasons"] == {"bad_segment": 1}, f"byte {at}"
        store.close()
        path.write_bytes(whole)


def test_a_log_of_a_later_version_is_left_alone(opened: Opened, left_behind: Path, monkeypatch: object) -> None:
    """Whole and well formed, but of a version that is not known: not read, not written, not removed."""
    path = largest_log(left_behind)
    header = log.LogHeader.unpack(path.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "LOG_VERSION", log.LOG_VERSION + 1)
        later = header.pack() + path.read_bytes()[log.HEADER_BYTES :]
    path.write_bytes(later)
    cache = opened()
    assert 0 < cache.found < 40
    cache.save(*range(100, 140))
    assert path.read_bytes() == later


def test_copied_segments_are_no_segments(opened: Opened, left_behind: Path) -> None:
    """A copy under another number has records that speak of the original: it is refused, and the original serves."""
    path = largest_log(left_behind)
    shutil.copy(path, left_behind / "00000777.log")
    shutil.copy(path.with_suffix(".data"), left_behind / "00000777.data")
    cache = opened()
    assert cache.found == 40
    assert cache.store.stats()["reasons"] == {"bad_segment": 1}
    assert cache.check() == 0


def test_swapped_logs_are_refused_and_swapped_data_proves_to_be_something_else(
    opened: Opened, left_behind: Path
) -> None:
    """Whatever is exchanged for whatever, no block is taken for another."""
    one, two = (path.with_suffix("") for path in left_behind.glob("*.log"))
    swap(one.with_suffix(".data"), two.with_suffix(".data"))
    cache = opened()
    assert cache.found == 40
    assert cache.check() == 40
    cache.close()
    swap(one.with_suffix(".log"), two.with_suffix(".log"))
    cache = opened()
    assert cache.found == 0
    assert cache.store.stats()["reasons"] == {"bad_segment": 2}
    cache.save(1, 2)
    assert cache.check() == 0


def swap(one: Path, two: Path) -> None:
    """Exchange the contents of two files."""
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def test_truncated_data_is_a_miss_behind_its_end(opened: Opened, left_behind: Path) -> None:
    """Slots that are not in the file any more do not exist; those before it are read."""
    data = largest_log(left_behind).with_suffix(".data")
    data.write_bytes(data.read_bytes()[: 3 * SPEC.slot_bytes + 100])
    cache = opened()
    assert cache.found == 3 + 12
    assert cache.check() == 0
    cache.save(*range(100, 130))
    assert cache.check() == 0


def test_data_that_is_truncated_while_it_is_used_is_a_short_read(opened: Opened) -> None:
    """The leading run that is still there is returned, and the rest is counted."""
    cache = opened(direct="never")
    written = cache.save(*range(10))
    data = next(cache.store.directory.path.glob("*.data"))
    with data.open("r+b") as file:
        file.truncate(4 * SPEC.slot_bytes)
    assert cache.store.read(written, cache.slab, span(0, 10), 0) == 4
    assert cache.store.stats()["reasons"] == {"short_read": 1}


def test_flipped_bits_in_images_are_never_proven(opened: Opened, left_behind: Path) -> None:
    """One bit in each byte of the header and in many of the payload: the image proves nothing, or proves the same."""
    data = largest_log(left_behind).with_suffix(".data")
    whole = data.read_bytes()
    chance = np.random.default_rng(3)
    spots = [*range(600), *chance.integers(600, SPEC.slot_bytes, 200).tolist()]
    for group in range(0, len(spots), 20):
        content = bytearray(whole)
        for slot, at in enumerate(spots[group : group + 20]):
            content[slot * SPEC.slot_bytes + at] ^= 1 << int(chance.integers(8))
        data.write_bytes(content)
        cache = opened()
        assert cache.check() == 20
        cache.close()
    data.write_bytes(whole)


def test_a_record_that_lies_is_found_out_by_what_the_slot_holds(opened: Opened, left_behind: Path) -> None:
    """A well-formed record that names another block's slot costs a read, not an answer."""
    path = largest_log(left_behind)
    number = int(path.stem, 16)
    records = log.live(np.frombuffer(path.read_bytes(), log.RECORD, 20, log.HEADER_BYTES), 28)
    lying = records.copy()
    lying["slot"] = np.roll(records["slot"], 1)
    content = bytearray(path.read_bytes())
    first = log.HEADER_BYTES + log.RECORD_BYTES  # behind the record of the owner
    content[first : first + len(lying) * log.RECORD_BYTES] = log.seal(lying, number).tobytes()
    path.write_bytes(content)
    cache = opened()
    assert cache.found == 40
    assert cache.check() == len(lying)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    """Nothing is written into a directory that holds another program's files, with or without our marker's name."""
    (tmp_path / "photos").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"something else.*directory of its own"):
        open_store(tmp_path)
    (tmp_path / MARKER).write_text("something else altogether")
    with pytest.raises(ConfigError, match="something else"):
        open_store(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [MARKER, "photos"]


def test_a_directory_of_a_later_version_is_refused(opened: Opened, left_behind: Path) -> None:
    """Its version is named, and what to do."""
    marker = left_behind / MARKER
    marker.write_text(marker.read_text().replace("version 1", "version 2"))
    with pytest.raises(ConfigError, match=r"version 2.*update"):
        open_store(left_behind)


def test_a_marker_that_was_lost_is_written_again(opened: Opened, left_behind: Path) -> None:
    """Where everything else is ours, the directory is."""
    (left_behind / MARKER).unlink()
    cache = opened()
    assert cache.found == 40
    assert (left_behind / MARKER).exists()
    assert cache.load(rows(0)) != [None]
