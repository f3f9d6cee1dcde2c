"""``kvcache-factory bypass``: make the cache of a running process vanish, and come back."""

from __future__ import annotations

from pathlib import Path

import click

from .control import Control, control_options
from .output import emit, json_option


@click.command(epilog="Example: kvcache-factory bypass on --port 9095")
@click.argument("switch", type=click.Choice(["on", "off"]))
@click.option("--manager", metavar="NAME", help="Which manager; needed where there are several.")
@control_options
@json_option
def bypass(switch: str, manager: str | None, host: str, port: int, token_file: Path | None, as_json: bool) -> None:
    """Make the cache of a running process vanish without touching the engine (on), or come back (off).

    What it holds stays.  It needs the token of the process, as `reset` does.
    """
    Control(host, port, token_file).act({"action": "bypass", "on": switch == "on"}, manager)
    row = {"manager": manager, "bypassed": switch == "on"}
    emit("bypass", [row], as_json=as_json, title=f"bypass {host}:{port}")
