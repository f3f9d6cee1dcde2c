"""Holding blocks in their tiers by key, for as long as somebody wants them kept whatever the policy says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .table import Keys
from .tier import Tier
from .tree import READY


def pin_tips(tiers: Sequence[Tier], keys: Keys) -> list[tuple[Tier, int]]:
    """Pin the blocks of *keys* ``[n, 2]`` in each tier that has them; a pin of the end of a chain holds the chain."""
    pins: list[tuple[Tier, int]] = []
    for tier in tiers:
        index = tier.index
        with index._lock:
            rows = index._table.find(keys)
            rows = rows[rows >= 0]
            rows = rows[index.state[rows] == READY]
            tips = rows[~np.isin(rows, index.parent[rows])].tolist()
            for row in tips:
                index.pin(row)
        pins += [(tier, row) for row in tips]
    return pins


def unpin(pins: Iterable[tuple[Tier, int]]) -> None:
    """Give pins back; those of tiers that were closed meanwhile are gone with them."""
    for tier, row in pins:
        if tier.is_open:
            tier.index.unpin(row)
            tier.settle()
