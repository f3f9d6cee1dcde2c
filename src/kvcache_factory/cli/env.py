"""``kvcache-factory env``: every environment variable as it stands, and whether a manager can be made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .output import cell, emit, json_option, print_rows


@click.command(epilog="Example: kvcache-factory env --check")
@click.option("--file", "path", metavar="FILE", help="Over this TOML or YAML file, or preset.")
@click.option("--check", is_flag=True, help="Exit with 1 when a value or a combination is wrong.")
@click.option("--set", "only_set", is_flag=True, help="Only what is not the default.")
@json_option
@click.pass_context
def env(context: click.Context, path: str | None, check: bool, only_set: bool, as_json: bool) -> None:
    """Show every AIBRIX_KV_CACHE_OL_ variable: value, who said so, and meaning.

    Values come from the environment, from --file, or are defaults.  What is wrong, unknown or without effect is said
    on standard error; nothing is opened.
    """
    from ..environment import PREFIX, explain

    found = explain(file=path)
    rows: list[dict[str, Any]] = [
        {"name": s.name, "value": s.value, "source": s.source, "meaning": s.meaning}
        for s in found.settings
        if not only_set or s.source != "default"
    ]
    if as_json:
        emit("env", rows, as_json=True)
    else:
        print_rows(
            [_shown(row, PREFIX) for row in rows], title=PREFIX + "…" + (f" over {Path(path).name}" if path else "")
        )
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    for error in found.errors:
        click.echo(f"error: {error}", err=True)
    if check and found.errors:
        context.exit(1)


def _shown(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A row for people: no prefix, and numbers as they are written in the environment."""
    value = row["value"]
    text = cell(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return row | {"name": row["name"].removeprefix(prefix), "value": text}
