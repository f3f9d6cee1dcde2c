"""Whole sessions: what ``target="session"`` means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .base import EvictionPolicy, Keys, RequestHint, Rows, Unlink

_NOBODY, _SHARED = -1, -2


class WholeSessions(EvictionPolicy):
    """Lets the session go whose block a policy names first: all of it that only it uses, the ends of its chains first.

    A row belongs to the session that stored it, until another uses it too; from then on it leaves only when the policy
    names it.  Rows that were stored outside of a session belong to their branch: what leads to the next row that
    something else hangs from.  A session that is used meanwhile is left alone again.
    """

    def __init__(self, inner: EvictionPolicy) -> None:
        super().__init__(inner.max_size_gb)
        self.inner = inner
        self.target, self.action = inner.target, inner.action
        self.name: str = inner.name  # type: ignore[misc]  # that of the policy which it serves
        self.bytes_per_row = inner.bytes_per_row + 128

    def options(self) -> dict[str, Any]:
        return self.inner.options()

    def clone(self) -> EvictionPolicy:
        return WholeSessions(self.inner.clone())

    def use_worker(self, defer: Callable[[Callable[[], None]], bool]) -> None:
        self.inner.use_worker(defer)

    def bind(self, rows: int, keys: Keys) -> None:
        self.inner.bind(rows, keys)
        self._owner = np.full(rows, _NOBODY, np.int32)
        self._owner_at = memoryview(self._owner)
        self._evictable = np.zeros(rows, np.bool_)
        self._evictable_at = memoryview(self._evictable)
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._rows: dict[int, int] = {}
        self._ends: dict[int, dict[int, None]] = {}
        self._next_number = 0
        self._leaving = _NOBODY
        self._branch = _NOBODY

    # -- what happens -------------------------------------------------------------------------------------------------

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self.inner.on_request(now, rows, hit_len, hint)
        number = self._number_of(hint.session)
        if number == self._leaving:
            self._leaving = _NOBODY
        if self._branch >= 0 and (rows == self._branch).any():
            self._branch = _NOBODY
        hits = rows[:hit_len]
        foreign = hits[(self._owner[hits] != number) & (self._owner[hits] != _SHARED)]
        for row in foreign.tolist():
            self._give(row, _SHARED)
        for row in rows[hit_len:].tolist():
            self._give(row, number)

    def restore(self, rows: Rows) -> None:
        self.inner.restore(rows)

    def on_finish(self, rows: Rows, output_tokens: int) -> None:
        self.inner.on_finish(rows, output_tokens)

    def on_evictable(self, row: int, evictable: bool) -> None:
        self.inner.on_evictable(row, evictable)
        self._mark(row, evictable)

    def forget(self, row: int) -> None:
        self.inner.forget(row)
        self._mark(row, False)
        self._give(row, _NOBODY)

    # -- who leaves ---------------------------------------------------------------------------------------------------

    def admit(self, now: float, keys: Keys, hint: RequestHint) -> int:
        return self.inner.admit(now, keys, hint)

    def overdue(self, now: float) -> int:
        return self.inner.overdue(now)

    def next_victim(self) -> int:
        row = self._next_of_session()
        if row >= 0:
            self.inner.forget(row)
        else:
            row = self.inner.next_victim()
            if row < 0:
                return row
            self._leaving = max(self._owner_at[row], _NOBODY)
        self._mark(row, False)
        return row

    def _has_left(self, row: int, parent: int) -> None:
        if parent >= 0 and self._owner_at[row] == _NOBODY and self._owner_at[parent] == _NOBODY:
            self._branch = parent
        self._give(row, _NOBODY)

    def swap_victims(self, count: int, unlink: Unlink) -> list[int]:
        leaving = self.victims(count, unlink)
        while leaving and self._has_more():
            leaving += self.victims(1, unlink)
        return leaving

    # -- whose rows are whose -----------------------------------------------------------------------------------------

    def _has_more(self) -> bool:
        return bool(self._ends.get(self._leaving)) or (self._branch >= 0 and bool(self._evictable_at[self._branch]))

    def _next_of_session(self) -> int:
        ends = self._ends.get(self._leaving)
        if ends:
            return next(reversed(ends))
        self._leaving = _NOBODY
        row, self._branch = self._branch, _NOBODY
        return row if row >= 0 and self._evictable_at[row] else -1

    def _number_of(self, session: str) -> int:
        if not session:
            return _NOBODY
        number = self._numbers.get(session)
        if number is None:
            number = self._numbers[session] = self._next_number
            self._names[number] = session
            self._rows[number] = 0
            self._next_number = number + 1 if number < (1 << 31) - 2 else 0
        return number

    def _mark(self, row: int, evictable: bool) -> None:
        self._evictable_at[row] = evictable
        owner = self._owner_at[row]
        if owner < 0:
            return
        if evictable:
            self._ends.setdefault(owner, {})[row] = None
        elif owner in self._ends:
            self._ends[owner].pop(row, None)

    def _give(self, row: int, owner: int) -> None:
        """Row *row* belongs to *owner* from now on; a session without rows is forgotten."""
        before, evictable = self._owner_at[row], bool(self._evictable_at[row])
        if before == owner:
            return
        if before >= 0:
            self._mark(row, False)
            self._rows[before] -= 1
        self._owner_at[row] = owner
        if owner >= 0:
            self._rows[owner] += 1
        self._mark(row, evictable)
        if before >= 0 and not self._rows[before]:
            del self._rows[before], self._numbers[self._names.pop(before)]
            self._ends.pop(before, None)
