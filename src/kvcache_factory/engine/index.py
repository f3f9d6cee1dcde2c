"""Which block is in which row of one tier: chains are found, verified, reserved, committed and dropped here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ..block.envelope import Fidelity
from ..policy.base import NO_HINT, EvictionPolicy, RequestHint
from .record import DIFFERS, NOT_EXACT, NOT_READY, compare, publish, unchanged, write
from .roots import Roots
from .table import Keys, Rows, first_true, pick
from .tree import DOOMED, FREE, NO_KEYS, PENDING, READY, Tree, add_one, as_slice
from .values import NOT_ADMITTED, Chain, Found, Reservation, StoredChain

_NONE: Rows = np.empty(0, np.int32)
_REASONS = {DIFFERS: "record_differs", NOT_READY: "in_progress", NOT_EXACT: "not_exact"}


class Index(Tree):
    """The blocks of one tier, and the policy that says which of them leave; every method takes the lock."""

    # -- what is there ------------------------------------------------------------------------------------------------

    def peek(self, chain: Chain) -> int:
        """Leading blocks of *chain* that are ready, by key alone: no verification, no lease."""
        with self._lock:
            return self._table.leading(chain.keys, self.state, READY)

    def match(
        self,
        chain: Chain,
        root: int,
        limit: int,
        worst: Fidelity = Fidelity.EXACT,
        hint: RequestHint = NO_HINT,
    ) -> Found:
        """Find, verify and pin the leading run of *chain*, of at most *limit* blocks.

        The run's last row is pinned, which holds its ancestors too; :meth:`unpin` that row to give it back.
        """
        with self._lock:
            found = self._find_run(chain, root, limit, worst)
            if len(found.rows):
                self._pin(int(found.rows[-1]))
                add_one(found.rows, self.hits)
                hint = replace(hint, total_blocks=chain.num_blocks, first_block=0, tip=-1)
                self.policy.on_request(self._clock(), found.rows, len(found.rows), hint)
            return found

    def unpin(self, row: int) -> None:
        """Give back one pin of *row*."""
        with self._lock:
            assert self._pins_at[row] > 0, f"row {row} is not pinned"
            self._pins_at[row] -= 1
            if self._state_at[row] == DOOMED:
                self._collect([row])
            else:
                self._offer(row)

    def rows_of(self, keys: Keys) -> Rows:
        """Ready rows of *keys* ``[n, 2]``, unverified; -1 where there is none."""
        with self._lock:
            rows = self._table.find(keys)
            rows[(rows >= 0) & (self.state[rows] != READY)] = -1
            return rows

    def roots(self) -> set[int]:
        """Numbers of the roots that blocks stand on, visible or not."""
        with self._lock:
            return set(np.unique(self.parent[(self.state != FREE) & (self.parent < -1)]).tolist())

    def knows(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of *keys* ``[n, 2]`` are here, whole or being written."""
        with self._lock:
            known: npt.NDArray[np.bool_] = self._table.find(keys) >= 0
            return known

    # -- reserve, fill, commit ----------------------------------------------------------------------------------------

    def reserve(
        self,
        chain: Chain,
        root: int,
        first: int,
        count: int,
        fidelity: int | npt.NDArray[np.uint8] = Fidelity.EXACT,
        layout: int | npt.NDArray[np.uint8] = 0,
        hint: RequestHint = NO_HINT,
        places: int | None = None,
    ) -> Reservation:
        """Reserve rows for those of the blocks *first* to *first* + *count* - 1 that are not here, evicting for them.

        Blocks that are ready or being written by somebody else are left to them.  A resident block whose record
        differs, or that is less exact, gives way together with what was built on it.  *fidelity* and *layout* are one
        value, or one for each of the *count* blocks.  *places*: blocks that the store has room for, where that is not
        one for each free row.
        """
        end = min(first + count, chain.num_blocks)
        with self._lock:
            expired = self._evict(self.policy.overdue(self._clock()))
            resident, in_the_way, possible = self._resident_run(chain, root, first, end, fidelity)
            start = max(first, len(resident))
            if len(resident) < first:
                return Reservation(_NONE, start, 0, expired, reason="parent_absent")
            if start >= end:
                return Reservation(_NONE, start, 0, expired)
            replaced = self._doom(in_the_way) if len(in_the_way) else 0
            tip = int(resident[-1]) if len(resident) else root
            hint = replace(hint, total_blocks=chain.num_blocks, first_block=start, tip=tip)
            rows, evicted, reason = self._allocate(chain.keys[start:possible], tip, hint, places)
            placed = self._place(rows, chain, start) if len(rows) else rows
            if len(placed):
                part = slice(start - first, start - first + len(placed))
                # The tip may have been stored before an ancestor of it was encoded.
                worst = int(pick(self.fidelity, resident).max(initial=0))
                self._attach(placed, chain, start, tip, _part(fidelity, part), _part(layout, part), worst)
            if not reason and len(placed) < end - start:
                reason = "key_repeats"
            if len(expired):
                evicted = np.concatenate((expired, evicted))
            return Reservation(placed, start, end - start, evicted, replaced, reason)

    def commit(self, rows: Rows, hint: RequestHint = NO_HINT) -> int:
        """Make reserved *rows* visible; returns how many are, which is fewer if they were dropped meanwhile."""
        if not len(rows):
            return 0
        with self._lock:
            if not publish(self, rows):
                alive = self.state[rows] == PENDING
                self._collect(rows[~alive][::-1].tolist())
                rows = rows[alive]
                self.state[rows] = READY
            if len(rows):
                first, above = int(self.depth[rows[0]]), self._parent_at[rows[0]]
                total = max(hint.total_blocks, first + len(rows))
                hint = replace(hint, total_blocks=total, first_block=first, tip=max(above, -1))
                self.policy.on_request(self._clock(), rows, 0, hint)
                self._offer(int(rows[-1]))  # each of the others has the next as its child
        self._waiting.wake()
        return len(rows)

    def abort(self, rows: Rows) -> int:
        """Give reserved *rows* back unwritten, with whatever was built on them; returns how many of that were ready."""
        if not len(rows):
            return 0
        with self._lock:
            self.busy[rows] = False
            lost = self._doom(rows)
            self._collect(rows[::-1].tolist())
        self._waiting.wake()
        return lost

    def when_whole(self, row: int, job: Callable[[], object]) -> bool:
        """Call *job* once something that is being written has ended, if the chain up to *row* is being written to.

        The caller holds *row*.  False where nobody writes to it, or too many wait: *job* is not called then.
        """
        with self._lock:
            return bool((self.state[self._path(row)] == PENDING).any()) and self._waiting.add(job)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def evict(self, count: int) -> Keys:
        """Let up to *count* blocks leave by policy; returns the keys ``[n, 2]`` of those that did."""
        with self._lock:
            return self._evict(count)

    def drop(self, rows: Rows) -> int:
        """Make *rows* and all that was built on them invisible now, and free them as soon as nobody holds them."""
        with self._lock:
            return self._doom(rows[self.state[rows] != FREE])

    def keys_below(self, rows: Rows) -> Keys:
        """Keys ``[n, 2]`` of *rows* and of all that is built on them."""
        with self._lock:
            return self.keys[self._below(rows)]

    def drop_unshared(self, rows: Rows, wipe: bool = False) -> int:
        """Drop those of *rows* that nothing outside of them is built on; returns how many could be found.

        A request that holds one keeps its bytes until it lets go.  *wipe*: the store must overwrite them.
        """
        with self._lock:
            rows = np.unique(rows[rows >= 0])
            # They were looked up without the lock, and may have left.
            rows = rows[(self.state[rows] == PENDING) | (self.state[rows] == READY)]
            inside = dict.fromkeys(rows.tolist(), 0)
            doomed = []
            for row in rows[np.argsort(-self.depth[rows], kind="stable")].tolist():
                if self._children_at[row] == inside[row]:
                    doomed.append(row)
                    parent = self._parent_at[row]
                    if parent in inside:
                        inside[parent] += 1
            dropped = np.array(doomed, np.int32)
            self.wipe[dropped] = wipe
            return self._hide(dropped)

    def drop_unshared_keys(self, keys: Keys, wipe: bool = False) -> int:
        """As :meth:`drop_unshared` for the rows of *keys* ``[n, 2]``, those that are being filled as well."""
        with self._lock:
            return self.drop_unshared(self._table.find(keys), wipe)

    def finish(self, tip: int, output_tokens: int) -> None:
        """Tell the policy that the request whose chain ends in *tip* has generated *output_tokens*."""
        if type(self.policy).on_finish is not EvictionPolicy.on_finish:
            with self._lock:
                self.policy.on_finish(self._path(tip), output_tokens)

    def clear(self) -> int:
        """Drop every block; those that are held go when they are let go.  Returns how many could be found."""
        with self._lock:
            return self._doom(np.flatnonzero(self.state != FREE).astype(np.int32))

    def pin(self, row: int) -> None:
        """Hold *row* and its ancestors until :meth:`unpin`."""
        with self._lock:
            self._pin(row)

    def hold(self, key: Keys) -> int:
        """Pin the row of *key* ``[1, 2]``, whole or being written, and return it; -1 when it is not here."""
        with self._lock:
            row = int(self._table.find(key)[0])
            if row >= 0:
                self._pin(row)
            return row

    def stored_chain(self, row: int, roots: Roots) -> StoredChain:
        """The blocks that are ready of the chain from its first to *row*, which the caller must hold a pin of."""
        with self._lock:
            rows = self._path(row)
            root = int(self.parent[rows[0]])
            waiting = self.state[rows] != READY
            if waiting.any():  # being written by somebody else, or dropped
                rows = rows[: int(waiting.argmax())]
            span = as_slice(rows)
            root_key, identity_digest = roots.origin(root)
            return StoredChain(
                root=root,
                root_key=root_key,
                identity_digest=identity_digest,
                rows=rows,
                keys=self.keys[span].copy(),
                token_blocks=self.tokens[span].copy(),
                extras=self.extras[span].copy(),
                fidelity=self.fidelity[span].copy(),
                layout=self.layout[span].copy(),
                codings=self.codings[span].copy(),
                memo={},
            )

    def _path(self, row: int) -> Rows:
        rows = np.empty(int(self.depth[row]) + 1, np.int32)
        for i in range(len(rows) - 1, -1, -1):
            rows[i] = row
            row = self._parent_at[row]
        return rows

    def gone(self, rows: Rows) -> int:
        """Number of the first of *rows*, which the caller holds, that was dropped; their number when none was."""
        with self._lock:
            dropped = self.state[rows] != READY
            return int(dropped.argmax()) if dropped.any() else len(rows)

    def dropped(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of *rows*, which the caller holds, were dropped."""
        with self._lock:
            dropped: npt.NDArray[np.bool_] = self.state[rows] != READY
            return dropped

    def select_victims(self, count: int) -> Rows:
        """Pin the *count* rows, or more, that the policy would move down first; :meth:`remove_selected` ends that."""
        with self._lock:
            rows = np.array(self.policy.swap_victims(count, self._unlinker), np.int32)
            for row in rows.tolist():
                self._pins_at[row] += 1
                parent = self._parent_at[row]
                if parent >= 0:  # back into the tree: the parent that became a leaf for a moment is none
                    self._children_at[parent] += 1
                    self.policy.on_evictable(parent, False)
            return rows

    def remove_selected(self, rows: Rows) -> Keys:
        """Let selected *rows* leave, unless somebody has begun to use them; returns the keys of those that left."""
        with self._lock:
            left = []
            for row in rows.tolist():
                self._pins_at[row] -= 1
                if self._state_at[row] == DOOMED:
                    self._collect([row])
                elif self._can_leave(row):
                    left.append(row)
                    self._offer_parent(row)
            return self._let_go(left)

    # -- inside, with the lock held -----------------------------------------------------------------------------------

    def _find_run(self, chain: Chain, root: int, limit: int, worst: Fidelity) -> Found:
        limit = min(limit, chain.num_blocks)
        known = self._recall(chain, root, limit, worst)
        start = len(known)
        rows = self._table.find(chain.keys[start:limit], leading=True)
        if len(rows) and rows[-1] < 0:
            rows = rows[: first_true(rows < 0)]
        stop = start + len(rows)
        above = int(known[-1]) if start else root
        extras, tokens = chain.extras[start:stop], chain.token_blocks[start:stop]
        good, verdict = compare(self, rows, above, True, worst, extras, tokens)
        reason = _REASONS[verdict] if verdict else "absent" if stop < limit else ""
        rows = rows[:good]
        if start:
            rows = np.concatenate((known, rows))
        chain.memo[self.number] = (root, worst, rows, pick(self.generation, rows))
        return Found(rows, reason)

    def _resident_run(
        self, chain: Chain, root: int, first: int, end: int, fidelity: int | npt.NDArray[np.uint8]
    ) -> tuple[Rows, Rows, int]:
        """For a save of the blocks from *first* to *end* - 1: the leading rows of *chain* that stay, the rows that give
        way, and the number of the block up to which blocks can be stored."""
        known = self._recall(chain, root, end, Fidelity.APPROXIMATE)
        start = len(known)
        fresh = self._table.find(chain.keys[start:end])
        rows = np.concatenate((known, fresh)) if start else fresh
        if not start and (fresh < 0).all():
            return _NONE, _NONE, end
        present = fresh[: first_true(fresh < 0)]
        above = int(known[-1]) if start else root
        stop = start + len(present)
        extras, tokens = chain.extras[start:stop], chain.token_blocks[start:stop]
        good = start + compare(self, present, above, False, Fidelity.APPROXIMATE, extras, tokens)[0]
        if good > first:
            wanted = np.maximum(_part(fidelity, slice(good - first)), self.accepts)
            worse = self.fidelity[rows[first:good]] > wanted
            if worse.any():
                good = first + int(worse.argmax())
        stay, rest = rows[:good], rows[good:]
        if (rest >= 0).any():
            # A key of the chain's own beginning must not drive that beginning out.
            repeats = np.isin(rest, stay)
            rest = rest[: int(repeats.argmax())] if repeats.any() else rest
            end = good + len(rest)
        return stay, rest[rest >= 0], end

    def _recall(self, chain: Chain, root: int, limit: int, worst: int) -> Rows:
        """Rows that an earlier match of the same chain object verified, as far as none has changed since."""
        memo = chain.memo.get(self.number)
        if memo is None or memo[0] != root or memo[1] > worst:
            return _NONE
        rows: Rows = memo[2][:limit]
        return rows[: unchanged(rows, self.generation, memo[3])]

    def _allocate(self, keys: Keys, tip: int, hint: RequestHint, places: int | None) -> tuple[Rows, Keys, str]:
        """Rows for the blocks of *keys*, as many leading ones as can and should have one."""
        count, evicted, reason = len(keys), NO_KEYS, ""
        free = self._num_free if places is None else min(self._num_free, max(places, 0))
        if count > free:
            if tip >= 0:
                self._pin(tip)
            hint = replace(hint, first_block=hint.first_block + free)
            admitted, leaving = self.policy.make_room(self._clock(), keys[free:], hint, self._unlinker)
            evicted = self._let_go(leaving)
            if admitted < count - free:
                count, reason = free + admitted, NOT_ADMITTED
            if count > self._num_free:
                count, reason = self._num_free, "full"
            if tip >= 0:
                self._pins_at[tip] -= 1
                if not count:
                    self._offer(tip)
        top = self._num_free
        rows = self._free[top - count : top][::-1].copy()
        self._num_free -= count
        self._live += count
        return rows, evicted, reason

    def _place(self, rows: Rows, chain: Chain, start: int) -> Rows:
        """Make reserved *rows* findable under the keys of *chain*, and give back those behind a key that repeats."""
        placed = self._table.enter(rows, chain.keys[start : start + len(rows)])
        if placed < len(rows):
            self._release(rows[placed:])
        return rows[:placed]

    def _attach(
        self,
        rows: Rows,
        chain: Chain,
        start: int,
        tip: int,
        fidelity: int | npt.NDArray[np.uint8],
        layout: int | npt.NDArray[np.uint8],
        worst: int,
    ) -> None:
        stop = start + len(rows)
        write(self, rows, tip, start, chain.extras[start:stop], chain.token_blocks[start:stop])
        self.layout.put(rows, layout)
        self.codings.put(rows, 0)
        # What is computed on a lossy prefix is at most as good as that prefix.
        inherited = max(int(self.fidelity[tip]) if tip >= 0 else 0, worst)
        if isinstance(fidelity, int):
            self.fidelity.put(rows, max(fidelity, inherited))
        else:
            self.fidelity[rows] = np.maximum.accumulate(np.maximum(fidelity, inherited))
        if tip >= 0:
            self._children_at[tip] += 1
            if self._children_at[tip] == 1:
                self.policy.on_evictable(tip, False)


def _part(value: int | npt.NDArray[np.uint8], part: slice) -> int | npt.NDArray[np.uint8]:
    return value if isinstance(value, int) else value[part]
