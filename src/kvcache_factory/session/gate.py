"""Quotas of single tiers: what comes into one is counted there, and own blocks leave it first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..engine.table import KeyCounts, Keys
from ..engine.tier import Tier
from .book import SessionBook
from .holdings import Quota
from .model import Session

Mask = npt.NDArray[np.bool_]


class Limit(NamedTuple):
    """A quota by tiers, what is held under it, and who may have to let something go, the first to do so first."""

    held: KeyCounts
    quota: Quota
    givers: Sequence[Session]


class Gate:
    """Stands before the tiers of a manager while one of its quotas is given by tiers.

    A block that several sessions reference is in the count of each and leaves a tier only by policy; what is referenced
    once leaves the tier where room is needed, and stays in the others.
    """

    def __init__(self, book: SessionBook, tiers: Sequence[Tier]) -> None:
        self._book = book
        self._tiers = tiers

    @contextmanager
    def admitting(self, tier: Tier, keys: Keys) -> Iterator[int]:
        """How many leading *keys* ``[n, 2]`` may come into *tier*, for as long as the context is open."""
        with self._book.locked():
            absent = ~tier.index.knows(keys)
            yield self._make_room(tier, keys, lambda limit: limit.held.knows(keys) & absent)

    def referencing(self, session: Session, keys: Keys) -> int:
        """How many leading *keys* ``[n, 2]``, wherever they are, *session* may begin to reference."""
        fitting = len(keys)
        with self._book.locked():
            mine = {id(session.held), *(id(group.held) for group in session.groups)}
            for tier in self._tiers if self._book.block_bytes else ():
                present = tier.index.knows(keys)

                def comes(limit: Limit, present: Mask = present) -> Mask:
                    new: Mask = present & ~limit.held.knows(keys) & (id(limit.held) in mine)
                    return new

                fitting = min(fitting, self._make_room(tier, keys, comes))
        return fitting

    def excess(self) -> Iterator[str]:
        """Quotas by tiers that do not hold, as sentences."""
        for tier in self._tiers:
            for limit in self._limits():
                most, inside = self._most(limit, tier), int(tier.index.knows(limit.held.keys).sum())
                if inside > most:
                    yield f"{inside} blocks in tier {tier.name} under a quota of {most}"

    def _make_room(self, tier: Tier, keys: Keys, comes: Callable[[Limit], Mask]) -> int:
        fitting = len(keys)
        for limit in self._limits():
            coming: Mask = comes(limit)
            if not coming.any():
                continue
            room = self._room(limit, tier)
            if coming.sum() > room:
                self._let_leave(limit, tier, keys, int(coming.sum()) - room)
                room = self._room(limit, tier)
            fitting = min(fitting, int(np.searchsorted(np.cumsum(coming), room, side="right")))
        return fitting

    def _limits(self) -> Iterator[Limit]:
        yield from (Limit(s.held, s.quota, [s]) for s in self._book if s.quota.by_tier)
        for group, members in self._book.sharing():
            if group.quota.by_tier:
                yield Limit(group.held, group.quota, members)

    @staticmethod
    def _most(limit: Limit, tier: Tier) -> int:
        size = limit.quota.bytes_in(tier.name)
        return tier.index.capacity if size is None else size // tier.block_bytes

    def _room(self, limit: Limit, tier: Tier) -> int:
        return max(self._most(limit, tier) - int(tier.index.knows(limit.held.keys).sum()), 0)

    def _let_leave(self, limit: Limit, tier: Tier, keys: Keys, count: int) -> None:
        """Let up to *count* blocks leave *tier*, none of *keys*: the oldest ends of chains of those who may give."""
        for giver in limit.givers:
            if count <= 0 or giver.pinned or giver.on_quota == "refuse":
                continue
            own = giver.held.oldest(giver.stamp + 1)
            own = own[self._book.only_one(own) & tier.index.knows(own)]
            own = own[~np.isin(own[:, 0], keys[:, 0])][:count]
            left = tier.let_leave(own, "quota")
            giver.dropped_blocks += left
            count -= left
