"""Figures of a manager's state, as sums that rules can ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.ledger import MANAGER

State = Mapping[str, Any]


class Figures:
    """What ``CacheManager.state()`` says, from wherever it came; what is missing there counts as nothing.

    Raises TypeError, ValueError or KeyError for what is no such state.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.tiers: list[dict[str, Any]] = list(state["tiers"])
        self.sessions: list[dict[str, Any]] = list(state.get("sessions", ()))
        self.reusable = int(state.get("reusable_tokens", 0))
        self._tokens = int(state.get("block_tokens", 0))
        self._events = [
            (str(row["tier"]), str(row["event"]), str(row["reason"]), int(row["times"]), int(row["blocks"]))
            for row in state["events"]
        ]

    def blocks(self, event: str, tier: str | None = None, reason: str | None = None) -> int:
        """Blocks of all entries that match; the manager's own have the tier ``"manager"``."""
        return sum(n for t, e, r, _, n in self._events if e == event and tier in (None, t) and reason in (None, r))

    def times(self, event: str, tier: str | None = None) -> int:
        """Times of all entries that match."""
        return sum(n for t, e, _, n, _ in self._events if e == event and tier in (None, t))

    def reasons(self, event: str, *, tiers_only: bool = False) -> dict[str, int]:
        """Blocks by reason, without those of no reason; *tiers_only*: not those that the manager counted itself."""
        found: dict[str, int] = {}
        for tier, kind, reason, _, blocks in self._events:
            if kind == event and reason and not (tiers_only and tier == MANAGER):
                found[reason] = found.get(reason, 0) + blocks
        return found

    @property
    def asked(self) -> int:
        """Blocks that requests asked for."""
        return self.blocks("asked", MANAGER)

    def recomputed(self, reason: str) -> float:
        """Share of the reusable tokens that were recomputed for this reason."""
        return self.blocks("recomputed", MANAGER, reason) * self._tokens / self.reusable if self.reusable else 0.0

    def tier_hits(self) -> list[int]:
        """Blocks that each tier served, the fastest first."""
        return [self.blocks("hit", tier["tier"]) for tier in self.tiers]

    def seconds(self, *operations: str, manager: bool = False) -> float:
        """Time that operations took: those of the tiers, or the manager's own."""
        rows = self.state.get("durations", ())
        return sum(
            float(row["sum_s"])
            for row in rows
            if row["operation"] in operations and (row["tier"] == MANAGER) == manager
        )

    def compared(self, kind: str) -> tuple[int, float, float]:
        """How often a kind of work was predicted, and seconds predicted and taken."""
        row = next((row for row in self.state.get("comparisons", ()) if row["kind"] == kind), None)
        return (int(row["times"]), float(row["predicted_s"]), float(row["actual_s"])) if row else (0, 0.0, 0.0)

    def tier_sum(self, name: str) -> int:
        """Sum of a figure over the tiers; of the values, where it is one by something."""
        values = [tier.get(name, 0) for tier in self.tiers]
        return sum(sum(value.values()) if isinstance(value, Mapping) else int(value) for value in values)
