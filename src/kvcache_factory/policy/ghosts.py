"""Memory of what has left: a bounded queue of keys with numbers, in arrays.

A ghost is known by half of its key; that two blocks share that half costs a wrong guess, never a wrong block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..jit import kernel
from .base import Keys

Values = npt.NDArray[np.float64]

_I8, _I4, _F8 = "i8[::1]", "i4[::1]", "f8[:,::1]"

# The last line of `links` is the anchor of two rings: live ghosts from the oldest on, and the stack of free places.
_NEXT, _PREVIOUS = 0, 1


@kernel(f"void({_I4}, {_I8}, i4[:,::1], {_F8}, {_I8}, b1, {_F8})")
def _look(table: Any, words: Any, links: Any, values: Any, asked: Any, remove: Any, out: Any) -> None:
    """Copy the values of *asked* to *out*, -1 where there is no such ghost, and perhaps remove them."""
    mask, anchor, width = len(table) - 1, len(words) - 1, values.shape[1]
    for i in range(len(asked)):
        at = asked[i] & mask
        while table[at] >= 0 and words[table[at]] != asked[i]:
            at = (at + 1) & mask
        place = table[at]
        for j in range(width):
            out[i, j] = values[place, j] if place >= 0 else -1.0
        if place < 0 or not remove:
            continue
        links[links[place, 0], 1] = links[place, 1]
        links[links[place, 1], 0] = links[place, 0]
        links[place, 0] = words[anchor]
        words[anchor] = place
        hole = at
        while True:
            at = (at + 1) & mask
            mover = table[at]
            if mover < 0:
                break
            # Only an entry whose home does not lie cyclically in (hole, at] can be reached from the hole.
            if ((at - words[mover]) & mask) >= ((at - hole) & mask):
                table[hole] = mover
                hole = at
        table[hole] = -1


@kernel(f"void({_I4}, {_I8}, i4[:,::1], {_F8}, {_I8}, {_F8})")
def _append(table: Any, words: Any, links: Any, values: Any, new: Any, given: Any) -> None:
    """Add ghosts that are not there yet; there is a free place for each."""
    mask, anchor, width = len(table) - 1, len(words) - 1, values.shape[1]
    for i in range(len(new)):
        at = new[i] & mask
        while table[at] >= 0 and words[table[at]] != new[i]:
            at = (at + 1) & mask
        place = table[at]
        if place < 0:
            place = words[anchor]
            words[anchor] = links[place, 0]
            words[place] = new[i]
            table[at] = place
            links[place, 0] = anchor
            links[place, 1] = links[anchor, 1]
            links[links[anchor, 1], 0] = place
            links[anchor, 1] = place
        for j in range(width):
            values[place, j] = given[i, j]


class Ghosts:
    """Up to *capacity* keys, each with *width* numbers; the oldest is forgotten first."""

    def __init__(self, capacity: int, width: int) -> None:
        size = 8
        while size < 2 * capacity:
            size *= 2
        self.capacity = capacity
        self.width = width
        self._live = 0
        self._table = np.full(size, -1, np.int32)
        self._words = np.zeros(capacity + 1, np.int64)
        self._links = np.zeros((capacity + 1, 2), np.int32)
        self._links[:, _NEXT] = np.arange(1, capacity + 2)
        self._links[capacity] = capacity
        self._values = np.zeros((capacity + 1, width))

    def __len__(self) -> int:
        return self._live

    def peek(self, keys: Keys) -> Values:
        """The numbers ``[n, width]`` of *keys* ``[n, 2]``; -1 in all of them where there is no such ghost."""
        return self._ask(_halves(keys), False)

    def take(self, keys: Keys) -> Values:
        """As :meth:`peek`, and forget them."""
        return self._ask(_halves(keys), True)

    def add(self, keys: Keys, values: Values | None = None) -> None:
        """Remember *keys* as the newest, in this order, with their numbers (0 by default)."""
        words = _halves(keys)[-self.capacity :] if self.capacity else _halves(keys)[:0]
        if not len(words):
            return
        values = np.zeros((len(words), self.width)) if values is None else values[-len(words) :]
        if self._live:
            self._ask(words, True)
        self.trim(self.capacity - len(words))
        _append(self._table, self._words, self._links, self._values, words, np.ascontiguousarray(values))
        self._live += len(words)
        if len(words) > 1 and len(np.unique(words)) < len(words):
            self._live -= len(words) - len(np.unique(words))

    def trim(self, capacity: int) -> None:
        """Forget the oldest until there are at most *capacity*."""
        surplus = self._live - max(capacity, 0)
        if surplus <= 0:
            return
        oldest, place = np.empty(surplus, np.int64), self.capacity
        for i in range(surplus):
            place = self._links[place, _NEXT]
            oldest[i] = self._words[place]
        self._ask(oldest, True)

    def _ask(self, words: npt.NDArray[np.int64], remove: bool) -> Values:
        out = np.empty((len(words), self.width))
        _look(self._table, self._words, self._links, self._values, words, remove, out)
        if remove:
            self._live -= int(np.count_nonzero(out[:, 0] >= 0))
        return out


def _halves(keys: Keys) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(keys[:, 0]).view(np.int64)
