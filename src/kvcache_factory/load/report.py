"""What a run was like: whose counts agree, and what drifted."""

from __future__ import annotations

import os
import re
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..engine.ledger import MANAGER, Event
from ..manager import CacheManager
from .watch import Watch

Row = dict[str, Any]

FLAT = 0.02
"""Change between the second and the last quarter of a run up to which memory counts as flat."""


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts(watch: Watch, adapter: Any, manager: CacheManager) -> list[Row]:
    """Each figure as the generator, the adapter, the manager's ledger and its metrics port have counted it."""
    own, reused, state = watch.counts, adapter.status()["reused_tokens"], manager.state()
    requests, tier = adapter.status()["requests"], state["tiers"][0]["tier"]
    block = state["block_tokens"]
    served = {name: manager.ledger.total(event, MANAGER).blocks * block for name, event in _EVENTS.items()}
    exported = _exported(manager.metrics_address)
    rows = [
        _count("requests", "requests", own.requests, requests, None, None),
        _count("asked", "tokens", own.asked_tokens, None, served["asked"], exported("lookup_tokens", f'tier="{tier}"')),
        _count("reusable", "tokens", own.reusable_tokens, None, served["reusable"], exported("reusable_tokens")),
        _count("served", "tokens", own.served_tokens, reused, served["served"], exported("served_tokens")),
        _count("first tokens", "requests", own.requests, None, None, exported("first_token_seconds_count")),
    ]
    mean = sum(s for _, s in watch.first_token_s) / max(len(watch.first_token_s), 1)
    theirs = next((d for d in state["durations"] if (d["tier"], d["operation"]) == (MANAGER, "first_token")), None)
    ledger_mean = theirs["sum_s"] / theirs["count"] if theirs and theirs["count"] else 0.0
    first = _count("mean time to first token", "ms", round(mean * 1e3, 2), None, round(ledger_mean * 1e3, 2), None)
    # Two clocks around the same pass: what lies between them is a hook's call.
    first["agree"] = abs(mean - ledger_mean) <= max(0.05 * mean, 2e-3)
    ratio = own.served_tokens / own.reusable_tokens if own.reusable_tokens else 0.0
    hit = _count("hit rate", "", round(ratio, 6), None, round(state["hit_rate"] or 0.0, 6), None)
    return [*rows, first, hit]


_EVENTS = {"asked": Event.ASKED, "reusable": Event.REUSABLE, "served": Event.SERVED}


def _count(name: str, unit: str, own: Any, adapter: Any, ledger: Any, metrics: Any) -> Row:
    others = [value for value in (adapter, ledger, metrics) if value is not None]
    return {
        "kind": "count",
        "name": name,
        "unit": unit,
        "own": own,
        "adapter": adapter,
        "ledger": ledger,
        "metrics": metrics,
        "agree": all(value == own for value in others),
    }


def _exported(address: tuple[str, int] | None) -> Callable[..., int | None]:
    """Reads a counter from the metrics port, summed over series that have a label; None where no port is open."""
    text = ""
    if address is not None:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=10) as answer:
            text = answer.read().decode()

    def read(name: str, label: str = "") -> int | None:
        found = re.findall(rf"^kvcache_factory_{name}(?:_total)?\{{(.*?)\}} (\S+)$", text, re.MULTILINE)
        values = [float(value) for labels, value in found if label in labels]
        return round(sum(values)) if values else None

    return read


def drift(samples: Sequence[Row], watch: Watch, begun: float) -> list[Row]:
    """Medians of the second and of the last quarter of a run, and the change from one to the other."""
    end = samples[-1]["t_s"] if samples else 0.0
    rows = []
    for name in ("resident_bytes", "held_bytes", "fragmentation_bytes", "sessions"):
        early, late = ([s[name] for s in samples if low <= s["t_s"] <= high] for low, high in _quarters(end))
        rows.append(_drift(name, "sessions" if name == "sessions" else "bytes", early, late))
    times = [(at - begun, seconds * 1e3) for at, seconds in watch.first_token_s]
    early, late = ([ms for at, ms in times if low <= at <= high] for low, high in _quarters(end))
    rows.append(_drift("time_to_first_token", "ms", early, late))
    rows[0]["flat"] = rows[0]["change"] is not None and rows[0]["change"] <= FLAT
    return rows


def _quarters(end: float) -> tuple[tuple[float, float], tuple[float, float]]:
    return (end / 4, end / 2), (end * 3 / 4, end)


def _drift(name: str, unit: str, early: Sequence[float], late: Sequence[float]) -> Row:
    before, after = (round(statistics.median(values), 2) if values else None for values in (early, late))
    change = round(after / before - 1, 4) if before and after is not None else None
    return {"kind": "drift", "name": name, "unit": unit, "early": before, "late": after, "change": change, "flat": None}
