"""``kvcache-factory inspect``: what is in the directory of a disk tier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .elsewhere import connector_options
from .output import emit, json_option, print_rows, progress_bar, shorten

SECTIONS = {
    "directory": ("blocks", "used_bytes", "segments", "live_processes", "damaged_records", "unreadable_segments"),
    "identity": ("identity", "model", "namespace", "kv_dtype", "blocks", "bytes", "newest", "oldest"),
    "segment": ("segment", "owner", "owner_pid", "blocks", "slots", "slot_bytes", "bytes", "oldest", "health"),
    "process": ("pid", "owned_bytes", "wants_room"),
    "remote": ("connector", "identity", "blocks", "there"),
}
TITLES = {
    "identity": "Identities",
    "segment": "Segments",
    "process": "Processes that use it now",
    "remote": "In the store",
}
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@click.command(epilog="Example: kvcache-factory inspect /var/cache/kv --json")
@click.argument("path", type=click.Path(path_type=Path))
@connector_options
@json_option
def inspect(path: Path, connector: str | None, store_namespace: str, as_json: bool) -> None:
    """Show whose blocks the directory PATH holds: models, sizes, ages, owners, health.

    Nothing is written and no process is disturbed.  Blocks themselves are not read: kvcache-factory verify does that.
    With --connector, also how many of these blocks are in its store; a store cannot be asked for what it holds.
    """
    from ..maintenance.elsewhere import elsewhere, every_block, remote_rows
    from ..maintenance.inspection import inspect_rows
    from ..maintenance.survey import survey

    seen = survey(path)
    rows = inspect_rows(seen)
    if connector is not None:
        with progress_bar("inspect") as progress, elsewhere(connector, store_namespace) as store:
            rows += remote_rows(store, every_block(seen), "inspect", progress)
    if as_json:
        emit("inspect", rows, as_json=True)
        return
    for kind, columns in SECTIONS.items():
        section = [_shown(row) for row in rows if row["kind"] == kind]
        if section:
            print_rows(section, title=TITLES.get(kind, str(path)), columns=columns)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for people: ages in words, long names by their beginning."""
    return shorten(row) | {name: in_words(row.get(f"{name}_s")) for name in ("oldest", "newest")}


def in_words(seconds: float | None) -> str | None:
    """An age as people say it."""
    if seconds is None:
        return None
    unit, word = next(((u, w) for u, w in UNITS if seconds >= u), UNITS[-1])
    return f"{seconds / unit:.0f} {word}"
