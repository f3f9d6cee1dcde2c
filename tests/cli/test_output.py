"""All commands print one JSON shape, and tables that cut nothing off."""

from __future__ import annotations

import errno
import io
import json
import sys

import numpy as np
import pytest
from rich.console import Console

from kvcache_factory import __version__
from kvcache_factory.cli import output
from kvcache_factory.errors import StoreError


def test_json_is_one_object_with_four_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts rely on command, version, machine and rows, and on rows being flat."""
    output.emit("bench keys", [{"builder": "RAW", "ns_per_token": np.float64(9.5)}], as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["command", "version", "machine", "rows"]
    assert printed["command"] == "bench keys"
    assert printed["version"] == __version__
    assert printed["rows"] == [{"builder": "RAW", "ns_per_token": 9.5}]
    assert all(v is None or isinstance(v, str | int | float) for v in printed["machine"].values())


def test_numbers_that_json_cannot_say_become_null() -> None:
    """NaN and infinity are no JSON; a strict reader must still accept the document."""
    row = output.document("x", [{"a": float("nan"), "b": np.float32("inf"), "c": np.int64(3), "d": np.bool_(True)}])[
        "rows"
    ][0]
    assert row == {"a": None, "b": None, "c": 3, "d": True}
    assert type(row["c"]) is int
    assert row["d"] is True


def test_a_nested_row_is_a_mistake_of_the_caller() -> None:
    """Rows are flat by contract; nesting is misuse."""
    with pytest.raises(AssertionError, match="flat"):
        output.document("x", [{"a": [1, 2]}])


def test_a_table_shows_every_cell_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Text in brackets is data, not markup, and nothing is cut when the output goes to a pipe."""
    output.emit(
        "x", [{"name": "[bold]kept[/bold]", "reused_tokens": 2048, "identical": True, "ttft_s": None}], as_json=False
    )
    printed = capsys.readouterr().out
    for text in ("[bold]kept[/bold]", "reused tokens", "2,048", "yes", "-"):
        assert text in printed


def test_a_pipe_gets_tables_of_any_width(capsys: pytest.CaptureFixture[str]) -> None:
    """Who sends a table to a file has nowhere to scroll to: no cell is cut or folded."""
    row = {f"column_{number}": f"value {number} that is not short" for number in range(20)}
    output.emit("x", [row], as_json=False)
    printed = capsys.readouterr().out
    assert all(value in printed for value in row.values())
    assert "…" not in printed


def test_a_narrow_terminal_gets_a_line_for_each_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather that than `107,37…`; what fits stays a table."""
    monkeypatch.setattr(output, "console", lambda: Console(width=60, highlight=False))
    rows = [{f"figure_{number}": 107_374_182 + number for number in range(9)} for _ in range(2)]
    output.print_rows(rows)
    lines = capsys.readouterr().out.splitlines()
    assert sum("figure 3" in line and "107,374,185" in line for line in lines) == 2
    output.print_rows([{"file": "/a/path/that/is/longer/than/any/terminal/is/wide/without/a/space/in/it", "bytes": 1}])
    assert "…" not in capsys.readouterr().out


def test_no_rows_print_an_empty_document_and_an_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that found nothing still prints its shape."""
    output.emit("x", [], as_json=True)
    assert json.loads(capsys.readouterr().out)["rows"] == []
    output.emit("x", [], as_json=False)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_result_that_cannot_be_written_is_a_typed_error(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk behind `> file` is told in one line; a closed pipe is nobody's fault."""

    class Full(io.StringIO):
        error: OSError = OSError(errno.ENOSPC, "No space left on device")

        def write(self, text: str) -> int:
            raise self.error

    full = Full()
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(StoreError, match="standard output: No space left"):
        output.emit("x", [{"a": 1}], as_json=as_json)
    full.error = BrokenPipeError(errno.EPIPE, "Broken pipe")
    with pytest.raises(BrokenPipeError):
        output.emit("x", [{"a": 1}], as_json=True)


def test_progress_goes_to_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    """What a script reads from stdout is never mixed with a bar."""
    with output.progress_bar("work") as report:
        report(1, 2)
        report(2, 2, "more work")
    assert capsys.readouterr().out == ""
