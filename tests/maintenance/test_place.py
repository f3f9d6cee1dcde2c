"""`doctor --disk` says whether a directory is a good place, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.maintenance.conftest import Writer, identity

from kvcache_factory.cli import doctor_disk
from kvcache_factory.maintenance import place
from kvcache_factory.maintenance.place import Place, file_system_of, look_at, numa_node_of


def findings(path: Path) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in doctor_disk.check_disk(path)}


def test_a_directory_in_use_is_healthy(directory: Path, writer: Callable[[], Writer]) -> None:
    """Its mode is right, its bytes count as available to it, and the probes are gone afterwards."""
    one = writer()
    one.write(identity(), 3)
    before = sorted(directory.rglob("*"))
    rows = findings(directory)
    assert sorted(directory.rglob("*")) == before
    assert rows["disk directory"]["value"] == "ours"
    assert rows["disk mode"]["value"].startswith("0700, 0 files")
    assert rows["disk file locks"]["state"] == "ok"
    seen = look_at(directory)
    assert seen.used_bytes > 0
    budget = 0.9 * (seen.free_bytes + seen.used_bytes) / 2**30
    assert float(rows["disk budget"]["value"].split("=")[1].split()[0]) == pytest.approx(budget, rel=0.2, abs=0.1)


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    """The nearest one above is examined, and nothing is made."""
    rows = findings(tmp_path / "a" / "b")
    assert rows["disk directory"] == {"check": "disk directory", "value": "absent", "state": "ok", "advice": ""}
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    """A file, something below a file, and another program's directory: broken, and no probe is written there."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letters").write_text("x")
    for name, value in (("file", "a file"), ("file/below", "is a file"), ("other", "something else")):
        row = findings(tmp_path / name)["disk directory"]
        assert value in row["value"]
        assert row["state"] == "broken"
    assert len(list((tmp_path / "other").iterdir())) == 1


def test_files_that_others_may_read_are_a_note(directory: Path, writer: Callable[[], Writer]) -> None:
    """Prompts can be read from blocks."""
    writer().write(identity(), 1)
    next(directory.glob("*.data")).chmod(0o644)
    row = findings(directory)["disk mode"]
    assert (row["state"], "1 files" in row["value"], "chmod" in row["advice"]) == ("note", True, True)


def told(**facts: Any) -> Place:
    """A place with these facts, good in everything else."""
    good = {
        "state": "empty",
        "usable": True,
        "nearest": Path("/"),
        "writable": True,
        "free_bytes": 1 << 40,
        "used_bytes": 0,
        "file_system": "ext4",
        "direct": True,
        "locks": True,
        "numa_node": None,
        "mode": 0o700,
        "open_files": 0,
    }
    return Place(**{**good, **facts})


@pytest.mark.parametrize(
    ("facts", "check", "state"),
    [
        ({"file_system": "nfs4"}, "disk file system", "note"),
        ({"file_system": "tmpfs"}, "disk file system", "note"),
        ({"direct": False}, "disk O_DIRECT", "note"),
        ({"locks": False}, "disk file locks", "broken"),
        ({"free_bytes": 1 << 20}, "disk budget", "note"),
        ({"usable": False, "writable": False}, "disk directory", "broken"),
        ({"numa_node": 1}, "disk NUMA node", "note"),
    ],
)
def test_each_fact_has_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], check: str, state: str
) -> None:
    """And an advice beside what is not ok."""
    monkeypatch.setattr(place, "look_at", lambda path: told(**facts))
    monkeypatch.setattr(doctor_disk.machine, "numa_nodes", lambda: 2)
    rows = findings(tmp_path)
    assert (rows[check]["state"], bool(rows[check]["advice"])) == (state, True)
    assert all(row["state"] == "ok" for name, row in rows.items() if name != check)


def test_file_system_and_numa_node_are_read_from_the_system(tmp_path: Path) -> None:
    """The longest mount point wins; the node is that of the first device upwards that tells one."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /data/my\\040disk rw shared:1 - xfs /dev/b rw\nbroken\n"
    )
    assert file_system_of(Path("/data/my disk/cache"), tmp_path) == "xfs"
    assert file_system_of(Path("/data"), tmp_path) == "ext4"
    assert file_system_of(Path("/data"), tmp_path / "nowhere") == ""
    device = tmp_path.stat().st_dev
    link = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    assert numa_node_of(tmp_path, tmp_path) is None
    block = tmp_path / "sys/devices/pci/nvme0/block"
    block.mkdir(parents=True)
    (block.parent / "numa_node").write_text("1\n")
    link.symlink_to(block)
    assert numa_node_of(tmp_path, tmp_path) == 1
