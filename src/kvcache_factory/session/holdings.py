"""Which blocks a session, or a group of sessions, references, and how many it may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.table import KeyCounts, Keys
from ..jit import kernel
from .settings import Size

GIB = 1 << 30
UNLIMITED = 1 << 62


@kernel("i8(i4[::1], i8, i8[::1], i8[::1])")
def _use(rows: Any, stamp: Any, stamps: Any, depths: Any) -> int:
    held = 0
    for i in range(len(rows)):
        if rows[i] >= 0:
            held += 1
            stamps[rows[i]] = stamp
            depths[rows[i]] = i
    return held


class References(KeyCounts):
    """The blocks of one session, each with its place in the chain and the last request that used it."""

    def _resize(self, rows: int) -> None:
        super()._resize(rows)
        self._stamps = np.zeros(rows, np.int64)
        self._depths = np.zeros(rows, np.int64)

    def _grow(self, needed: int) -> None:
        held = self._counts > 0
        stamps, depths = self._stamps[held], self._depths[held]
        super()._grow(needed)
        self._stamps[: len(stamps)], self._depths[: len(depths)] = stamps, depths

    def use(self, keys: Keys, stamp: int) -> int:
        """Request number *stamp* uses the chain of *keys*; returns how many are referenced, the rest is passed over."""
        return int(_use(self._table.find(keys), stamp, self._stamps, self._depths))

    def oldest(self, before: int) -> Keys:
        """Keys ``[n, 2]`` that no request from number *before* on used: the longest unused first, ends before roots.

        Whoever uses a block uses all that it is built on, so that each comes before what it is built on.
        """
        rows = np.flatnonzero((self._counts > 0) & (self._stamps < before))
        keys: Keys = self._column[rows[np.lexsort((-self._depths[rows], self._stamps[rows]))]]
        return keys

    def copy_from(self, other: References, keys: Keys) -> None:
        """Reference *keys*, which *other* references, as it does."""
        theirs = other._table.find(keys)
        self.add(keys)
        mine = self._table.find(keys)
        self._stamps[mine], self._depths[mine] = other._stamps[theirs], other._depths[theirs]


class Quota:
    """What may be held: bytes in each tier, as blocks once it is known how large those are."""

    def __init__(self, size: Size | None) -> None:
        self.size = size

    def bytes_in(self, tier: str) -> int | None:
        """Bytes that may be held in *tier*; None: as many as there are."""
        size = self.size.get(tier) if isinstance(self.size, Mapping) else self.size
        return None if size is None else int(size * GIB)

    @property
    def by_tier(self) -> bool:
        """Whether tiers have quotas of their own, so that what is in each of them must be counted."""
        return isinstance(self.size, Mapping)

    def blocks(self, block_bytes: Mapping[str, int]) -> int:
        """References that fit whatever tier they are in; as many as there are where tiers have quotas of their own."""
        largest = max(block_bytes.values(), default=0)
        if self.size is None or isinstance(self.size, Mapping) or not largest:
            return UNLIMITED
        return int(self.size * GIB) // largest


class Group:
    """Sessions that share a quota; *held* counts for each block how many of them reference it."""

    def __init__(self, name: str, size: Size | None) -> None:
        self.name = name
        self.quota = Quota(size)
        self.held = KeyCounts()


def leading_that_fit(held: KeyCounts, keys: Keys, room: int) -> int:
    """How many leading *keys* can be added to *held* when at most *room* of them may be new."""
    new = ~held.knows(keys)
    if np.count_nonzero(new) <= room:
        return len(keys)
    counted: npt.NDArray[np.int64] = np.cumsum(new)
    return int(np.searchsorted(counted, room, side="right"))
