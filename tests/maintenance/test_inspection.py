"""What `inspect` says: whose blocks a directory holds, how old, who owns them, what is wrong; it disturbs nobody."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.maintenance.conftest import HOUR_NS, SPEC, Writer, identity

from kvcache_factory.cli import main
from kvcache_factory.maintenance.inspection import age_s, inspect_rows, printable
from kvcache_factory.maintenance.survey import survey

Make = Callable[[], Writer]


def of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in inspect_rows(survey(path)) if row["kind"] == kind]


def test_identities_are_named_counted_and_aged(directory: Path, writer: Make) -> None:
    """Models, namespaces and ages of blocks whose owner has gone."""
    one = writer()
    one.age_ns = 2 * HOUR_NS
    one.write(identity("model-a"), 5)
    one.age_ns = 0
    one.write(identity("model-a"), 3, seed=1)
    one.write(identity("model-b", namespace="staging", salt="tenant"), 2)
    one.close()
    first, second = of_kind(directory, "identity")
    assert (first["model"], first["namespace"], first["blocks"]) == ("model-a", "default", 8)
    assert first["bytes"] == 8 * SPEC.slot_bytes
    assert 7200 <= first["oldest_s"] < 7300
    assert first["newest_s"] < 100
    assert (second["model"], second["namespace"], second["salted"]) == ("model-b", "staging", True)
    (summary,) = of_kind(directory, "directory")
    assert (summary["blocks"], summary["live_processes"], summary["unreadable_segments"]) == (10, 0, 0)
    assert all(row["owner"] == "dead" and row["health"] == "ok" for row in of_kind(directory, "segment"))


def test_blocks_without_a_note_are_there_under_their_digest(directory: Path, writer: Make) -> None:
    """A note is for people: without it, only the names are missing."""
    whose = identity()
    writer().write(whose, 2, note=False)
    (row,) = of_kind(directory, "identity")
    assert (row["identity"], row["blocks"], row["model"]) == (whose.digest.hex(), 2, None)


def test_living_processes_are_seen_and_not_disturbed(directory: Path, writer: Make) -> None:
    """A segment whose owner lives says so, with its process id, and looking takes nothing from it."""
    one = writer()
    rows = one.write(identity(), 4)
    one.store.refresh()
    (segment,) = of_kind(directory, "segment")
    assert (segment["owner"], segment["owner_pid"]) == ("live", os.getpid())
    (process,) = of_kind(directory, "process")
    assert process["pid"] == os.getpid()
    assert one.store.owned(rows).all()
    one.write(identity(), 4, seed=1)
    assert of_kind(directory, "identity")[0]["blocks"] == 8


def test_looking_changes_no_byte(directory: Path, writer: Make) -> None:
    """Not even the time of a file."""
    one = writer()
    one.write(identity(), 4)
    one.close()
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.rglob("*") if path.is_file()}
    survey(directory)
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in directory.rglob("*") if p.is_file()}


def test_damage_is_health_and_not_an_error(directory: Path, writer: Make) -> None:
    """A damaged record, a log that is none, a copied segment and half a segment, each said in a few words."""
    one = writer()
    for seed in range(8):
        one.write(identity(), 8, seed=seed)
    one.close()
    first, second, third = sorted(directory.glob("*.log"))[:3]
    content = bytearray(first.read_bytes())
    content[64 + 88 * 2 + 30] ^= 1
    first.write_bytes(content)
    second.write_bytes(b"no log at all" * 100)
    shutil.copy(third, directory / "000000aa.log")
    shutil.copy(third.with_suffix(".data"), directory / "000000aa.data")
    third.with_suffix(".data").unlink()
    health = {row["segment"]: row["health"] for row in of_kind(directory, "segment")}
    assert health[first.stem] == "1 damaged records"
    assert "no log begins with" in health[second.stem]
    assert health[third.stem] == "no data"
    assert health["000000aa"] == f"a copy of segment {third.stem}"
    (summary,) = of_kind(directory, "directory")
    assert (summary["damaged_records"], summary["unreadable_segments"]) == (1, 3)


def test_a_clock_that_moved_backwards_and_a_hostile_name() -> None:
    """No age is negative, and no name moves the cursor."""
    assert age_s(5, 10**18) == 0
    assert printable("plain") == "plain"
    assert "\x1b" not in printable("\x1b[2J")


def test_the_command_prints_sections_and_one_json_shape(directory: Path, writer: Make) -> None:
    """People get tables, scripts get flat rows."""
    one = writer()
    one.age_ns = 3 * HOUR_NS
    one.write(identity("a-model-with-quite-a-long-fingerprint"), 3)
    result = CliRunner().invoke(main, ["inspect", str(directory)])
    assert result.exit_code == 0, result.output
    for text in ("a-model-with…", "3 h", "live", "ok"):
        assert text in result.stdout
    printed = json.loads(CliRunner().invoke(main, ["inspect", str(directory), "--json"]).stdout)
    assert printed["command"] == "inspect"
    assert {row["kind"] for row in printed["rows"]} == {"directory", "identity", "segment", "process"}


def absent(path: Path) -> None:
    pass


def file(path: Path) -> None:
    path.write_text("x")


def foreign(path: Path) -> None:
    path.mkdir()
    (path / "letters.txt").write_text("x")


def newer(path: Path) -> None:
    path.mkdir()
    (path / "kvcache-factory.format").write_text("kvcache-factory disk directory\nversion 9\n")


@pytest.mark.parametrize("command", ["inspect", "verify", "purge --all --yes"])
@pytest.mark.parametrize(
    ("make", "words"),
    [(absent, "does not exist"), (file, "is a file"), (foreign, "has no kvcache"), (newer, "newer version")],
)
def test_a_path_that_is_no_directory_of_ours(
    directory: Path, command: str, make: Callable[[Path], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says what is wrong, exit code 2, and nothing is touched."""
    monkeypatch.delenv("KVCACHE_FACTORY_DEBUG", raising=False)
    make(directory)
    name, *options = command.split()
    result = CliRunner().invoke(main, [name, str(directory), *options])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("[ConfigError]\n")
