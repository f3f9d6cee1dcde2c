"""What a manager holds and what has happened, as plain data: the source of metrics, of the page and of the CLI."""

from __future__ import annotations

from typing import Any

from ..config import ManagerConfig
from ..engine.chain import TierChain
from ..engine.io import Lane
from ..engine.ledger import BOUNDS_S, MANAGER, Event, Ledger
from ..session import Keeper
from .log import recent_warnings


def state_of(config: ManagerConfig, chain: TierChain, ledger: Ledger, sessions: Keeper) -> dict[str, Any]:
    """See :meth:`CacheManager.state`."""
    asked, hit, reusable, served = (
        ledger.total(event, MANAGER).blocks for event in (Event.ASKED, Event.HIT, Event.REUSABLE, Event.SERVED)
    )
    tokens = chain.block_tokens
    return {
        "name": config.name,
        "open": chain.is_open,
        "compression": chain.compression,
        "block_tokens": tokens,
        "tiers": [_tier(chain, number) for number in range(len(chain.tiers))],
        "remote": chain.remote.state() if chain.remote is not None else None,
        "leases": len(chain.leases),
        "sessions": [session.stats() for session in sessions.book],
        "session_groups": sessions.groups(),
        "hit_rate_blocks": hit / asked if asked else 0.0,
        "hit_rate": served / reusable if reusable else None,
        "reusable_tokens": reusable * tokens,
        "served_tokens": served * tokens,
        "events": ledger.rows(),
        "seconds": ledger.seconds(),
        "durations": [
            {"tier": tier, "operation": operation, "count": h.calls, "sum_s": h.sum_s, "buckets": list(h.buckets)}
            for (tier, operation), h in ledger.histograms().items()
        ],
        "bounds_s": list(BOUNDS_S),
        "comparisons": ledger.comparisons(),
        "worst": ledger.worst(),
        "io": _io(chain),
        "warnings": recent_warnings(config.name),
    }


def _tier(chain: TierChain, number: int) -> dict[str, Any]:
    state = chain.tiers[number].state()
    fetcher = chain.flow.known_fetcher(number)
    if fetcher is not None:
        state["breakers"] = {**state.get("breakers", {}), "read": chain.is_open and fetcher.out_of_service}
    return state


def _io(chain: TierChain) -> dict[str, int]:
    pool = chain.flow.io
    return {
        "running": pool.running,
        "abandoned_reads": chain.flow.abandoned_reads,
        **{f"{lane.name.lower()}_queue": pool.waiting(lane) for lane in Lane},
    }
