"""From a configuration to tiers: the only place that knows stores, policies and the engine together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from .backend import DEFAULT_SIZE_GB, GIB, CPUBackend, HierarchicalBackend, Level, levels_of
from .config import ManagerConfig
from .engine.chain import TierChain
from .engine.flow import FlowSettings
from .engine.ledger import Ledger
from .engine.tier import Tier
from .errors import CapacityError
from .policy.base import EvictionPolicy
from .store.memory import MemoryStore


def build_chain(
    config: ManagerConfig,
    policy: EvictionPolicy,
    ledger: Ledger,
    on_error: Callable[[Exception], None],
    clock: Callable[[], float] = time.monotonic,
) -> TierChain:
    """Unopened tiers for *config*; nothing is allocated until the first model is registered."""
    levels = levels_of(config.backend)
    budgets = level_budgets(levels, policy.max_size_gb)
    tiers = [
        Tier(name, _store(level), policy.clone(), budget, ledger, clock)
        for name, level, budget in zip(_names(levels), levels, budgets, strict=True)
    ]
    flow = FlowSettings(
        integrity=config.integrity, lease_max_age_s=config.lease_max_age_s, io_threads=config.io_threads
    )
    if isinstance(config.backend, HierarchicalBackend):
        marks = config.backend
        flow = msgspec.structs.replace(flow, demote_at=marks.demote_at, demote_to=marks.demote_to)
    return TierChain(tiers, flow, ledger, clock, on_error)


def level_budgets(levels: Sequence[Level], max_size_gb: float | None) -> list[int]:
    """Bytes of each level: its own size, all together at most *max_size_gb* GiB, cut from the slowest level up."""
    default = DEFAULT_SIZE_GB if max_size_gb is None else max_size_gb
    left = float("inf") if max_size_gb is None else max_size_gb * GIB
    budgets = []
    for level in levels:
        wanted = (level.size_gb if level.size_gb is not None else default) * GIB
        budgets.append(int(min(wanted, left)))
        left -= budgets[-1]
    if min(budgets) <= 0:
        raise CapacityError(
            f"the policy's max_size_gb={max_size_gb} is used up by the faster levels and leaves none for level "
            f"{budgets.index(min(budgets))}; raise it, or shrink the levels before"
        )
    return budgets


def _store(level: Level) -> MemoryStore:
    if isinstance(level, CPUBackend):
        return MemoryStore(None, level.huge_pages)
    return MemoryStore(level.device)


def _names(levels: Sequence[Level]) -> list[str]:
    names: list[str] = []
    for level in levels:
        kind = "cpu" if isinstance(level, CPUBackend) else "gpu"
        same = sum(name.startswith(kind) for name in names)
        names.append(f"{kind}{same}" if same else kind)
    return names
