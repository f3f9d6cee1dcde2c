"""What a run was like: whose counts agree, and what drifted."""

from __future__ import annotations

import json
import re
import statistics
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..engine.ledger import MANAGER, Event
from ..manager import CacheManager
from ..observe.port import has_page
from .sampling import Row
from .watch import Counts, Watch

Reader = Callable[..., float | None]
"""The value of a metric by its name without prefix and ``_total``, and a label; None where there is none."""

ROUNDING_MS = 0.01
FLAT = 0.02
"""Change between the second and the last quarter of a run up to which memory counts as flat."""


def counts(watch: Watch, adapter: Any, manager: CacheManager, scraped: Reader | None = None) -> list[Row]:
    """Each figure as the generator, the adapter, the manager's ledger, its metrics and its page have counted it.

    *scraped* reads a metric from a Prometheus server, which is one more that counts.
    """
    own, reused, state = watch.counts, adapter.status()["reused_tokens"], manager.state()
    requests, tier, block = adapter.status()["requests"], state["tiers"][0]["tier"], state["block_tokens"]
    ledger = {name: manager.ledger.total(event, MANAGER).blocks * block for name, event in _EVENTS.items()}
    exported, page = _exported(manager.metrics_address), _page(manager.metrics_address)
    prometheus = scraped if scraped is not None else _nothing

    def row(name: str, own: int, metric: str, label: str = "", unit: str = "tokens", **others: Any) -> Row:
        others = {**others, "metrics": exported(metric, label), "prometheus": prometheus(metric, label)}
        return _count(name, unit, own, **others)

    rows = [
        _count("requests", "requests", own.requests, adapter=requests),
        row("asked", own.asked_tokens, "lookup_tokens", f'tier="{tier}"', ledger=ledger["asked"]),
        *(
            row(
                name,
                getattr(own, f"{name}_tokens"),
                f"{name}_tokens",
                adapter=reused if name == "served" else None,
                ledger=ledger[name],
                page=page.get(f"{name}_tokens"),
            )
            for name in ("reusable", "served")
        ),
        row("first tokens", own.requests, "first_token_seconds_count", unit="requests"),
        _first_token(own, state, page, exported, prometheus),
    ]
    ratio = own.served_tokens / own.reusable_tokens if own.reusable_tokens else 0.0
    rates = {"ledger": state["hit_rate"], "metrics": exported("hit_ratio"), "page": page.get("hit_rate")}
    rates["prometheus"] = prometheus("hit_ratio")
    rounded = {name: None if rate is None else round(rate, 6) for name, rate in rates.items()}
    return [*rows, _count("hit rate", "", round(ratio, 6), **rounded)]


_EVENTS = {"asked": Event.ASKED, "reusable": Event.REUSABLE, "served": Event.SERVED}
_OTHERS = ("adapter", "ledger", "metrics", "page", "prometheus")


def _nothing(name: str, label: str = "") -> None:
    """Reads from a server that is not there."""


def _count(name: str, unit: str, own: Any, **given: Any) -> Row:
    others = {other: given.get(other) for other in _OTHERS}
    agree = all(value == own for value in others.values() if value is not None)
    return {"kind": "count", "name": name, "unit": unit, "own": own, **others, "agree": agree}


def _first_token(own: Counts, state: Row, page: Row, exported: Reader, prometheus: Reader) -> Row:
    """Mean times: those derived from the ledger are one number, and the generator's own clock is next to it."""

    def mean_ms(read: Reader) -> float | None:
        spent, count = read("first_token_seconds_sum"), read("first_token_seconds_count")
        return round(spent / count * 1e3, 2) if spent and count else None

    others = {
        "ledger": _mean_first_ms(state),
        "metrics": mean_ms(exported),
        "page": _mean_first_ms(page) if page else None,
        "prometheus": mean_ms(prometheus),
    }
    mean, least, most = (
        seconds / max(own.requests, 1) * 1e3 for seconds in (own.first_token_s, own.first_pass_s, own.first_return_s)
    )
    row = _count("mean time to first token", "ms", round(mean, 2), **others)
    told = {value for value in others.values() if value is not None}
    # The adapter's clock runs between two of the generator's, however busy the machine is.
    row["agree"] = len(told) == 1 and all(least - ROUNDING_MS <= value <= most + ROUNDING_MS for value in told)
    return row


def _mean_first_ms(state: dict[str, Any]) -> float:
    spent = next((d for d in state["durations"] if (d["tier"], d["operation"]) == (MANAGER, "first_token")), None)
    return round(spent["sum_s"] / spent["count"] * 1e3, 2) if spent and spent["count"] else 0.0


def _exported(address: tuple[str, int] | None) -> Reader:
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
    """The second and the last quarter of a run, and the change from one to the other.

    Medians of what a sample holds; what a turn took and what it was, as means over the quarter's turns.
    """
    quarters = _quarters(samples[-1]["t_s"] if samples else 0.0)
    parts = [[s for s in samples if low <= s["t_s"] <= high] for low, high in quarters]
    rows = [_drift(name, unit, *(_median(s[name] for s in part) for part in parts)) for name, unit in _MEDIANS.items()]
    times = [watch.first_tokens.between(begun + low, begun + high) * 1e3 for low, high in quarters]
    rows.append(_drift("time_to_first_token", "ms", *(_median(part) for part in times)))
    for name, (unit, source, factor) in _PER_TURN.items():
        rows.append(_drift(name, unit, *(_per_turn(part, source, factor) for part in parts)))
    for row in rows:
        if row["name"] in _MUST_BE_FLAT:
            row["flat"] = row["change"] is not None and row["change"] <= FLAT
    return rows


_MEDIANS = {
    "resident_bytes": "bytes",
    "generator_bytes": "bytes",
    "python_blocks": "objects",
    "held_bytes": "bytes",
    "fragmentation_bytes": "bytes",
    "sessions": "sessions",
    "yardstick_ms": "ms",
}
_PER_TURN = {
    "cpu_per_turn": ("ms", "cpu_s", 1e3),
    "computed_per_turn": ("tokens", "computed_tokens", 1.0),
    "answered_per_turn": ("tokens", "answered_tokens", 1.0),
}
_MUST_BE_FLAT = ("resident_bytes", "python_blocks")


def _quarters(end: float) -> tuple[tuple[float, float], tuple[float, float]]:
    return (end / 4, end / 2), (end * 3 / 4, end)


def _median(values: Iterable[float]) -> float | None:
    there = list(values)
    return round(float(statistics.median(there)), 3) if there else None


def _per_turn(part: Sequence[Row], name: str, factor: float) -> float | None:
    """What a turn of this quarter had of what is summed up in *name*."""
    turns = part[-1]["requests"] - part[0]["requests"] if part else 0
    return round((part[-1][name] - part[0][name]) / turns * factor, 3) if turns else None


def _drift(name: str, unit: str, early: float | None, late: float | None) -> Row:
    change = round(late / early - 1, 4) if early and late is not None else None
    return {"kind": "drift", "name": name, "unit": unit, "early": early, "late": late, "change": change, "flat": None}
