"""Policies that keep evictable rows in order of a score: what a row is worth, whatever that means."""

from __future__ import annotations

import heapq
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from .base import Action, Importance, Keys, RequestHint, Rows, Target
from .order import QueuedPolicy


class ScoredPolicy(QueuedPolicy):
    """Evicts the evictable row with the smallest score; among equals, the least recently used.

    The queue is a heap of (score, stamp, row) with lazy deletion, as in
    :class:`~kvcache_factory.policy.order.StampOrderPolicy`.  A subclass sets `_score` of rows before it calls
    :meth:`_touch`.
    """

    bytes_per_row: int = 192

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._score = np.zeros(rows)
        self._score_at: Any = memoryview(self._score)
        self._heap: list[tuple[float, int, int]] = []

    def next_victim(self) -> int:
        while self._heap:
            score, stamp, row = heapq.heappop(self._heap)
            if self._evictable_at[row] and self._score_at[row] == score and self._stamp_at[row] == stamp:
                self._evictable_at[row] = False
                self._live -= 1
                return row
        return -1

    def _touch(self, now: float, rows: Rows) -> None:
        """Stamp *rows*, and queue anew those of them that can leave."""
        self._stamp[rows] = self._tick(now)
        for row in rows[self._evictable[rows]].tolist():
            self._push(row)

    def _push(self, row: int) -> None:
        heapq.heappush(self._heap, (self._score_at[row], self._stamp_at[row], row))
        if len(self._heap) > 2 * self._live + 16:
            rows = np.flatnonzero(self._evictable)
            columns = (self._score[rows].tolist(), self._stamp[rows].tolist(), rows.tolist())
            self._heap = list(zip(*columns, strict=True))
            heapq.heapify(self._heap)


class GDSFEvictionPolicy(ScoredPolicy):
    """Evicts the leaf with the smallest age-adjusted uses times cost by size (Greedy-Dual-Size-Frequency).

    Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Labs 1998.
    Deviations: only leaves leave; blocks of a level are of one size, so that uses and cost decide.

    Parameters
    ----------
    cost:
        What a miss costs: ``"equal"``: the same for each block; ``"depth"``: more the deeper it lies in its prompt, as
        attention over what is before it grows.
    """

    name: ClassVar[str] = "gdsf"
    bytes_per_row: int = 200

    def __init__(
        self,
        max_size_gb: float | None = None,
        cost: str = "equal",
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        if cost not in ("equal", "depth"):
            raise ConfigError(f"GDSFEvictionPolicy(cost={cost!r}): use one of equal, depth")
        self.cost = cost

    def options(self) -> dict[str, Any]:
        return {**super().options(), "cost": self.cost}

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._uses = np.zeros(rows, np.int64)
        self._inflation = 0.0

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._uses[rows[:hit_len]] += 1
        self._uses[rows[hit_len:]] = 1
        if self.cost == "depth":
            # The attention of block 64 over what is before it costs about as much as all else in it.
            self._score[rows] = self._inflation + self._uses[rows] * (
                1 + (hint.first_block + np.arange(len(rows))) / 64
            )
        else:
            self._score[rows] = self._inflation + self._uses[rows]
        self._touch(now, rows)

    def next_victim(self) -> int:
        row = super().next_victim()
        if row >= 0:
            self._inflation = self._score_at[row]
        return row


class HeuristicEvictionPolicy(ScoredPolicy):
    """Evicts the least important leaf; among equals, the least recently used.

    Importance comes with the request (``importance=`` of ``KeySpace.save``), or from a hook that sees the tokens of
    what is stored.  That some tokens matter more is the idea of H2O (Zhang et al., NeurIPS 2023); here whole blocks
    leave, leaves first, so that what stays is exact.

    Parameters
    ----------
    importance:
        A registered scorer's name (see :mod:`kvcache_factory.policy.importance`), or a callable
        ``importance(tokens, text)`` that returns 0 to 1 for each block; None: only what comes with requests.
    default:
        Importance of a block of which nothing is known.
    """

    name: ClassVar[str] = "heuristic"

    def __init__(
        self,
        max_size_gb: float | None = None,
        importance: str | Importance | None = None,
        default: float = 0.5,
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        from .importance import scorer

        self.importance = importance
        self.default = float(default)
        self.scorer = scorer(importance) if isinstance(importance, str) else importance
        if self.scorer is not None and not callable(self.scorer):
            raise ConfigError(f"HeuristicEvictionPolicy(importance={importance!r}): give a scorer's name or a callable")

    def options(self) -> dict[str, Any]:
        return {**super().options(), "importance": self.importance, "default": self.default}

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        new = rows[hit_len:]
        self._score[new] = self.default
        given = np.asarray(self.default if hint.importance is None else hint.importance, np.float64)
        if hint.importance is not None and not given.ndim:
            self._score[rows] = given
        elif given.ndim:  # blocks that it does not reach, at the end of a chain, have the default
            part = given[hint.first_block : hint.first_block + len(rows)]
            self._score[rows[: len(part)]] = part
        self._touch(now, rows)
