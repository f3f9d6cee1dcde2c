"""Memory of what has left: a bounded queue of keys with numbers, in arrays.

A ghost is known by half of its key; that two blocks share that half costs a wrong guess, never a wrong block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..jit import helper, kernel
from .base import Keys

Values = npt.NDArray[np.float64]

_ARRAYS = "i4[::1], i8[::1], i4[:,::1], f8[:,::1]"

# Columns of `links`: next and previous.  Its last line is the anchor of the ring of ghosts, the oldest next to it; the
# last of `words` is the first free place, and the column "next" of a free place names the one after it.


@helper
def _find(table: Any, words: Any, word: Any) -> Any:
    at = word & (len(table) - 1)
    while table[at] >= 0 and words[table[at]] != word:
        at = (at + 1) & (len(table) - 1)
    return at


@helper
def _forget(table: Any, words: Any, links: Any, hole: Any) -> None:
    """Free the place that *table* names at *hole*, and close the gap there."""
    mask = len(table) - 1
    place = table[hole]
    links[links[place, 0], 1] = links[place, 1]
    links[links[place, 1], 0] = links[place, 0]
    links[place, 0] = words[len(words) - 1]
    words[len(words) - 1] = place
    at = hole
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


@kernel(f"i8({_ARRAYS}, i8[::1], b1, f8[:,::1])")
def _look(table: Any, words: Any, links: Any, values: Any, asked: Any, remove: Any, out: Any) -> int:
    """Copy the values of *asked* to *out*, -1 where there is no such ghost, and perhaps forget; returns how many."""
    there = 0
    for i in range(len(asked)):
        at = _find(table, words, asked[i])
        place = table[at]
        for j in range(values.shape[1]):
            out[i, j] = values[place, j] if place >= 0 else -1.0
        if place >= 0:
            there += 1
            if remove:
                _forget(table, words, links, at)
    return there


@kernel(f"i8({_ARRAYS}, i8[::1], f8[:,::1])")
def _append(table: Any, words: Any, links: Any, values: Any, new: Any, given: Any) -> int:
    """Add the newest ghosts, forgetting the oldest for them; returns by how many there are more."""
    anchor, more = len(words) - 1, 0
    for i in range(len(new)):
        at = _find(table, words, new[i])
        if table[at] >= 0:
            _forget(table, words, links, at)
            more -= 1
        elif words[anchor] == anchor:
            _forget(table, words, links, _find(table, words, words[links[anchor, 0]]))
            more -= 1
        at = _find(table, words, new[i])
        place = words[anchor]
        words[anchor] = links[place, 0]
        words[place] = new[i]
        table[at] = place
        links[place, 0] = anchor
        links[place, 1] = links[anchor, 1]
        links[links[anchor, 1], 0] = place
        links[anchor, 1] = place
        more += 1
        for j in range(values.shape[1]):
            values[place, j] = given[i, j]
    return more


@kernel(f"void({_ARRAYS}, i8)")
def _trim(table: Any, words: Any, links: Any, values: Any, count: Any) -> None:
    """Forget the *count* oldest."""
    for _ in range(count):
        _forget(table, words, links, _find(table, words, words[links[len(words) - 1, 0]]))


class Ghosts:
    """Up to *capacity* keys, each with *width* numbers of at least 0; the oldest is forgotten first."""

    def __init__(self, capacity: int, width: int) -> None:
        size = 8
        while size < 2 * capacity:
            size *= 2
        self.capacity = capacity
        self.width = width
        self._live = 0
        words = np.zeros(capacity + 1, np.int64)
        links = np.zeros((capacity + 1, 2), np.int32)
        links[:, 0] = np.arange(1, capacity + 2)
        links[capacity] = capacity
        self._arrays = (np.full(size, -1, np.int32), words, links, np.zeros((capacity + 1, width)))

    def __len__(self) -> int:
        return self._live

    def peek(self, keys: Keys) -> Values:
        """The numbers ``[n, width]`` of *keys* ``[n, 2]``; -1 in all of them where there is no such ghost."""
        out = np.empty((len(keys), self.width))
        _look(*self._arrays, _halves(keys), False, out)
        return out

    def take(self, keys: Keys) -> Values:
        """As :meth:`peek`, and forget them."""
        out = np.empty((len(keys), self.width))
        self._live -= int(_look(*self._arrays, _halves(keys), True, out))
        return out

    def add(self, keys: Keys, values: Values | None = None) -> None:
        """Remember *keys* as the newest, in this order, with their numbers (0 by default)."""
        if self.capacity and len(keys):
            values = np.zeros((len(keys), self.width)) if values is None else np.ascontiguousarray(values)
            self._live += int(_append(*self._arrays, _halves(keys), values))

    def trim(self, capacity: int) -> None:
        """Forget the oldest until there are at most *capacity*."""
        surplus = self._live - max(capacity, 0)
        if surplus > 0:
            _trim(*self._arrays, surplus)
            self._live -= surplus


def _halves(keys: Keys) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(keys[:, 0]).view(np.int64)
