"""`demo` passes its options on; the conversation has its own tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcache_factory.cli import main
from kvcache_factory.demo import run as room

ROWS = [
    {"phase": "cold", "turn": 1, "prompt_tokens": 2000, "reused_tokens": 0, "ttft_s": 4.0},
    {"phase": "warm", "turn": 1, "prompt_tokens": 2000, "reused_tokens": 1984, "ttft_s": 0.25},
    {"phase": "restart", "turn": 1, "prompt_tokens": 2000, "reused_tokens": 1920, "ttft_s": 0.5},
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that reached the demo; the conversation itself is not held."""
    options: dict[str, Any] = {}

    def run_demo(*, progress: Any, **given: Any) -> list[dict[str, Any]]:
        progress(1, 2, "half")
        options.update(given)
        return [{**row, "identical": True, "diverges_at": None} for row in ROWS]

    monkeypatch.setattr(room, "run_demo", run_demo)
    return options


def test_json_has_a_row_for_each_phase_and_turn(seen: dict[str, Any]) -> None:
    """Scripts get the raw rows, with the documented keys."""
    options = ["--turns", "1", "--plot", "x.png", "--dtype", "bfloat16", "--disk", "kv"]
    result = CliRunner().invoke(main, ["demo", "--json", *options])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["command"] == "demo"
    assert [row["phase"] for row in printed["rows"]] == ["cold", "warm", "restart"]
    documented = {"phase", "turn", "prompt_tokens", "reused_tokens", "ttft_s", "identical", "diverges_at"}
    assert all(set(row) == documented for row in printed["rows"])
    assert seen == {
        "dtype": "bfloat16",
        "turns": 1,
        "max_new_tokens": 32,
        "plot": Path("x.png"),
        "disk": Path("kv"),
    }


def test_the_table_puts_the_phases_beside_each_other(seen: dict[str, Any]) -> None:
    """People get one line a turn, with the speed-up and whether the answer is the same."""
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    for text in ("1,984", "0.25", "16", "1,920", "0.5", "identical"):
        assert text in result.stdout
    assert seen["dtype"] == "float32"


@pytest.mark.parametrize("options", [["--turns", "0"], ["--dtype", "int4"], ["--max-new-tokens", "-1"]])
def test_impossible_options_are_usage_errors(options: list[str]) -> None:
    """Refused before a model is loaded."""
    assert CliRunner().invoke(main, ["demo", *options]).exit_code == 2


def test_the_exchange_of_two_engines_has_a_row_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """--cross-engine runs the other demo and passes its options on."""
    from kvcache_factory.demo import cross_engine

    given: dict[str, Any] = {}
    row = {"writer": "transformers", "reader": "vllm", "reused_tokens": 2240, "identical": True}

    def run(*, progress: Any, **options: Any) -> list[dict[str, Any]]:
        given.update(options)
        return [row]

    monkeypatch.setattr(cross_engine, "run_cross_engine", run)
    result = CliRunner().invoke(main, ["demo", "--cross-engine", "--vllm-python", "/opt/v/python", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == [row]
    assert given == {"dtype": "float32", "max_new_tokens": 32, "vllm_python": Path("/opt/v/python")}
    table = CliRunner().invoke(main, ["demo", "--cross-engine"])
    assert "2,240" in table.stdout
    assert CliRunner().invoke(main, ["demo", "--cross-engine", "--plot", "x.png"]).exit_code == 2
