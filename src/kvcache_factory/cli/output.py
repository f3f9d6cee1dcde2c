"""What commands print: one JSON shape for all of them, one table, one progress bar."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import click

from .. import __version__
from ..errors import StoreError
from . import machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEBUG_VARIABLE = "KVCACHE_FACTORY_DEBUG"

WIDE = 1000
"""Columns of what is no terminal."""

Row = Mapping[str, Any]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


class Progress(Protocol):
    """What a long run calls to say how far it is."""

    def __call__(self, done: float, total: float, text: str = "") -> None: ...


def debugging() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def _plain(value: Any) -> Any:
    """A JSON value for *value*: numpy scalars become Python's, NaN and infinity become null."""
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, bool | int | float | str), f"rows are flat, not {type(value)}"
    return value


def document(command: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON object of every command: ``command``, ``version``, ``machine`` and ``rows``, a list of flat objects."""
    return {
        "command": command,
        "version": __version__,
        "machine": machine.summary(),
        "rows": [{str(k): _plain(v) for k, v in row.items()} for row in rows],
    }


def console(*, stderr: bool = False) -> Console:
    """A rich console; of any width when the output goes to a file or a pipe, so that no table is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDE, highlight=False)


def cell(value: Any) -> str:
    """One value as it is shown in a table."""
    value = _plain(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def shorten(row: Row) -> dict[str, Any]:
    """A row for people: digests and fingerprints by their beginning."""
    shown = dict(row)
    for name in ("identity", "model"):
        text = shown.get(name)
        if isinstance(text, str) and len(text) > 24:
            shown[name] = f"{text[:12]}…"
    return shown


def print_rows(rows: Sequence[Row], *, title: str = "", columns: Sequence[str] | None = None) -> None:
    """Print *rows* as a table; the columns are those of the first row unless given.

    On a terminal that is too narrow for it, each row is a table of its own, with a line for each column: what is cut
    off is not shown.  StoreError as of :func:`emit`.
    """
    from rich.measure import Measurement

    names = list(columns or (rows[0] if rows else ()))
    out = console()
    table = _across(rows, names, title)
    fits = Measurement.get(out, out.options.update_width(WIDE), table).minimum <= out.width
    with _writing():
        for part in [table] if fits else [_down(row, names, title) for row in rows]:
            out.print(part)


def _across(rows: Sequence[Row], names: Sequence[str], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for name in names:
        numeric = any(isinstance(_plain(row.get(name)), int | float) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(row.get(name))) for name in names))
    return table


def _down(row: Row, names: Sequence[str], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name in names:
        table.add_row(name.replace("_", " "), Text(cell(row.get(name))))
    return table


def emit(command: str, rows: Sequence[Row], *, as_json: bool, title: str = "") -> None:
    """Print the rows of a command in the form the user asked for; StoreError where standard output takes no more."""
    if not as_json:
        print_rows(rows, title=title)
        return
    with _writing():
        click.echo(json.dumps(document(command, rows), indent=2, ensure_ascii=False))


@contextmanager
def _writing() -> Iterator[None]:
    """Around what writes a result: a full disk behind it is a StoreError, and a closed pipe nobody's fault."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StoreError(
            f"the result cannot be written to standard output: {error.strerror or error}; send it elsewhere"
        ) from error


@contextmanager
def progress_bar(text: str) -> Iterator[Progress]:
    """A bar on stderr for as long as the context is open, so that stdout stays what was asked for."""
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)

        def report(done: float, total: float, text: str = "") -> None:
            bar.update(task, completed=done, total=total, description=text or None)

        yield report
