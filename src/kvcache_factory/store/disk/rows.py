"""Where the block of each row of the index is: the number of a segment and of a slot in one integer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..base import Places, Slots

NOWHERE = -1
_SLOT = 0xFFFFFFFF


def places(segment: int, slots: npt.NDArray[np.int64]) -> Places:
    """The places of *slots* of one segment."""
    return (np.int64(segment) << 32) | slots


def slots_of(at: Places) -> npt.NDArray[np.int64]:
    """The slots of places, in whatever segment."""
    return at & _SLOT


def segments_of(at: Places) -> npt.NDArray[np.int64]:
    """The segments of places."""
    return at >> 32


def by_segment(at: Places) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Each segment that *at* names, with the positions in *at* that are in it."""
    numbers = segments_of(at)
    order = np.argsort(numbers, kind="stable").astype(np.int64, copy=False)
    ordered = numbers[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for mine in np.split(order, cuts) if len(at) else []:
        yield int(numbers[mine[0]]), mine


def in_order(at: Places) -> list[Places]:
    """*at* cut where the segment changes."""
    numbers = segments_of(at)
    return np.split(at, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1) if len(at) else []


class PlaceColumn:
    """One place for each row, for as many rows as the index comes to have; changes are made under the pool's lock."""

    def __init__(self, rows: int) -> None:
        self._at: Places = np.full(rows, NOWHERE, np.int64)

    def of(self, rows: Slots) -> Places:
        """Where *rows* are, :data:`NOWHERE` for those that hold nothing."""
        known = self._at
        at = np.full(len(rows), NOWHERE, np.int64)
        inside = rows < len(known)
        at[inside] = known[rows[inside]]
        return at

    def set(self, rows: Slots, at: Places) -> Places:
        """Give *rows* their places; returns where they were before."""
        more = int(rows.max(initial=-1)) + 1 - len(self._at)
        if more > 0:
            self._at = np.concatenate((self._at, np.full(max(more, len(self._at) // 2, 1024), NOWHERE, np.int64)))
        before: Places = self._at[rows]
        self._at[rows] = at
        return before

    def clear(self, rows: Slots) -> Places:
        """Take their places from *rows*; returns those that there were."""
        at = self.of(rows)
        here = at != NOWHERE
        self._at[rows[here]] = NOWHERE
        taken: Places = at[here]
        return taken
