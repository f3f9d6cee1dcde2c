"""`verify` reads everything, names what is bad, acquits what was rewritten, and sets bad blocks aside on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.maintenance.conftest import SPEC, Writer, identity

from kvcache_factory.cli import main
from kvcache_factory.maintenance import verification
from kvcache_factory.maintenance.survey import survey

Make = Callable[[], Writer]
SLOT = SPEC.slot_bytes


def verify(path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    result = CliRunner().invoke(main, ["verify", str(path), "--json", *options])
    printed = json.loads(result.stdout)
    assert printed["command"] == "verify"
    return result.exit_code, printed["rows"]


def filled(writer: Make, blocks: int = 6) -> Path:
    """A directory of one segment with the blocks of a process that has gone; returns its data file."""
    one = writer()
    one.write(identity(), blocks)
    one.close()
    (data,) = one.path.glob("*.data")
    return data


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def test_a_whole_directory_ends_with_zero(directory: Path, writer: Make) -> None:
    """Every block is read, whether its owner lives or not."""
    filled(writer)
    writer().write(identity("model-b"), 4)
    code, rows = verify(directory)
    assert code == 0
    assert sum(row["blocks"] for row in rows) == 10
    assert sum(row["bytes"] for row in rows) == 10 * SLOT
    assert all((row["bad"], row["changed"], row["trouble"]) == (0, 0, "") for row in rows)


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(3, "magic"), (8, "version"), (60, "checksum"), (520, "checksum"), (SPEC.header_bytes + 7, "payload")],
)
def test_one_flipped_bit_is_found_and_named(directory: Path, writer: Make, offset: int, reason: str) -> None:
    """In the header or in the payload; the other blocks are good, and the exit code is 1."""
    flip(filled(writer), 2 * SLOT + offset)
    code, (row,) = verify(directory)
    assert (code, row["bad"], row["blocks"], row["reasons"]) == (1, 1, 6, f"{reason} 1")


def test_a_whole_image_in_the_wrong_place_is_bad(directory: Path, writer: Make) -> None:
    """Its checksums are right, but the log says that another block is there."""
    data = filled(writer)
    content = bytearray(data.read_bytes())
    content[:SLOT], content[SLOT : 2 * SLOT] = content[SLOT : 2 * SLOT], content[:SLOT]
    data.write_bytes(content)
    code, (row,) = verify(directory)
    assert (code, row["bad"], row["reasons"]) == (1, 2, "record 2")


def test_blocks_behind_one_that_cannot_be_read_are_still_read(
    directory: Path, writer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector costs its block."""
    filled(writer)
    read = verification._read

    def failing(files: Any, slots: Any, buffers: Any) -> tuple[int, str]:
        before = int(np.argmax(slots == 2)) if 2 in slots else len(slots)
        count, reason = read(files, slots[:before], buffers[:before])
        return count, "eio" if before < len(slots) else reason

    monkeypatch.setattr(verification, "_read", failing)
    code, (row,) = verify(directory)
    assert (code, row["bad"], row["reasons"]) == (1, 1, "eio 1")


def test_a_block_that_was_rewritten_meanwhile_is_neither_good_nor_bad(directory: Path, writer: Make) -> None:
    """The owner is at work: the log says something else by now."""
    one = writer()
    rows = one.write(identity(), 6)
    seen = survey(directory)
    one.store.erase(rows[3:])
    found = verification.check_segment(seen.directory, seen.segments[0], lambda done: None)
    assert (found.bad, found.changed) == ({}, 3)


def test_quarantine_takes_bad_blocks_out_of_the_log(directory: Path, writer: Make) -> None:
    """The next process does not see them; verify is content with what is left."""
    flip(filled(writer), 4 * SLOT + SPEC.header_bytes)
    code, (row,) = verify(directory, "--quarantine")
    assert (code, row["bad"], row["quarantined"]) == (1, 1, 1)
    code, (row,) = verify(directory)
    assert (code, row["blocks"]) == (0, 5)


def test_quarantine_leaves_what_a_living_process_owns(directory: Path, writer: Make) -> None:
    """It will find out when it reads them."""
    one = writer()
    one.write(identity(), 4)
    (data,) = directory.glob("*.data")
    with data.open("r+b") as file:
        file.seek(SPEC.header_bytes)
        file.write(b"damage")
    code, (row,) = verify(directory, "--quarantine")
    assert (code, row["owner"], row["bad"], row["quarantined"]) == (1, "live", 1, 0)


def test_a_damaged_record_and_an_unreadable_segment_are_bad(directory: Path, writer: Make) -> None:
    """Nothing that is wrong ends with zero."""
    data = filled(writer)
    flip(data.with_suffix(".log"), 64 + 88 * 2 + 30)
    code, (row,) = verify(directory)
    assert (code, row["damaged_records"], row["blocks"]) == (1, 1, 5)
    flip(data.with_suffix(".log"), 20)
    code, (row,) = verify(directory)
    assert code == 1
    assert row["trouble"]


def test_a_truncated_data_file_is_bad_or_shorter(directory: Path, writer: Make) -> None:
    """Blocks behind the end are not counted as there; one across it is read short."""
    data = filled(writer)
    with data.open("r+b") as file:
        file.truncate(4 * SLOT)
    code, (row,) = verify(directory)
    assert (code, row["blocks"], row["bad"]) == (0, 4, 0)


def test_an_encrypted_directory_is_verified_without_its_key(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums are those of what is on the disk: an operator needs no secret to find damage, and finds it."""
    import torch

    from kvcache_factory.backend import CPUBackend, DiskBackend, HierarchicalBackend
    from kvcache_factory.manager import CacheManager
    from kvcache_factory.memory.region import SequenceRegion

    pytest.importorskip("cryptography")
    monkeypatch.setenv("TEST_KEY", "ab" * 32)
    disk = DiskBackend(str(directory), 0.01, 1, key_env="TEST_KEY")
    with CacheManager(HierarchicalBackend([CPUBackend(size_gb=0.01), disk])) as manager:
        space = manager.register(SPEC, identity())
        layers = [torch.ones(1, SPEC.num_kv_heads, 64, SPEC.head_dim) for _ in range(2)]
        region = SequenceRegion.from_layers(layers[:1], layers[1:], SPEC)
        where = region.positions(np.zeros(4, np.int64), np.arange(4) * SPEC.block_tokens)
        assert space.save(space.chain(range(64)), region, where) == 4
        manager.wait()
    monkeypatch.delenv("TEST_KEY")
    code, (row,) = verify(directory)
    assert (code, row["blocks"], row["bad"]) == (0, 4, 0)
    (data,) = directory.glob("*.data")
    flip(data, SLOT + SPEC.header_bytes + 9)
    code, (row,) = verify(directory)
    assert (code, row["bad"]) == (1, 1)
