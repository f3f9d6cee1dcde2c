"""``kvcache-factory top``: the managers of a running process, live."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .control import Control, control_options, parts_of
from .output import cell, console, document, json_option

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

BAR = 24
SESSIONS = 12


@click.command(epilog="Example: kvcache-factory top --port 9095 --every 1")
@click.option("--every", default=2.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between looks.")
@click.option("--count", type=click.IntRange(min=1), help="Looks before it ends; by default it goes on.")
@control_options
@json_option
def top(every: float, count: int | None, host: str, port: int, token_file: Path | None, as_json: bool) -> None:
    """Show tiers, hit rate and sessions of a running process, again and again; Ctrl-C ends it.

    With --json, one object a line for each look.
    """
    control = Control(host, port, token_file)
    if as_json:
        for number, managers in enumerate(_looks(control, every, count)):
            click.echo(json.dumps(document("top", rows(managers, number)), ensure_ascii=False))
        return
    from rich.live import Live

    with Live(console=console(), screen=False, auto_refresh=False) as live:
        try:
            for managers in _looks(control, every, count):
                live.update(screen(managers, f"{host}:{port}"), refresh=True)
        except KeyboardInterrupt:
            return


def _looks(control: Control, every: float, count: int | None) -> Any:
    number = 0
    while count is None or number < count:
        if number:
            time.sleep(every)
        yield control.state()
        number += 1


def rows(managers: list[dict[str, Any]], look: int) -> list[dict[str, Any]]:
    """One flat row for each manager."""
    return [
        {
            "look": look,
            "manager": manager["manager"],
            "hit_rate": _hit_rate(manager),
            "served_tokens": _sum(manager, "served_tokens"),
            "hits_per_s": _last(manager, "hits_per_s"),
            "ttft_s": _last(manager, "ttft_s"),
            "held_bytes": sum(tier["held_bytes"] for part in parts_of(manager) for tier in part["tiers"]),
            "sessions": manager["num_sessions"],
            "leases": _sum(manager, "leases"),
            "bypassed": manager["bypassed"],
        }
        for manager in managers
    ]


def screen(managers: list[dict[str, Any]], where: str) -> Group:
    """What is shown at one look."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(f"kvcache-factory top  {where}  {time.strftime('%H:%M:%S')}", style="bold")]
    for manager in managers:
        row = rows([manager], 0)[0]
        line = f"{row['manager']}: hit rate {_percent(row['hit_rate'])}, {cell(row['served_tokens'])} tokens saved, "
        line += f"{cell(row['hits_per_s'])} hits/s, first token {cell(row['ttft_s'])} s"
        parts.append(Text(line + (", BYPASSED" if row["bypassed"] else "")))
        parts += [_tiers(manager), _sessions(manager)]
        parts += [Text(f"! {warning['text']}", style="yellow") for warning in manager["warnings"][-3:]]
    return Group(*parts)


def _tiers(manager: dict[str, Any]) -> Table:
    table = _table("tier", "policy", "", "used", "GiB", "of GiB", "blocks", "broken")
    for part in parts_of(manager):
        for tier in part["tiers"]:
            share = tier["held_bytes"] / tier["budget_bytes"] if tier["budget_bytes"] else 0.0
            full = round(BAR * min(share, 1.0))
            broken = ", ".join(name for name, is_open in tier.get("breakers", {}).items() if is_open)
            sizes = (cell(tier["held_bytes"] / 2**30), cell(tier["budget_bytes"] / 2**30), cell(tier["held_blocks"]))
            table.add_row(
                tier["tier"], tier["policy"], "█" * full + "░" * (BAR - full), _percent(share), *sizes, broken or "-"
            )
    return table


def _sessions(manager: dict[str, Any]) -> Table:
    from rich.text import Text

    table = _table("session", "MiB", "requests", "reused", "idle s")
    for session in sorted(manager["sessions"], key=lambda row: row["idle_s"])[:SESSIONS]:
        asked = session["asked_tokens"]
        reused = _percent(session["reused_tokens"] / asked if asked else None)
        mib = cell(session["bytes"] / 2**20)
        table.add_row(Text(session["session"]), mib, cell(session["requests"]), reused, cell(session["idle_s"]))
    return table


def _table(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in ("tier", "policy", "", "session", "broken") else "right")
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _sum(manager: dict[str, Any], key: str) -> int:
    return sum(int(part[key]) for part in parts_of(manager))


def _hit_rate(manager: dict[str, Any]) -> float | None:
    reusable = _sum(manager, "reusable_tokens")
    return _sum(manager, "served_tokens") / reusable if reusable else None


def _last(manager: dict[str, Any], key: str) -> float | None:
    values: list[float] = [sample[key] for sample in manager["history"] if sample[key] is not None]
    return values[-1] if values else None
