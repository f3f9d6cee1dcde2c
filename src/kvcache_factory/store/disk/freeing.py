"""How slots of the disk become free again: said in the log, overwritten where that is asked for, and not while read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..base import Places
from . import log, segment
from .aio import reason_of
from .images import zeros
from .pool import Pool
from .rows import by_segment, slots_of
from .segment import Segment, SlotNumbers


class Freeing:
    """Frees places that no row has any more, as far as this process owns them."""

    def __init__(self, pool: Pool, slot_bytes: int, direct: bool) -> None:
        self._pool = pool
        self._direct = direct
        self._zeros = zeros(slot_bytes)

    def segments(self, at: Places) -> Iterator[tuple[Segment, npt.NDArray[np.int64], SlotNumbers]]:
        """Segments that are still there, each with the positions in *at* that name it, and the slots."""
        for number, mine in by_segment(at):
            one = self._pool.segments.get(number)
            if one is not None:
                yield one, mine, slots_of(at[mine])

    def let_go(self, at: Places, state: int = segment.FREE, *, blank: bool = False) -> None:
        """Make places free; *blank*: and overwrite them, those that are being read when they are not any more."""
        for one, _, slots in self.segments(at):
            with self._pool.lock:
                one.rows[slots] = -1
                if one.owned:
                    one.state[slots] = segment.BUSY
            if one.owned:
                self.give_back(one, slots, state, blank=blank)

    def give_back(self, one: Segment, slots: SlotNumbers, state: int, *, blank: bool = False) -> None:
        """Say in the log that *slots* hold nothing any more, and only then overwrite them or let them be used again."""
        pool = self._pool
        try:
            one.append(log.make(log.Kind.FREE, slots))
        except OSError as error:  # whoever still believes the old record reads a block that proves to be another
            pool.health.count(reason_of(error))
        with pool.lock:
            if blank:
                slots = one.set_aside(slots)
            elif state == segment.FREE:
                one.release(slots)
            else:
                one.state[slots] = state
        if blank:
            self.blank(one, slots)

    def erase(self, at: Places) -> int:
        """Overwrite places durably, and only then free them; returns how many were.

        Nothing is left to find even after a crash in between.  Nobody may be reading them.
        """
        erased = 0
        for one, _, slots in self.segments(at):
            if one.owned:
                erased += self._overwrite(one, slots, sync=True)
        self.let_go(at)
        return erased

    def end_read(self, parts: list[tuple[Segment, SlotNumbers]]) -> None:
        """Slots of *parts* are not read any more; those that waited for that are overwritten."""
        with self._pool.lock:
            waited = [(one, one.end_read(slots)) for one, slots in parts]
        for one, slots in waited:
            self.blank(one, slots)

    def blank(self, one: Segment, slots: SlotNumbers) -> None:
        """Overwrite slots that nobody can find or reads, and let them be used again."""
        if len(slots):
            self._overwrite(one, slots)
            with self._pool.lock:
                one.release(slots)

    def _overwrite(self, one: Segment, slots: SlotNumbers, *, sync: bool = False) -> int:
        try:
            blanks = [self._zeros[: one.slot_bytes]] * len(slots)
            written = one.move(slots, blanks, write=True, direct=self._direct)
            if sync:
                one.sync()
            return written
        except OSError as error:
            self._pool.health.failed(f"cannot erase blocks in {self._pool.directory.path}", error)
            return 0
