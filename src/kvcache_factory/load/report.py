"""What a run was like: whose counts agree, and what drifted."""

from __future__ import annotations

import json
import os
import re
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..engine.ledger import MANAGER, Event
from ..manager import CacheManager
from ..observe.port import has_page
from .watch import Watch

Row = dict[str, Any]

FLAT = 0.02
"""Change between the second and the last quarter of a run up to which memory counts as flat."""


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts(watch: Watch, adapter: Any, manager: CacheManager) -> list[Row]:
    """Each figure as the generator, the adapter, the manager's ledger, its metrics and its page have counted it."""
    own, reused, state = watch.counts, adapter.status()["reused_tokens"], manager.state()
    requests, tier = adapter.status()["requests"], state["tiers"][0]["tier"]
    block = state["block_tokens"]
    served = {name: manager.ledger.total(event, MANAGER).blocks * block for name, event in _EVENTS.items()}
    exported, page = _exported(manager.metrics_address), _page(manager.metrics_address)
    asked = exported("lookup_tokens", f'tier="{tier}"')
    rows = [
        _count("requests", "requests", own.requests, adapter=requests),
        _count("asked", "tokens", own.asked_tokens, ledger=served["asked"], metrics=asked),
        *(
            _count(
                name,
                "tokens",
                getattr(own, f"{name}_tokens"),
                adapter=reused if name == "served" else None,
                ledger=served[name],
                metrics=exported(f"{name}_tokens"),
                page=page.get(f"{name}_tokens"),
            )
            for name in ("reusable", "served")
        ),
        _count("first tokens", "requests", own.requests, metrics=exported("first_token_seconds_count")),
    ]
    mean = sum(s for _, s in watch.first_token_s) / max(len(watch.first_token_s), 1)
    first = _count(
        "mean time to first token",
        "ms",
        round(mean * 1e3, 2),
        ledger=_mean_first_ms(state),
        page=_mean_first_ms(page) if page else None,
    )
    # Two clocks around the same pass: what lies between them is a hook's call.
    others = [value for value in (first["ledger"], first["page"]) if value is not None]
    first["agree"] = all(abs(mean * 1e3 - value) <= max(0.05 * mean * 1e3, 2) for value in others)
    ratio = own.served_tokens / own.reusable_tokens if own.reusable_tokens else 0.0
    rates = {"ledger": state["hit_rate"], "metrics": exported("hit_ratio"), "page": page.get("hit_rate")}
    rounded = {name: None if rate is None else round(rate, 6) for name, rate in rates.items()}
    return [*rows, first, _count("hit rate", "", round(ratio, 6), **rounded)]


_EVENTS = {"asked": Event.ASKED, "reusable": Event.REUSABLE, "served": Event.SERVED}


def _count(
    name: str, unit: str, own: Any, adapter: Any = None, ledger: Any = None, metrics: Any = None, page: Any = None
) -> Row:
    others = {"adapter": adapter, "ledger": ledger, "metrics": metrics, "page": page}
    agree = all(value == own for value in others.values() if value is not None)
    return {"kind": "count", "name": name, "unit": unit, "own": own, **others, "agree": agree}


def _mean_first_ms(state: dict[str, Any]) -> float:
    spent = next((d for d in state["durations"] if (d["tier"], d["operation"]) == (MANAGER, "first_token")), None)
    return round(spent["sum_s"] / spent["count"] * 1e3, 2) if spent and spent["count"] else 0.0


def _exported(address: tuple[str, int] | None) -> Callable[..., float | None]:
    """Reads a metric from the metrics port, summed over series that have a label; None where no port is open."""
    text = _read(address, "/metrics") if address is not None else ""

    def read(name: str, label: str = "") -> float | None:
        found = re.findall(rf"^kvcache_factory_{name}(?:_total)?\{{(.*?)\}} (\S+)$", text, re.MULTILINE)
        values = [float(value) for labels, value in found if label in labels]
        total = sum(values, 0.0)
        return None if not values else int(total) if total.is_integer() else total

    return read


def _page(address: tuple[str, int] | None) -> dict[str, Any]:
    """What the page shows of the only manager; nothing where no port is open, or one without a page."""
    if address is None or not has_page():
        return {}
    managers = json.loads(_read(address, "/state"))["managers"]
    return dict(next(manager for manager in managers if manager["name"] == "load"))


def _read(address: tuple[str, int], path: str) -> str:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=60) as answer:
        return str(answer.read().decode())


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
