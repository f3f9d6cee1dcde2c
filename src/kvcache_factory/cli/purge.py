"""``kvcache-factory purge``: remove blocks from the directory of a disk tier."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .elsewhere import connector_options
from .output import emit, json_option, progress_bar, shorten

if TYPE_CHECKING:
    from ..maintenance.purging import Plan

COLUMNS = ("identity", "model", "namespace", "action", "blocks", "bytes", "reason")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def in_seconds(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """A time span such as 30d, in seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is no age; write a number and s, m, h, d or w, such as 30d")
    return float(match[1]) * SECONDS[match[2]]


@click.command(epilog="Example: kvcache-factory purge /var/cache/kv --older-than 30d")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--model", metavar="M", help="Blocks of this model: its fingerprint or id, or the first 8 characters.")
@click.option("--older-than", metavar="AGE", callback=in_seconds, help="Written longer ago: 90m, 12h, 30d, 2w.")
@click.option("--namespace", metavar="N", help="Blocks of this namespace.")
@click.option("--all", "everything", is_flag=True, help="Everything, segments without a readable block included.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connector_options
@json_option
@click.pass_context
def purge(
    context: click.Context,
    path: Path,
    model: str | None,
    older_than: float | None,
    namespace: str | None,
    everything: bool,
    yes: bool,
    connector: str | None,
    store_namespace: str,
    as_json: bool,
) -> None:
    """Remove blocks from the directory PATH, with whatever was built on them; asks first.

    Several conditions together choose what all of them hold for.  What a living process owns stays, and is listed; end
    that process and purge again.  The exit code is 1 when something stayed.
    With --connector, the copies of these blocks in its store are deleted instead, and PATH stays as it is.
    """
    from ..maintenance.elsewhere import elsewhere, remote_rows
    from ..maintenance.purging import Wanted, plan_purge
    from ..maintenance.purging import purge as carry_out
    from ..maintenance.survey import survey

    wanted = Wanted(model=model, namespace=namespace, older_than_s=older_than, everything=everything)
    plan = plan_purge(survey(path), wanted)
    if connector is not None:
        chosen = sum(int(mask.sum()) for _, mask in plan.chosen)
        click.echo(f"{chosen:,} blocks that {path} names can be deleted in the store of {connector}", err=True)
        if chosen and not yes:
            click.confirm(f"Delete them from the store of {connector}?", abort=True, err=True)
        with progress_bar("purge") as progress, elsewhere(connector, store_namespace) as store:
            rows = remote_rows(store, plan.chosen, "purge", progress)
        emit("purge", rows, as_json=as_json, title=f"purge {connector}")
        if any(row["deleted"] < row["there"] for row in rows):
            context.exit(1)
        return
    click.echo(describe(plan), err=True)
    if (plan.blocks(live=False) or plan.litter) and not yes:
        click.confirm(f"Remove them from {path}?", abort=True, err=True)
    with progress_bar("purge") as progress:
        rows = carry_out(plan, progress)
    emit("purge", [_short(row, as_json) for row in rows], as_json=as_json, title=f"purge {path}")
    if any(row["action"] == "kept" for row in rows):
        context.exit(1)


def describe(plan: Plan) -> str:
    """What a purge would do, in one or two lines."""
    text = f"{plan.blocks(live=False):,} blocks of {plan.bytes(live=False):,} bytes can be removed"
    if plan.built_on:
        text += f", {plan.built_on:,} of all because they were built on others"
    if plan.litter:
        count = len(plan.litter)
        text += f"; {count} {'segments' if count > 1 else 'segment'} without a readable block too"
    stay = plan.blocks(live=True)
    if stay:
        pids = ", ".join(map(str, plan.live_owners()))
        text += f"\n{stay:,} blocks stay: living processes own them ({pids})"
    return text


def _short(row: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """A row as it is for scripts, and only its telling columns for people."""
    if as_json:
        return row
    shown = shorten(row)
    return {name: shown[name] for name in COLUMNS}
