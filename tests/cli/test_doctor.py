"""`doctor` reports, never dies, and fails only when something is broken."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from kvcache_factory.cli import doctor as room
from kvcache_factory.cli import machine, main


def run(*options: str) -> tuple[int, list[dict[str, Any]]]:
    result = CliRunner().invoke(main, ["doctor", "--json", *options])
    return result.exit_code, json.loads(result.stdout)["rows"]


def healthy() -> Iterable[room.Finding]:
    yield room.finding("copy path", "numpy")


def broken() -> Iterable[room.Finding]:
    yield room.finding("copy path", "numba")
    raise OSError("self-test failed at byte 7")


def test_a_healthy_machine_ends_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is flat, and every state is one of three words."""
    monkeypatch.setattr(room, "check_copies", healthy)
    code, rows = run()
    assert code == 0
    assert {row["state"] for row in rows} <= {"ok", "note", "broken"}
    assert all(set(row) == {"check", "value", "state", "advice"} for row in rows)


def test_a_broken_part_is_a_row_and_a_nonzero_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doctor that dies helps nobody: what a check raised is reported beside all that still works."""
    monkeypatch.delenv("KVCACHE_FACTORY_DEBUG", raising=False)
    monkeypatch.setattr(room, "check_copies", broken)
    code, rows = run()
    assert code == 1
    bad = [row for row in rows if row["state"] == "broken"]
    assert [(row["check"], row["value"]) for row in bad] == [("copies", "OSError: self-test failed at byte 7")]
    assert rows[-1]["check"] == "device"


def test_an_optional_package_that_is_missing_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing numba is no fault, and the line says how to get it."""
    monkeypatch.setattr(machine, "version_of", lambda name: None if name == "numba" else "1.0")
    row = next(row for row in room.check_versions() if row["check"] == "numba")
    assert row["state"] == "note"
    assert "pip install 'kvcache-factory[fast]'" in row["advice"]


def test_a_required_package_that_is_missing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch nothing can be moved."""
    monkeypatch.setattr(machine, "version_of", lambda name: None if name == "torch" else "1.0")
    row = next(row for row in room.check_versions() if row["check"] == "torch")
    assert (row["state"], row["advice"]) == ("broken", "pip install torch")


@pytest.mark.parametrize(
    ("system", "processor", "words"),
    [
        ("Linux", "x86_64", []),
        ("Linux", "aarch64", ["non-temporal"]),
        ("Darwin", "arm64", ["huge-page", "non-temporal"]),
        ("Windows", "AMD64", ["huge-page", "paging file"]),
    ],
)
def test_other_platforms_are_told_what_they_do_without(
    system: str, processor: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portable paths serve everywhere; doctor says what is slower there."""
    monkeypatch.setattr(room.platform, "system", lambda: system)
    monkeypatch.setattr(room.platform, "machine", lambda: processor)
    (row,) = room.check_platform()
    assert row["state"] == ("note" if words else "ok")
    assert all(word in row["advice"] for word in words)


def test_a_container_limit_below_the_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool larger than the container's limit is killed, not slowed: the limit must be seen."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 8 << 30)
    row = next(row for row in room.check_machine() if row["check"].startswith("memory limit"))
    assert (row["value"], row["state"]) == ("8.0 GiB", "note")


def plant_model(directory: Path, value: float) -> Path:
    """A model directory with one weight."""
    config = {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": 1e5, "dtype": "bfloat16"}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": np.full((4, 2), value, np.float32)}, directory / "model.safetensors")
    return directory


def test_the_identity_of_a_model_directory_follows_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place and the name of a directory say nothing; one changed weight makes another model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "check_copies", healthy)
    found = []
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        code, rows = run("--model", str(plant_model(tmp_path / name, value)))
        assert code == 0
        found.append({row["check"]: row["value"] for row in rows if row["check"].startswith("model")})
    one, same, other = found
    assert one["model fingerprint"] == same["model fingerprint"] != other["model fingerprint"]
    assert one["model identity"] == same["model identity"] != other["model identity"]
    assert one["model rope"].startswith("theta=100000")
    assert "bfloat16" in one["model identity"]


def test_a_directory_that_holds_no_model_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the report is still there."""
    monkeypatch.delenv("KVCACHE_FACTORY_DEBUG", raising=False)
    monkeypatch.setattr(room, "check_copies", healthy)
    code, rows = run("--model", str(tmp_path))
    assert code == 1
    assert rows[-1]["state"] == "broken"
    assert "config.json" in rows[-1]["value"]


def test_a_model_directory_that_is_not_there_is_a_usage_error() -> None:
    """The path is checked before any work is done."""
    result = CliRunner().invoke(main, ["doctor", "--model", "/no/such/directory"])
    assert result.exit_code == 2
