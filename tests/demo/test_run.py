"""The demo's conversation, its comparison and its picture; on a model of two layers where the model does not matter."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.demo import small as room

from kvcache_factory.demo import restart, run
from kvcache_factory.demo.plot import draw
from kvcache_factory.demo.text import QUESTIONS, question, reference_text
from kvcache_factory.errors import ConfigError, MissingDependencyError, StoreError

KEYS = {"phase", "turn", "prompt_tokens", "reused_tokens", "ttft_s", "identical", "diverges_at"}


PROGRAM = Path(room.__file__)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model and a short text in place of the real ones, and the fresh process is played in this one."""
    for module in (run, restart):
        monkeypatch.setattr(module, "load_model", room.small_model)
        monkeypatch.setattr(module, "reference_text", room.short_text)

    def played(options: restart.Options, said: Callable[[dict[str, Any], list[int]], None]) -> None:
        capsys.readouterr()
        restart.main(msgspec.json.encode(options).decode())
        for line in capsys.readouterr().out.splitlines():
            told = json.loads(line)
            said(told["row"], told["answer"])

    monkeypatch.setattr(run, "converse_afresh", played)


@pytest.fixture
def restarting(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `small`, with a fresh process that is one."""
    monkeypatch.setattr(restart, "COMMAND", (sys.executable, str(PROGRAM)))
    monkeypatch.setattr(run, "converse_afresh", restart.converse_afresh)


def test_the_conversation_is_held_three_times_with_the_same_answers(small: None) -> None:
    """A row for each phase and turn; later warm turns reuse what earlier ones computed, a restart even the first."""
    rows = run.run_demo(turns=3, max_new_tokens=20)
    assert [(row["phase"], row["turn"]) for row in rows] == [(p, t) for p in run.PHASES for t in (1, 2, 3)]
    assert all(set(row) == KEYS for row in rows)
    assert all(row["identical"] and row["diverges_at"] is None and row["ttft_s"] > 0 for row in rows)
    cold, warm, again = rows[:3], rows[3:6], rows[6:]
    assert [row["prompt_tokens"] for row in cold] == [row["prompt_tokens"] for row in warm]
    assert [row["prompt_tokens"] for row in cold] == [row["prompt_tokens"] for row in again]
    assert [row["reused_tokens"] for row in cold] == [0, 0, 0]
    assert warm[0]["reused_tokens"] == 0
    assert all(now["reused_tokens"] >= before["prompt_tokens"] - 64 for before, now in pairwise(warm))
    assert all(row["reused_tokens"] >= row["prompt_tokens"] - 64 for row in again)


def test_a_process_that_knows_only_the_directory_is_warm_from_its_first_turn(restarting: None, tmp_path: Path) -> None:
    """The main job of a disk tier; and the directory that was given stays for the next run, which is warm at once."""
    rows = run.run_demo(turns=1, max_new_tokens=8, disk=tmp_path / "cache")
    _, warm, again = rows
    assert again["phase"] == "restart"
    assert warm["reused_tokens"] == 0
    assert again["reused_tokens"] >= again["prompt_tokens"] - 64
    assert all(row["identical"] for row in rows)
    assert list((tmp_path / "cache").glob("*.data"))


def test_a_fresh_process_that_fails_says_why(restarting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word is in the error, instead of rows that are not there."""
    script = "import sys; print('noise', file=sys.stderr); sys.exit('no room on the disk')"
    monkeypatch.setattr(restart, "COMMAND", (sys.executable, "-c", script))
    with pytest.raises(StoreError, match="ended with 1: no room on the disk"):
        restart.converse_afresh(restart.Options("x", "float32", 1, 1), lambda row, answer: None)


def test_the_summary_puts_the_phases_beside_each_other(small: None) -> None:
    """One row a turn, with the speed-up, the restart and a word on the output."""
    rows = run.summarise(run.run_demo(turns=2, max_new_tokens=4))
    assert [row["turn"] for row in rows] == [1, 2]
    assert all(row["output"] == "identical" for row in rows)
    assert all(row["reused_after_restart"] > 0 and row["ttft_after_restart_s"] > 0 for row in rows)
    assert all(math.isclose(r["speed_up"], r["ttft_without_s"] / r["ttft_with_s"]) for r in rows)


def test_progress_grows_to_the_end(small: None) -> None:
    """The bar moves forward through all phases and ends full."""
    seen: list[tuple[float, float]] = []
    run.run_demo(turns=2, max_new_tokens=2, progress=lambda done, total, text="": seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (6, 6)


@pytest.mark.parametrize(
    ("cold", "warm", "at"), [([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2, 3], None)]
)
def test_where_answers_part(cold: list[int], warm: list[int], at: int | None) -> None:
    """The first token that differs is named; an answer that only stops earlier parts at its end."""
    rows: list[dict[str, Any]] = [{"phase": "cold", "turn": 1}, {"phase": "warm", "turn": 1}]
    run.compare(rows, {"cold": [cold], "warm": [warm]})
    assert all(row["diverges_at"] == at and row["identical"] == (at is None) for row in rows)


def test_a_cold_row_speaks_of_all_phases() -> None:
    """The answer without the cache is identical when all others are; each other row speaks for itself."""
    rows: list[dict[str, Any]] = [{"phase": phase, "turn": 1} for phase in run.PHASES]
    run.compare(rows, {"cold": [[1, 2, 3]], "warm": [[1, 2, 3]], "restart": [[1, 2, 4]]})
    assert [row["identical"] for row in rows] == [False, True, False]
    assert [row["diverges_at"] for row in rows] == [2, None, 2]


def test_numbers_that_cannot_work(small: None) -> None:
    """No turns, no tokens, or a conversation longer than the model's positions."""
    with pytest.raises(ConfigError, match="at least 1"):
        run.run_demo(turns=0)
    with pytest.raises(ConfigError, match="lower --turns"):
        run.run_demo(turns=100)


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_the_picture_is_written(small: None, tmp_path: Path, name: str) -> None:
    """As the kind of file that its name says."""
    run.run_demo(turns=2, max_new_tokens=2, plot=tmp_path / name)
    start = (tmp_path / name).read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    """A missing folder or an unknown kind of file says so."""
    rows = [{"phase": phase, "turn": 1, "ttft_s": 1.0} for phase in ("cold", "warm")]
    for path in (tmp_path / "missing" / "plot.png", tmp_path / "plot.unknown"):
        with pytest.raises(ConfigError, match="cannot be written"):
            draw(rows, path)


def test_without_matplotlib_nothing_is_run_in_vain(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The missing package is named before the conversation, not after it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "load_model", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(MissingDependencyError, match="pip install"):
        run.run_demo(plot=tmp_path / "plot.png")


def test_the_text_is_long_real_and_ends_with_a_paragraph() -> None:
    """About nine thousand characters of this Python's own reference."""
    text = reference_text()
    assert 8000 < len(text) <= 9000
    assert "statement" in text
    assert "  " not in text.replace("\n ", "")
    assert text == text.strip()


def test_questions_come_round_again() -> None:
    """Any number of turns has a question."""
    assert [question(turn) for turn in (1, len(QUESTIONS), len(QUESTIONS) + 1)] == [
        QUESTIONS[0],
        QUESTIONS[-1],
        QUESTIONS[0],
    ]
