"""Blocks that a save drives out of memory, on their way to a remote level that takes what leaves.

The engine waits for a copy in memory, never for the store.  The copies lie in slots of their own until they are
written; what finds none there is lost as without a remote level.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..store.base import Operation
from .io import Lane
from .ledger import Event
from .table import Rows
from .tier import Tier
from .transit import Transit
from .values import StoredChain

if TYPE_CHECKING:
    from .remote import RemoteLevel

AGED = 1 << 31
"""Blocks of a chain that seems to have no end: what is driven out of memory is not recent any more."""


class Leaving:
    """The way down for what is gone from memory before it is written.

    Parameters
    ----------
    source:
        The memory tier that blocks leave.
    passing:
        Slots in which they wait.
    """

    def __init__(self, level: RemoteLevel, source: Tier, passing: Transit) -> None:
        self._level = level
        self._source = source
        self._passing = passing
        self._on_their_way: dict[bytes, bool] = {}
        self._lock = threading.Lock()

    def send(self, rows: Rows, lost: str = "") -> npt.NDArray[np.bool_]:
        """Copy blocks that are about to leave and are pinned, for writing them; which of *rows* are not lost.

        *lost*: the reason under which those are counted that found no room.
        """
        index, kept = self._source.index, self._level.writes.is_written(rows)
        missing = rows[~kept]
        while len(missing):
            tip = int(missing[index.depth[missing].argmax()])
            chain = index.stored_chain(tip, self._level.roots)
            mine = np.flatnonzero(np.isin(chain.rows, missing))
            taken = self._send(chain, mine)
            if lost:
                self._level.count(Event.NOT_STORED, len(mine) - taken, lost)
            kept |= np.isin(rows, chain.rows[mine[:taken]])
            missing = missing[~np.isin(missing, chain.rows) & (missing != tip)]
        return kept

    def forget(self, names: Sequence[bytes]) -> None:
        """*names* are being deleted: those that are on their way must be deleted once more when they have arrived."""
        with self._lock:
            for name in self._on_their_way.keys() & set(names):
                self._on_their_way[name] = True

    def _send(self, chain: StoredChain, blocks: npt.NDArray[np.int64]) -> int:
        """Copy these *blocks*, as many leading ones as there are slots, and queue them; returns how many."""
        level, passing, spec = self._level, self._passing, self._passing.spec
        slots = passing.take(len(blocks))
        count = len(slots)
        if not count:
            return 0
        rows, known = chain.rows[blocks[:count]], self._source.known_sums(chain.rows[blocks[:count]])
        self._source.copy_payloads(rows, passing.memory, slots, spec.header_bytes)
        names = level.names.of(chain, blocks[:count].tolist())
        level.names.remember(names, chain.keys[blocks[:count]])
        with self._lock:
            self._on_their_way.update(dict.fromkeys(names, False))
        gone = self._source.index.dropped(rows)  # by somebody who may have looked here before
        self.forget([name for name, dropped in zip(names, gone.tolist(), strict=True) if dropped])
        if level.io.submit(Lane.STORE, partial(self._write, chain, blocks[:count], slots, names, known)) is not None:
            return count
        self._end(slots, names)
        return 0

    def _write(
        self,
        chain: StoredChain,
        blocks: npt.NDArray[np.int64],
        slots: Rows,
        names: list[bytes],
        known: npt.NDArray[np.uint64],
    ) -> None:
        level, step, done = self._level, self._level.batch_blocks, 0
        going = True
        for start in range(0, len(slots), step):
            part = slice(start, start + step)
            prepare = level.sealing(self._passing, slots[part], chain, blocks[part], known[part], AGED)
            operation = self._put(slots[part], names[part], prepare) if going else None
            end = partial(self._end, slots[part], names[part])
            if operation is None:
                end()
                continue
            operation.then(end)
            ended = operation.done  # asked once: it may end at any time
            count = operation.count if ended else 0
            level.count(Event.STORED, count)
            done += count
            going = count == len(slots[part])
            reason = operation.reason if ended else "timeout"
        level.count(Event.NOT_STORED, len(slots) - done, reason)

    def _put(self, slots: Rows, names: list[bytes], prepare: Callable[[slice], list[int] | None]) -> Operation:
        level, passing = self._level, self._passing
        with level.timing("put"):
            return level.store.put(names, passing.memory, slots, level.deadline_s(len(slots)), prepare=prepare)

    def _end(self, slots: Rows, names: list[bytes]) -> None:
        self._passing.give_back(slots)
        with self._lock:
            dropped = [name for name in names if self._on_their_way.pop(name, False)]
        if dropped:
            self._level.forget(dropped)
