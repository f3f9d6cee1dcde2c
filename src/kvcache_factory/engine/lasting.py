"""The index and the tier of a store that is not memory, keeps its own records, and is shared with other processes.

Rows are plenty and only number what the store holds; space is the store's to give.  Rows of blocks that another process
owns are here too, pinned by that ownership.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec
from ..codec.base import UNREADABLE_HERE, ImageCodec
from ..errors import CapacityError, StoreError
from ..policy.base import NO_HINT, EvictionPolicy, RequestHint
from ..store.base import Entries, LastingStore, SlotMemory
from .index import Index
from .ledger import Event, Ledger
from .roots import Roots
from .table import Keys, Rows
from .tier import Tier
from .transit import Transit
from .tree import READY
from .values import Chain, Reservation

SPARE_ROWS = 4096
STAGING_BYTES = 32 << 20
"""Memory for images that are encoded and not written yet, all threads together."""
STAGED_BYTES = 8 << 20
"""What one thread encodes before it writes."""


class LastingIndex(Index):
    """An index without tokens, which can take over what a directory already holds."""

    def __init__(self, rows: int, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        super().__init__(rows, 0, policy, clock, deferred=True)
        self.foreign = np.zeros(rows, np.bool_)
        """Rows of other processes, each with a pin that stands for that."""

    def enter(self, entries: Entries, roots: Roots) -> Rows:
        """Give rows to *entries* that are connected to a root and not here yet; returns a row or -1 for each.

        Entries of other processes stay pinned until :meth:`own` or :meth:`lose`.
        """
        with self._lock:
            rows = np.full(len(entries.keys), -1, np.int32)
            fresh = _first_of_each(entries)
            fresh = fresh[self._table.find(entries.keys[fresh]) < 0][: self._num_free]
            if not len(fresh):
                return rows
            new = self._free[self._num_free - len(fresh) : self._num_free][::-1].copy()
            self._num_free -= len(fresh)
            self._live += len(fresh)
            self._fill_columns(new, entries, fresh)
            self._table.insert(new)
            connected = self._connect(new, entries, fresh, roots)
            self._discard(new[~connected])
            new, fresh = new[connected], fresh[connected]
            rows[fresh] = new
            parents = self.parent[new]
            np.add.at(self.children, parents[parents >= 0], 1)
            self.state[new] = READY
            self.foreign[new] = ~entries.owned[fresh]
            self.pins[new] = self.foreign[new]
            self.policy.restore(new[np.argsort(entries.time_ns[fresh], kind="stable")])
            for row in parents[parents >= 0].tolist():
                self.policy.on_evictable(row, False)
            for row in new[(self.children[new] == 0) & (self.pins[new] == 0)].tolist():
                self.policy.on_evictable(row, True)
            return rows

    def own(self, rows: Rows) -> None:
        """*rows* of another process are this process's from now on."""
        with self._lock:
            taken = rows[self.foreign[rows]]
            self.foreign[taken] = False
            for row in taken.tolist():
                self.unpin(row)

    def lose(self, rows: Rows) -> int:
        """The blocks of *rows*, whoever's they are, are gone; drop them and what was built on them."""
        with self._lock:
            lost = self._doom(rows)
            self.own(rows)
            return lost

    def _fill_columns(self, new: Rows, entries: Entries, fresh: npt.NDArray[np.int64]) -> None:
        self.keys[new] = entries.keys[fresh]
        self.extras[new] = entries.extras[fresh]
        self.depth[new] = entries.depth[fresh]
        self.fidelity[new] = entries.fidelity[fresh]
        self.layout[new] = entries.layout[fresh]
        self.children[new] = 0
        self.hits[new] = 0
        self.busy[new] = False
        self.wipe[new] = False

    def _connect(
        self, new: Rows, entries: Entries, fresh: npt.NDArray[np.int64], roots: Roots
    ) -> npt.NDArray[np.bool_]:
        """Set the parents of *new* rows; True for those whose chain reaches a root without a gap."""
        parents = self._table.find(entries.parents[fresh])
        depth = entries.depth[fresh]
        connected = (depth == 0) | ((parents >= 0) & (self.depth[parents] == depth - 1))
        first = np.flatnonzero(depth == 0)
        heads = entries.parents[fresh[first]]
        for head in np.unique(heads, axis=0):
            same = first[(heads == head).all(axis=1)]
            identity = entries.identities[fresh[same[0]]].tobytes()
            parents[same] = roots.number(head.tobytes(), identity)
        self.parent[new] = parents
        # A row is connected when all rows above it are: spread the gaps downwards by pointer doubling.
        number = np.full(self.capacity, -1, np.int32)
        number[new] = np.arange(len(new))
        up = np.where(parents >= 0, number[parents], -1)
        up = np.where(up >= 0, up, np.arange(len(new)))
        for _ in range(int(depth.max()).bit_length() + 1):
            connected &= connected[up]
            up = up[up]
        reached: npt.NDArray[np.bool_] = connected
        return reached

    def _discard(self, rows: Rows) -> None:
        self._table.remove(rows)
        self._live -= len(rows)
        self._return(rows)


