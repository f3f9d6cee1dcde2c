"""`purge` removes what was asked for and what was built on it, nothing else, and nothing that a living process owns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.maintenance.conftest import HOUR_NS, SPEC, Writer, identity

from kvcache_factory.cli import main
from kvcache_factory.maintenance.inspection import inspect_rows
from kvcache_factory.maintenance.purging import _with_descendants
from kvcache_factory.maintenance.survey import SegmentView, survey
from kvcache_factory.store.disk import log
from kvcache_factory.store.disk.identities import read_notes

Make = Callable[[], Writer]


def purge(path: Path, *options: str, answer: str = "y\n") -> tuple[int, list[dict[str, Any]]]:
    result = CliRunner().invoke(main, ["purge", str(path), "--json", *options], input=answer)
    return result.exit_code, json.loads(result.stdout)["rows"] if result.stdout else []


def blocks(path: Path) -> dict[str, int]:
    """Blocks by model, as `inspect` counts them."""
    return {row["model"]: row["blocks"] for row in inspect_rows(survey(path)) if row["kind"] == "identity"}


def is_whole(path: Path) -> bool:
    return CliRunner().invoke(main, ["verify", str(path)]).exit_code == 0


def two_models(writer: Make) -> Path:
    """A segment with five blocks of one model and three of another, whose writer has gone."""
    one = writer()
    one.write(identity("model-a"), 5)
    one.write(identity("model-b", namespace="staging"), 3)
    one.close()
    return one.path


@pytest.mark.parametrize("condition", [("--model", "model-a"), ("--namespace", "default")])
def test_one_model_goes_and_the_other_stays(directory: Path, writer: Make, condition: tuple[str, str]) -> None:
    """By model or by namespace; the bytes are overwritten, the rest is whole, and the note goes with the last block."""
    two_models(writer)
    code, (row,) = purge(directory, *condition)
    assert code == 0
    assert (row["model"], row["action"], row["blocks"]) == ("model-a", "removed", 5)
    assert row["bytes"] == 5 * SPEC.slot_bytes
    assert blocks(directory) == {"model-b": 3}
    assert is_whole(directory)
    assert [note.model for note in read_notes(directory).values()] == ["model-b"]
    (data,) = directory.glob("*.data")
    assert not any(data.read_bytes()[: 5 * SPEC.slot_bytes])


def test_a_model_is_named_by_its_beginning(directory: Path, writer: Make) -> None:
    """Fingerprints are long: eight characters do, of the model or of the identity, unless two begin alike."""
    one = writer()
    one.write(identity("0123456789abcdef"), 2)
    one.write(identity("0123456799999999"), 2)
    one.write(identity("unnamed"), 2, note=False)
    one.close()
    for short in ("01234567", "0123"):
        result = CliRunner().invoke(main, ["purge", str(directory), "--model", short, "--yes"])
        assert result.exit_code == 2
    assert purge(directory, "--model", "012345678")[1][0]["blocks"] == 2
    assert purge(directory, "--model", identity("unnamed").digest.hex()[:8])[1][0]["blocks"] == 2
    assert blocks(directory) == {"0123456799999999": 2}


@pytest.mark.parametrize("condition", [("--model", "model-c"), ("--namespace", "nowhere")])
def test_a_name_that_is_not_there(directory: Path, writer: Make, condition: tuple[str, str]) -> None:
    """Said, instead of removing nothing in silence."""
    two_models(writer)
    result = CliRunner().invoke(main, ["purge", str(directory), *condition, "--yes"])
    assert result.exit_code == 2
    assert condition[1] in result.stderr
    assert sum(blocks(directory).values()) == 8


def test_old_blocks_go_with_what_was_built_on_them(directory: Path, writer: Make) -> None:
    """A young block on an old one is unreachable without it; other young chains stay."""
    one = writer()
    one.age_ns = 3 * HOUR_NS
    one.write(identity(), 4)
    one.age_ns = 0
    one.write(identity(), 7, first=4)
    one.write(identity(), 6, seed=1)
    one.close()
    assert purge(directory, "--older-than", "4h") == (0, [])
    result = CliRunner().invoke(main, ["purge", str(directory), "--older-than", "90m", "--yes"])
    assert "7 blocks" in result.stderr
    assert "3 of all because they were built on others" in result.stderr
    assert blocks(directory) == {"model-a": 6}
    assert is_whole(directory)


def test_conditions_hold_together(directory: Path, writer: Make) -> None:
    """Old blocks of one model, and nothing else."""
    one = writer()
    one.age_ns = 3 * HOUR_NS
    one.write(identity("model-a"), 3)
    one.write(identity("model-b"), 3)
    one.close()
    assert purge(directory, "--model", "model-b", "--older-than", "1h")[1][0]["blocks"] == 3
    assert blocks(directory) == {"model-a": 3}


def test_all_leaves_an_empty_directory_of_ours(directory: Path, writer: Make) -> None:
    """Segments that nobody can read go too, and the next process begins anew."""
    path = two_models(writer)
    (path / "000000aa.log").write_bytes(b"no log")
    (path / "000000aa.data").write_bytes(b"no data")
    code, rows = purge(directory, "--all")
    assert code == 0
    assert {(row["model"], row["action"], row["blocks"]) for row in rows} == {
        ("model-a", "removed", 5),
        ("model-b", "removed", 3),
        (None, "removed", 0),
    }
    assert not list(directory.glob("*.data"))
    assert not list(directory.glob("*.log"))
    writer().write(identity(), 2)
    assert blocks(directory) == {"model-a": 2}


def test_all_takes_segments_in_which_nothing_is_left(directory: Path, writer: Make) -> None:
    """Room on the disk is what whoever says --all wants; other conditions, and a process that writes, keep them."""
    one = writer()
    one.store.free(one.write(identity(), 3))
    assert purge(directory, "--all") == (0, [])
    one.close()
    assert purge(directory, "--older-than", "0s") == (0, [])
    assert list(directory.glob("*.data"))
    code, rows = purge(directory, "--all")
    assert (code, [(row["action"], row["blocks"], row["bytes"] > 0) for row in rows]) == (0, [("removed", 0, True)])
    assert not list(directory.glob("*.data"))


def test_what_a_living_process_owns_stays(directory: Path, writer: Make) -> None:
    """It is listed with its owner, the exit code says so, and the process notices nothing."""
    two_models(writer)
    living = writer()  # takes over what the dead one left
    rows = living.write(identity("model-a"), 4, seed=1)
    code, (kept,) = purge(directory, "--model", "model-a")
    assert code == 1
    assert (kept["action"], kept["blocks"], kept["reason"]) == ("kept", 9, "a living process owns it")
    assert kept["owner_pid"] is not None
    assert living.store.present(rows).all()
    assert blocks(directory) == {"model-a": 9, "model-b": 3}


def test_nothing_goes_without_a_yes(directory: Path, writer: Make) -> None:
    """Asked, and answered with no or not at all."""
    two_models(writer)
    for answer in ("n\n", ""):
        code, rows = purge(directory, "--all", answer=answer)
        assert (code, rows) == (1, [])
    assert sum(blocks(directory).values()) == 8
    assert purge(directory, "--all", "--yes", answer="")[0] == 0


@pytest.mark.parametrize("options", [[], ["--all", "--model", "model-a"], ["--older-than", "soon"]])
def test_what_is_not_clear_is_not_done(directory: Path, writer: Make, options: list[str]) -> None:
    """No condition, everything and a condition, or an age that is none."""
    two_models(writer)
    assert CliRunner().invoke(main, ["purge", str(directory), "--yes", *options]).exit_code == 2
    assert sum(blocks(directory).values()) == 8


@given(st.data())
def test_descendants_are_those_a_walk_up_finds(data: st.DataObject) -> None:
    """Whatever the trees, copies and marks: a block goes when it is marked or when all copies of an ancestor are."""
    count = data.draw(st.integers(1, 24))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(count)]
    copies = [data.draw(st.integers(1, 2)) for _ in range(count)]
    numbers = [i for i in range(count) for _ in range(copies[i])]
    marks = np.array([data.draw(st.booleans()) for _ in numbers], np.bool_)
    order = np.array(data.draw(st.permutations(range(len(numbers)))))
    numbers, marks = np.array(numbers)[order], marks[order]
    gone = {i for i in range(count) if marks[numbers == i].all()}
    lost = {i for i in range(count) if i in gone or parents[i] in gone}
    for i in range(count):
        if i in lost or parents[i] in lost:
            lost.add(i)
    records: log.Records = log.make(log.Kind.PUT, np.arange(len(numbers)))
    records["key"] = np.stack([numbers + 1, np.zeros_like(numbers)], 1)
    records["parent"] = np.stack([np.array(parents)[numbers] + 1, np.zeros_like(numbers)], 1)
    cut = data.draw(st.integers(0, len(numbers)))
    views = [SegmentView(1, None, 0, 0, False, 0, 0, part) for part in (records[:cut], records[cut:])]
    chosen = _with_descendants(list(zip(views, (marks[:cut], marks[cut:]), strict=True)))
    expected = marks | np.array([number in lost for number in numbers])
    assert np.concatenate([mask for _, mask in chosen]).tolist() == expected.tolist()
