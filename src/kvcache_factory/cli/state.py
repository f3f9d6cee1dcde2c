"""``kvcache-factory state``: what the managers of a running process hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .control import Control, control_options, parts_of
from .output import emit, json_option


@click.command(epilog="Example: kvcache-factory state --port 9095")
@control_options
@json_option
def state(host: str, port: int, token_file: Path | None, as_json: bool) -> None:
    """What the managers of a running process hold, tier by tier, and their hit rate."""
    managers = Control(host, port, token_file).state()
    rows = [row for manager in managers for part in parts_of(manager) for row in tier_rows(manager, part)]
    emit("state", rows, as_json=as_json, title=f"state of {host}:{port}")


def tier_rows(manager: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each tier of a part of a manager."""
    return [
        {
            "manager": manager["manager"],
            "tier": tier["tier"],
            "policy": tier["policy"],
            "held_bytes": tier["held_bytes"],
            "budget_bytes": tier["budget_bytes"],
            "held_blocks": tier["held_blocks"],
            "prefaulted": tier["prefaulted"],
            "broken": ", ".join(name for name, is_open in tier.get("breakers", {}).items() if is_open),
            "hit_rate": part["hit_rate"],
            "served_tokens": part["served_tokens"],
            "reusable_tokens": part["reusable_tokens"],
            "sessions": manager["num_sessions"],
            "leases": part["leases"],
            "open": part["open"],
            "bypassed": manager["bypassed"],
        }
        for tier in part["tiers"]
    ]
