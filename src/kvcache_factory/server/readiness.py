"""Whether managers can do their work: what ``/readyz`` says."""

from __future__ import annotations

from typing import Any

from ..memory.transfer import chosen_path
from ..observe.series import breakers_of


def readiness(states: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``ready``, and for each manager what holds it up; pre-faulting is told and holds nothing up.

    A manager is ready when a model is registered with it (here or in an engine's process), each of its tiers has passed
    its self-test, and each takes writes.
    """
    managers = {label: _manager(state) for label, state in states.items()}
    return {"ready": all(entry["ready"] for entry in managers.values()), "managers": managers}


def _manager(state: dict[str, Any]) -> dict[str, Any]:
    engines = [engine for engine in state.get("engines", ()) if engine]
    parts = [part for part in (state, *engines) if part["open"]]
    problems = [] if parts else ["no model is registered yet"]
    tiers = []
    for part in parts:
        for tier in part["tiers"]:
            problems += _problems(tier)
            tiers.append({"tier": tier["tier"], "prefaulted": tier["prefaulted"]})
        remote = part.get("remote")
        if remote and any(breakers_of(remote).values()):
            # Generation goes on without it, so it holds nothing up.
            tiers.append({"tier": remote["tier"], "prefaulted": 1.0, "note": "is not asked for the moment"})
    return {"ready": not problems, "problems": problems, "tiers": tiers, "copies": chosen_path()}


def _problems(tier: dict[str, Any]) -> list[str]:
    found = []
    if not tier.get("self_test", True):
        found.append(f"tier {tier['tier']}: what was written at the start could not be read back")
    if not tier.get("writable", True):
        found.append(f"tier {tier['tier']} takes no writes")
    if tier.get("breakers", {}).get("read"):
        found.append(f"tier {tier['tier']} does not answer reads")
    return found