def _first_of_each(entries: Entries) -> npt.NDArray[np.int64]:
    """One entry for each key, parents before children; a block of our own goes before another process's copy."""
    order = np.lexsort((~entries.owned, entries.keys[:, 1], entries.keys[:, 0]))
    keys = entries.keys[order]
    repeated = np.zeros(len(order), np.bool_)
    repeated[1:] = (keys[1:] == keys[:-1]).all(axis=1)
    unique = order[~repeated]
    sorted_by_depth: npt.NDArray[np.int64] = unique[np.argsort(entries.depth[unique], kind="stable")]
    return sorted_by_depth


class LastingTier(Tier):
    """A tier over a :class:`LastingStore`."""

    store: LastingStore

    def __init__(
        self,
        name: str,
        store: LastingStore,
        policy: EvictionPolicy,
        budget_bytes: int,
        ledger: Ledger,
        clock: Callable[[], float],
        roots: Roots,
    ) -> None:
        super().__init__(name, store, policy, budget_bytes, ledger, clock)
        store.report_to(lambda reason, times: ledger.add(name, Event.STORE_ERROR, times, reason=reason))
        self._roots = roots
        self._refreshed_s = clock()
        self.refreshing = False
        self._staging: Transit | None = None

    def open(self, spec: BlockSpec) -> None:
        if self.codec is not None:
            self.codec.open()
            self._staging = Transit(spec, STAGING_BYTES)
        self.block_bytes = self.store.slot_bytes(spec)
        self.spec = spec
        self.store.open(spec, 0)
        entries = self.store.scan()
        try:
            index = LastingIndex(self._rows_for(len(entries)), self.policy, self._clock)
        except (MemoryError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"tier {self.name!r} of {self.budget_bytes:,} bytes needs an index larger than memory; give the disk a "
                "smaller size_gb"
            ) from error
        self._index = index
        self._time_lock()
        self._enter(index, entries)

    def _rows_for(self, found: int) -> int:
        return self.budget_bytes // self.block_bytes + found + found // 4 + SPARE_ROWS

    def _enter(self, index: LastingIndex, entries: Entries) -> None:
        rows = index.enter(entries, self._roots)
        bound = self.store.bind(rows, entries.places)
        self.count(Event.FOUND, int((rows >= 0).sum()))
        left = rows[(rows >= 0) & ~bound]
        if len(left):
            self.count(Event.DROPPED, index.lose(left), "owner_freed")

    @property
    def lasting(self) -> LastingIndex:
        """The index as what it is here."""
        assert isinstance(self._index, LastingIndex)
        return self._index

    def reserve(
        self,
        chain: Chain,
        root: int,
        first: int,
        count: int,
        fidelity: int | npt.NDArray[np.uint8] = 0,
        layout: int | npt.NDArray[np.uint8] = 0,
        hint: RequestHint = NO_HINT,
    ) -> Reservation:
        self.settle()
        room = self.store.room()
        taken = self.index.reserve(chain, root, first, count, fidelity, layout, hint, places=room)
        self.settle()
        evicted = taken.evicted
        short = len(taken.rows) - self.store.room()
        if short > 0:  # the reserved rows hold their ancestors, so that none of those can be evicted for them
            evicted = np.concatenate((evicted, self.evict(short)))
            self._clear_other_class()
            short = len(taken.rows) - self.store.room()
        if short <= 0:
            return Reservation(taken.rows, taken.first, taken.wanted, evicted, taken.replaced, taken.reason)
        kept = len(taken.rows) - short
        self.abort(taken.rows[max(kept, 0) :], "full")
        return Reservation(taken.rows[: max(kept, 0)], taken.first, taken.wanted, evicted, taken.replaced, "full")

    def evict(self, count: int) -> Keys:
        keys = super().evict(count)
        self.settle()
        return keys

    def write_images(self, rows: Rows, memory: SlotMemory, slots: Rows) -> int:
        """Write sealed images from *slots* of host memory to *rows*; returns how many leading ones were written."""
        if self.codec is None or self._staging is None:
            return self.store.write(rows, memory, slots, 0, depths=self.index.depth[rows])
        written = 0
        while written < len(rows):
            count = min(len(rows) - written, max(STAGED_BYTES // self.block_bytes, 1))
            staged = self._staging.take(count, wait=True)
            try:
                part = slice(written, written + len(staged))
                done = self._write_encoded(self.codec, self._staging, staged, rows[part], memory, slots[part])
            except StoreError:
                if not written:
                    raise
                break
            finally:
                self._staging.give_back(staged)
            written += done
            if done < len(staged):
                break
        return written

    def _write_encoded(
        self, codec: ImageCodec, staging: Transit, staged: Rows, rows: Rows, memory: SlotMemory, slots: Rows
    ) -> int:
        """Write by way of *staged*: the images in *memory* may be read by others and stay as they are."""
        source, encoded = memory.view, staging.memory.view
        for slot, into in zip(slots.tolist(), staged.tolist(), strict=True):
            codec.encode(staging.spec, source[slot], encoded[into])
        done = self.store.write(rows, staging.memory, staged, 0, depths=self.index.depth[rows])
        if done and self.spec is not None:
            self.ledger.add(self.name, Event.ENCODED, done, done * self.spec.payload_bytes, codec.name)
        return done

    def _clear_other_class(self) -> None:
        """Make room by emptying a segment of blocks of another size, if this process owns one and needs it."""
        while self.store.room() <= 0:
            rows = self.store.fullest_other_class()
            if len(rows):
                self.count(Event.EVICTED, self.index.drop(rows), "other_size")
                self.settle()
            if not self.store.reassign():
                return

    def reject(self, rows: Rows, reason: str) -> None:
        bad = rows[:1]
        sound = reason in UNREADABLE_HERE  # its place is as good as any
        if len(bad) and not sound and self.store.owned(bad).all():
            self.store.quarantine(bad)
        super().reject(rows, reason)

    def close(self) -> None:
        super().close()
        if self.codec is not None:
            self.codec.close()
        if self._staging is not None:
            self._staging.close()

    def settle(self) -> None:
        """Let the store free the places of rows that have left."""
        rows = self.index.take_limbo()
        if not len(rows):
            return
        wiped = self.index.wipe[rows]
        try:
            if wiped.any():
                self.store.erase(rows[wiped])
            self.store.free(rows[~wiped])
        finally:
            self.index.recycle(rows)

    def refresh(self) -> None:
        """Learn what other processes have stored and freed, and take over what dead ones left."""
        self._refreshed_s = self._clock()
        try:
            self._refresh()
        finally:
            self.refreshing = False

    def _refresh(self) -> None:
        change = self.store.refresh()
        index = self.lasting
        self.count(Event.DROPPED, index.lose(change.gone), "owner_freed")
        index.own(change.adopted)
        self._enter(index, change.fresh)
        surplus = self.store.surplus()
        if len(surplus):
            self.count(Event.EVICTED, index.drop(surplus), "fair_share")
        self.settle()

    def begin_refresh(self, after_s: float) -> bool:
        """Whether the last :meth:`refresh` began longer ago than that, and none is on its way; it must follow then.

        A disk that hangs must not fill the lane with looks at it.
        """
        due = not self.refreshing and self._clock() - self._refreshed_s > after_s
        self.refreshing |= due
        return due
