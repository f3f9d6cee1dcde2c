"""``kvcache-factory advise``: what live figures say about symptoms, and what to turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from .control import Control, control_options, parts_of
from .output import emit, json_option


@click.command(epilog="Example: kvcache-factory advise --port 9095")
@click.option(
    "--state",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Read a state from this file, as json.dump(manager.state(), file) wrote it, or /state answered.",
)
@control_options
@json_option
def advise(path: Path | None, host: str, port: int, token_file: Path | None, as_json: bool) -> None:
    """Print the rows of docs/troubleshooting.md that the figures of a running process match.

    The figures come from its control port, or from a file.  In the process itself:
    kvcache_factory.maintenance.advice.advise(manager.state()).
    """
    from ..maintenance.advice import advise as advice_of

    managers = _states(path) if path is not None else Control(host, port, token_file).state()
    rows = [row for manager in managers for part in parts_of(manager) for row in advice_of({**part, **_name(manager)})]
    where = str(path) if path is not None else f"{host}:{port}"
    if not rows and not as_json:
        click.echo(f"{where}: no row of docs/troubleshooting.md matches these figures.")
        return
    emit("advise", rows, as_json=as_json, title=f"advice for {where}")


def _name(manager: dict[str, Any]) -> dict[str, Any]:
    return {"manager": manager.get("manager", manager.get("name", "")), "bypassed": manager.get("bypassed", False)}


def _states(path: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; write it with json.dump(manager.state(), file)") from error
    states = data.get("managers", [data]) if isinstance(data, dict) else data
    if not isinstance(states, list) or not all(isinstance(state, dict) and "tiers" in state for state in states):
        raise ConfigError(f"{path} holds no state of a manager; write it with json.dump(manager.state(), file)")
    return [{"open": False, **state} for state in states]
