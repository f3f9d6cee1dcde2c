"""Writing blocks of a memory tier to a remote level, behind the engine's back."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..store.base import Operation
from .images import seal
from .io import Lane
from .ledger import Event
from .remote_leaving import AGED
from .table import Rows
from .tier import Tier
from .transit import Transit
from .values import StoredChain

if TYPE_CHECKING:
    from .remote import RemoteLevel

_NEVER = np.iinfo(np.uint32).max


class Writes:
    """The way down.

    Parameters
    ----------
    source:
        The memory tier whose blocks are written.
    transit:
        Host memory in which images are put together, where they are not written as they are in *source*.
    """

    def __init__(self, level: RemoteLevel, source: Tier, transit: Transit | None) -> None:
        self.source = source
        self._level = level
        self._transit = transit
        self._index = source.index  # outlives the tier: what is late may end after everything was closed
        self._written = np.full(source.index.capacity, _NEVER, np.uint32)
        """Generation of a row whose block was written or came from there: it need not be written again."""
        self._recent = np.full(source.index.capacity, _NEVER, np.uint32)
        """The same of a row whose block a lossy codec left exact because it was recent: it is written once more."""
        self._lock = threading.Lock()
        self.tokens_in_flight = 0

    def is_written(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of *rows* hold blocks that need not be written."""
        written: npt.NDArray[np.bool_] = self._written[rows] == self.source.index.generation[rows]
        return written

    def mark(self, rows: Rows) -> None:
        """*rows* hold blocks that are there."""
        self._written[rows] = self.source.index.generation[rows]

    def begin(self, tip: int, blocks: int) -> None:
        """Write what is new of the chain that ends in the row *tip*, about *blocks* blocks; the caller holds it."""
        level, index = self._level, self.source.index
        with self._lock:
            taken = min(blocks, self._room())
            self._add(taken)
        if not taken:
            level.count(Event.NOT_STORED, blocks, "inflight_full")
            return
        index.pin(tip)
        ticket = level.io.submit(Lane.STORE, partial(self._run, tip, taken))
        if ticket is None:
            index.unpin(tip)
            self._less(taken)
            level.count(Event.NOT_STORED, blocks, "queue_full")
        elif level.options.strict_sync:
            ticket.wait(level.deadline_s(blocks))

    def write_leaving(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Write blocks that are about to leave and are pinned; which of *rows* need not be lost any more."""
        index = self.source.index
        missing = rows[~self.is_written(rows)]
        while len(missing):
            tip = int(missing[index.depth[missing].argmax()])
            index.pin(tip)
            chain = index.stored_chain(tip, self._level.roots)
            mine = np.flatnonzero(np.isin(chain.rows, missing))
            self._write(chain, mine, tip, leaving=True)
            missing = missing[~np.isin(missing, chain.rows) & (missing != tip)]
        return self.is_written(rows)

    @property
    def _block_tokens(self) -> int:
        assert self._level.spec is not None
        return self._level.spec.block_tokens

    def _room(self) -> int:
        """Blocks that may be on their way beside those that are; the caller holds the lock."""
        most = self._level.options.max_inflight_tokens
        return max(most - self.tokens_in_flight, 0) // self._block_tokens if most else _NEVER

    def _add(self, blocks: int) -> None:
        self.tokens_in_flight += blocks * self._block_tokens

    def _less(self, blocks: int) -> None:
        with self._lock:
            self._add(-blocks)

    def _run(self, tip: int, taken: int) -> None:
        """Write up to *tip*; room for *taken* blocks was taken, and where more are new, more is, as far as there is."""
        try:
            chain = self.source.index.stored_chain(tip, self._level.roots)
            with self._lock:
                missing = np.flatnonzero(~self.is_written(chain.rows) | self._aged(chain))
                new = missing[: taken + self._room()]  # the first ones: the others are of no use without them
                self._add(len(new) - taken)
                taken = len(new)
                self.mark(chain.rows[new])  # two requests that hit the same blocks write them once
        except BaseException:
            self.source.index.unpin(tip)
            self._less(taken)
            raise
        self._level.count(Event.NOT_STORED, len(missing) - taken, "inflight_full")
        try:
            self._write(chain, new, tip)
        finally:
            self._less(taken)

    def _aged(self, chain: StoredChain) -> npt.NDArray[np.bool_]:
        """Which blocks of *chain* are written as they are, because they were recent, and are not any more."""
        recent = self._recent[chain.rows] == self.source.index.generation[chain.rows]
        aged: npt.NDArray[np.bool_] = recent & ~self._level.stays_exact(range(chain.num_blocks), chain.num_blocks)
        return aged

    def _write(self, chain: StoredChain, blocks: npt.NDArray[np.int64], tip: int, *, leaving: bool = False) -> None:
        """Write these *blocks* of a chain, batch by batch while all goes well; takes over one pin of *tip*.

        Those that are *leaving* memory have aged, whatever follows them.
        """
        level, step = self._level, self._level.batch_blocks
        last: Operation | None = None
        done = 0
        reason = "copy_failed"
        try:
            while done < len(blocks):
                part = blocks[done : done + step]
                with level.timing("put"):
                    last, took = self._put(chain, part, AGED if leaving else chain.num_blocks)
                ended = last.done  # asked once: it may end at any time
                count = last.count if ended else 0
                self.mark(chain.rows[part[:count]])
                self._note_recent(chain, part[:count], leaving)
                level.count(Event.STORED, count)
                done += count
                if count < took or not took:
                    reason = last.reason if ended else "timeout"
                    break
        finally:
            self._written[chain.rows[blocks[done:]]] = _NEVER
            level.count(Event.NOT_STORED, len(blocks) - done, reason or "no_transit")
            end = partial(self._end, chain, blocks[: done + step], tip)
            if last is not None:
                last.then(end)  # at once, unless it is late: then the rows are its own until it has ended
            else:
                end()

    def _note_recent(self, chain: StoredChain, part: npt.NDArray[np.int64], leaving: bool) -> None:
        """Remember which of the written blocks *part* are exact only for now."""
        rows = chain.rows[part]
        behind = self._level.stays_exact(part.tolist(), AGED if leaving else chain.num_blocks)
        behind &= ~self._level.stays_exact(part.tolist(), AGED)
        self._recent[rows] = np.where(behind, self.source.index.generation[rows], _NEVER)

    def _put(self, chain: StoredChain, part: npt.NDArray[np.int64], chain_blocks: int) -> tuple[Operation, int]:
        """Send a batch of a chain of so many blocks, sealing it piece by piece; also how many of it were sent."""
        level, spec, source = self._level, self._level.spec, self.source
        assert spec is not None
        names = level.names.of(chain, part.tolist())
        rows = chain.rows[part]
        if self._transit is None:
            level.names.remember(names, chain.keys[part])

            def prepare(piece: slice) -> None:
                seal(spec, source.slots.view, rows[piece], chain, part[piece], source.known_sums(rows[piece]))

            return level.store.put(names, source.slots, rows, level.deadline_s(len(rows)), prepare=prepare), len(rows)
        slots = self._transit.take(len(rows), wait=level.options.max_wait_s)
        try:
            taken = source.copy_payloads(rows[: len(slots)], self._transit.memory, slots, spec.header_bytes)
        except BaseException:
            self._transit.give_back(slots)
            raise
        operation = self._put_copies(chain, part[:taken], names[:taken], slots[:taken], chain_blocks)
        operation.then(partial(self._transit.give_back, slots))
        return operation, taken

    def _put_copies(
        self, chain: StoredChain, part: npt.NDArray[np.int64], names: list[bytes], slots: Rows, chain_blocks: int
    ) -> Operation:
        level, source, pool, rows = self._level, self.source, self._transit, chain.rows[part]
        assert pool is not None
        level.names.remember(names, chain.keys[part])
        known, deadline_s = source.known_sums(rows), level.deadline_s(len(rows))
        prepare = level.sealing(pool, slots, chain, part, known, chain_blocks)
        on_device = not source.payload_offset and bool(source.whole(rows).all())
        if on_device and not level.encodes and level.store.takes_device_memory("put"):
            headers = (pool.memory, slots)
            return level.store.put(names, source.slots, source.slots_of(rows), deadline_s, headers, prepare=prepare)
        return level.store.put(names, pool.memory, slots, deadline_s, prepare=prepare)

    def _end(self, chain: StoredChain, blocks: npt.NDArray[np.int64], tip: int) -> None:
        """Let go of *tip*, and delete what was dropped meanwhile: whoever did that could not see the copy yet."""
        dropped = self._index.dropped(chain.rows[blocks])
        if dropped.any():
            self._level.forget(self._level.names.of(chain, blocks[dropped].tolist()))
        self._index.unpin(tip)
        self._level.written()
