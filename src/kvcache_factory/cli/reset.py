"""``kvcache-factory reset``: drop what the managers of a running process hold."""

from __future__ import annotations

from pathlib import Path

import click

from .control import Control, control_options
from .output import emit, json_option


@click.command(epilog="Example: kvcache-factory reset --port 9095 --session ada --yes")
@click.option("--manager", metavar="NAME", help="Which manager; needed where there are several.")
@click.option("--session", metavar="ID", help="Only what this session alone references, and its history.")
@click.option("--tier", metavar="NAME", help="Only this tier; copies in others stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@control_options
@json_option
def reset(
    manager: str | None,
    session: str | None,
    tier: str | None,
    yes: bool,
    host: str,
    port: int,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Drop every block and every session's history in a running process; asks first.

    It needs the token of the process: KVCACHE_FACTORY_TOKEN, --token-file, or being the same user on the same machine.
    """
    if session is not None and tier is not None:
        raise click.UsageError("give --session or --tier, not both")
    what = f"session {session!r}" if session is not None else f"tier {tier!r}" if tier is not None else "everything"
    if not yes:
        click.confirm(f"Drop {what} of {host}:{port}?", abort=True, err=True)
    action = {"action": "reset"}
    if session is not None:
        action = {"action": "clear_session", "session": session}
    if tier is not None:
        action = {"action": "drop_tier", "tier": tier}
    dropped = Control(host, port, token_file).act(action, manager)
    row = {"manager": manager, "action": action["action"], "what": what, "dropped_blocks": dropped}
    emit("reset", [row], as_json=as_json, title=f"reset {host}:{port}")
