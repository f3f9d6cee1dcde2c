"""A plain model of an index that drives a policy and objects to every wrong answer."""

from __future__ import annotations

import msgspec
import numpy as np

from ..policy.base import NO_HINT, EvictionPolicy, Keys, RequestHint, Rows


class Forest:
    """Chains of blocks in *capacity* rows, and the events that an index would send to *policy* about them.

    Everything is plain Python and slow: sets and dicts that say which rows exist, what they hang from and what holds
    them.  Each victim is checked when the policy names it.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.parent: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.departed: list[int] = []
        self.now = 0.0
        self._free = list(range(capacity - 1, -1, -1))
        self._keys = np.zeros((capacity, 2), np.uint64)
        self._next_key = 1
        column = self._keys.view()
        column.flags.writeable = False
        policy.bind(capacity, column)

    # -- what is so ---------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[int]:
        """Rows that hold a block."""
        return sorted(self.parent)

    def children(self, row: int) -> list[int]:
        """Rows that hang from *row*."""
        return [child for child, parent in self.parent.items() if parent == row]

    def can_leave(self, row: int) -> bool:
        """Whether *row* is there, childless and unpinned."""
        return row in self.parent and not self.children(row) and not self.pins[row]

    @property
    def evictable(self) -> set[int]:
        """Rows that can leave now."""
        inner = set(self.parent.values())
        return {row for row in self.parent if row not in inner and not self.pins[row]}

    @property
    def removable(self) -> int:
        """How many rows leave if everything does that can, parents after their children."""
        held: set[int] = set()
        for row in (r for r, pins in self.pins.items() if pins):
            while row >= 0 and row not in held:
                held.add(row)
                row = self.parent[row]
        return len(self.parent) - len(held)

    def chain(self, row: int) -> Rows:
        """Rows from a root to *row*."""
        found = []
        while row >= 0:
            found.append(row)
            row = self.parent[row]
        return np.array(found[::-1], np.int32)

    def new_keys(self, count: int) -> Keys:
        """Keys ``[count, 2]`` that were not there before."""
        first = self._next_key
        self._next_key += count
        words = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return np.stack((words, words >> np.uint64(7)), axis=1)

    # -- what happens -------------------------------------------------------------------------------------------------

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass."""
        self.now += seconds

    def grow(self, tip: int, count: int, hint: RequestHint = NO_HINT) -> Rows:
        """Store up to *count* new blocks on *tip* (-1: a new chain), as many as there are free rows."""
        rows = [self._free.pop() for _ in range(min(count, len(self._free)))]
        if not rows:
            return np.empty(0, np.int32)
        self._keys[rows] = self.new_keys(len(rows))
        for row in rows:
            self.parent[row], self.pins[row] = tip, 0
            tip = row
        above = self.parent[rows[0]]
        if above >= 0 and len(self.children(above)) == 1:
            self.policy.on_evictable(above, False)
        depth = len(self.chain(above))
        hint = msgspec.structs.replace(hint, tip=above, first_block=depth, total_blocks=depth + len(rows))
        self.policy.on_request(self.now, np.array(rows, np.int32), 0, hint)
        self._offer(rows[-1])
        return np.array(rows, np.int32)

    def use(self, row: int, hint: RequestHint = NO_HINT) -> None:
        """A request hits the chain that ends in *row*, pins it, and gives it back."""
        self.pin(row)
        found = self.chain(row)
        hint = msgspec.structs.replace(hint, total_blocks=len(found))
        self.policy.on_request(self.now, found, len(found), hint)
        self.policy.on_finish(found, 1)
        self.unpin(row)

    def pin(self, row: int) -> None:
        """Hold *row* and with it its ancestors."""
        self.pins[row] += 1
        if self.pins[row] == 1:
            self.policy.on_evictable(row, False)

    def unpin(self, row: int) -> None:
        """Give back one pin."""
        self.pins[row] -= 1
        self._offer(row)

    def drop(self, row: int) -> None:
        """Take *row* and all that hangs from it away, for a reason that is not the policy's."""
        doomed = [row]
        for one in doomed:
            doomed += self.children(one)
        above = self.parent[row]
        for one in doomed:
            self.policy.forget(one)
            self._remove(one)
        if above >= 0:
            self._offer(above)

    def evict(self, count: int) -> list[int]:
        """Ask the policy for up to *count* victims, and check each."""
        possible = min(count, self.removable)
        self.departed = []
        victims = self.policy.victims(count, self._unlink)
        assert victims == self.departed, "victims() must unlink exactly what it returns, in that order"
        assert len(victims) == possible, f"{possible} of {count} rows could leave, the policy named {len(victims)}"
        return victims

    def make_room(self, count: int, hint: RequestHint = NO_HINT) -> tuple[int, list[int]]:
        """Ask the policy to weigh *count* new blocks against those that would leave for them."""
        self.departed = []
        return self.policy.make_room(self.now, self.new_keys(count), hint, self._unlink)

    def _unlink(self, row: int) -> int:
        assert row in self.parent, f"row {row} is a victim, but holds no block"
        assert not self.pins[row], f"row {row} is a victim, but is leased"
        assert not self.children(row), f"row {row} is a victim before its children"
        self.departed.append(row)
        above = self.parent[row]
        self._remove(row)
        return above if above >= 0 and self.can_leave(above) else -1

    def _offer(self, row: int) -> None:
        if self.can_leave(row):
            self.policy.on_evictable(row, True)

    def _remove(self, row: int) -> None:
        del self.parent[row], self.pins[row]
        self._free.append(row)
