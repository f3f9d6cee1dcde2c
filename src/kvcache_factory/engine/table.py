"""Open addressing from 128-bit keys to row numbers, in arrays.

The keys themselves live in the index's column; the table holds row numbers only.  Linear probing at a load of at most
one half, deletion by shifting back, so that there are no tombstones and never a rebuild.  All loops see keys as pairs
of signed 64-bit words: numba would otherwise turn mixed signed and unsigned arithmetic into floats.

Kernels take what would be several steps of numpy at once, because nearly every numpy function that takes or makes an
array of row numbers lets go of the GIL, for however few rows; see ``docs/design/0011-threads-and-the-gil.md``.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..jit import helper, kernel

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]
_T = TypeVar("_T", bound=np.generic)

_CHUNK = 1024


def pick(column: npt.NDArray[_T], rows: Rows) -> npt.NDArray[_T]:
    """``column[rows]``, which takes half the time and keeps the GIL where row numbers are as wide as pointers."""
    picked: npt.NDArray[_T] = column[rows.astype(np.intp)]
    return picked


def pick_keys(column: Keys, rows: Rows) -> Keys:
    """``column[rows]`` for keys ``[n, 2]``, as :func:`pick`."""
    return pick(column.view("V16")[:, 0], rows).view(np.uint64).reshape(-1, 2)


def first_true(mask: npt.NDArray[np.bool_]) -> int:
    """Where *mask* is true for the first time; its length where it never is.  Keeps the GIL, as argmax does not."""
    at = mask.tobytes().find(1)
    return at if at >= 0 else len(mask)


def _find_numpy(table: Any, column: Any, keys: Any, leading: bool, out: Any) -> None:
    """Probe all keys of a chunk at once, one round per probe distance."""
    out.fill(-1)
    for start in range(0, len(keys), _CHUNK):
        chunk = keys[start : start + _CHUNK]
        found = out[start : start + _CHUNK]
        at = chunk[:, 0] & (len(table) - 1)
        waiting = np.arange(len(chunk))
        while len(waiting):
            rows = table[at]
            hit = (column[rows] == chunk[waiting]).all(axis=1) & (rows >= 0)
            found[waiting[hit]] = rows[hit]
            going = (rows >= 0) & ~hit
            waiting, at = waiting[going], (at[going] + 1) & (len(table) - 1)
        if leading and (found < 0).any():
            return


@kernel("void(i4[::1], i8[:,::1], i8[:,::1], b1, i4[::1])", fallback=_find_numpy)
def _find(table: Any, column: Any, keys: Any, leading: Any, out: Any) -> None:
    mask = len(table) - 1
    for i in range(len(keys)):
        out[i] = -1
    for i in range(len(keys)):
        at = keys[i, 0] & mask
        while table[at] >= 0:
            row = table[at]
            if column[row, 0] == keys[i, 0] and column[row, 1] == keys[i, 1]:
                out[i] = row
                break
            at = (at + 1) & mask
        if leading and out[i] < 0:
            return


@helper
def _place_of(table: Any, column: Any, first: Any, second: Any) -> Any:
    """Where in *table* a key is, or where it would be put."""
    mask = len(table) - 1
    at = first & mask
    while table[at] >= 0 and (column[table[at], 0] != first or column[table[at], 1] != second):
        at = (at + 1) & mask
    return at


@helper
def _take_out(table: Any, column: Any, row: Any) -> None:
    """Make *row* not findable any more."""
    mask = len(table) - 1
    hole = column[row, 0] & mask
    while table[hole] >= 0 and table[hole] != row:
        hole = (hole + 1) & mask
    if table[hole] < 0:  # not here: a bug elsewhere, which must not become an endless loop under a lock
        return
    at = hole
    while True:
        at = (at + 1) & mask
        mover = table[at]
        if mover < 0:
            break
        home = column[mover, 0] & mask
        # Only an entry whose home does not lie cyclically in (hole, at] can be reached from the hole.
        if ((at - home) & mask) >= ((at - hole) & mask):
            table[hole] = mover
            hole = at
    table[hole] = -1


@kernel("i8(i4[::1], i8[:,::1], i4[::1])")
def _insert(table: Any, column: Any, rows: Any) -> int:
    for i in range(len(rows)):
        row = rows[i]
        at = _place_of(table, column, column[row, 0], column[row, 1])
        if table[at] >= 0:
            return i
        table[at] = row
    return len(rows)


@kernel("i8(i4[::1], i8[:,::1], i4[::1], i8[:,::1])")
def _enter(table: Any, column: Any, rows: Any, keys: Any) -> int:
    for i in range(len(rows)):
        row = rows[i]
        at = _place_of(table, column, keys[i, 0], keys[i, 1])
        if table[at] >= 0:
            return i
        column[row, 0] = keys[i, 0]
        column[row, 1] = keys[i, 1]
        table[at] = row
    return len(rows)


@kernel("void(i4[::1], i8[:,::1], i4[::1])")
def _remove(table: Any, column: Any, rows: Any) -> None:
    for i in range(len(rows)):
        _take_out(table, column, rows[i])


@kernel("i8(i4[::1], i8[:,::1], i8[::1], i8[:,::1], i4[::1], i8)")
def _count_in(table: Any, column: Any, counts: Any, keys: Any, free: Any, top: Any) -> int:
    """One holder more for each key; a new one takes the last of the *top* free rows.  Returns how many are left."""
    for i in range(len(keys)):
        at = _place_of(table, column, keys[i, 0], keys[i, 1])
        if table[at] < 0:
            top -= 1
            row = free[top]
            column[row, 0] = keys[i, 0]
            column[row, 1] = keys[i, 1]
            counts[row] = 0
            table[at] = row
        counts[table[at]] += 1
    return int(top)


@kernel("i8(i4[::1], i8[:,::1], i8[::1], i8[:,::1], i4[::1], i8)")
def _count_out(table: Any, column: Any, counts: Any, keys: Any, free: Any, top: Any) -> int:
    """One holder less for each key that has one; rows without any join the *top* free ones.  Returns how many are."""
    for i in range(len(keys)):
        row = table[_place_of(table, column, keys[i, 0], keys[i, 1])]
        if row < 0:
            continue
        counts[row] -= 1
        if counts[row] == 0:
            _take_out(table, column, row)
            free[top] = row
            top += 1
    return int(top)


@kernel("i8(i4[::1], i8[:,::1], b1[::1], i8[:,::1], i8, i4[::1])")
def _remember(table: Any, column: Any, taken: Any, keys: Any, after: Any, found: Any) -> int:
    """As :meth:`KeyRing.note`; where each key was goes to *found*.  Returns where the ring goes on."""
    capacity = len(taken)
    coming = 0
    for i in range(len(keys)):
        found[i] = table[_place_of(table, column, keys[i, 0], keys[i, 1])]
        if found[i] < 0 or (after - 1 - found[i]) % capacity >= capacity // 2:
            coming += 1
    for i in range(len(keys)):
        if found[i] >= 0 and (after - 1 - found[i]) % capacity >= capacity // 2 and taken[found[i]]:
            _take_out(table, column, found[i])
            taken[found[i]] = False
    repeated = False
    begin = after
    for i in range(len(keys)):
        if found[i] >= 0 and (begin - 1 - found[i]) % capacity < capacity // 2:
            continue
        coming -= 1
        if coming >= capacity:  # more than there are places: only the last remain
            continue
        if taken[after]:
            _take_out(table, column, after)
            taken[after] = False
        at = _place_of(table, column, keys[i, 0], keys[i, 1])
        repeated = repeated or table[at] >= 0  # a collision within the chain ends it
        column[after, 0] = keys[i, 0]
        column[after, 1] = keys[i, 1]
        if not repeated:
            table[at] = after
            taken[after] = True
        after = (after + 1) % capacity
    return int(after)


@kernel("i8(i4[::1], i8[:,::1], u1[::1], u1, i8[:,::1])")
def _leading(table: Any, column: Any, state: Any, ready: Any, keys: Any) -> int:
    """Length of the leading run that is present, by galloping: contents are closed under prefix."""
    mask = len(table) - 1
    low, high, step = 0, len(keys), 1
    # Invariant: blocks before `low` are present, the block at `high` (if any) is not.
    while low < high:
        probe = low + step - 1 if low + step - 1 < high else (low + high) // 2
        at = keys[probe, 0] & mask
        present = False
        while table[at] >= 0:
            row = table[at]
            if column[row, 0] == keys[probe, 0] and column[row, 1] == keys[probe, 1]:
                present = state[row] == ready
                break
            at = (at + 1) & mask
        if present:
            low = probe + 1
            if step <= len(keys):
                step = step * 2
        else:
            high = probe
            step = len(keys) + 1  # from here on by halves
    return low


class KeyTable:
    """Rows by key; *column* ``[rows, 2]`` belongs to the caller and holds the key of every row that is inserted."""

    def __init__(self, column: Keys) -> None:
        size = 8
        while size < 2 * len(column):
            size *= 2
        self._column = column.view(np.int64)
        self._table = np.full(size, -1, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    def find(self, keys: Keys, *, leading: bool = False) -> Rows:
        """Row of each of *keys* ``[n, 2]``, or -1; with *leading*, -1 from the first that is absent on."""
        rows = np.empty(len(keys), np.int32)
        _find(self._table, self._column, _words(keys), leading, rows)
        return rows

    def insert(self, rows: Rows) -> int:
        """Make *rows* findable under their keys in the column, up to one whose key is taken; returns how many are."""
        return int(_insert(self._table, self._column, rows))

    def enter(self, rows: Rows, keys: Keys) -> int:
        """Write *keys* ``[n, 2]`` into *rows* of the column and insert these, up to a key that is taken."""
        return int(_enter(self._table, self._column, rows, _words(keys)))

    def remove(self, rows: Rows) -> None:
        """Forget *rows*; one that is not here is passed over."""
        _remove(self._table, self._column, rows)

    def count_in(self, counts: npt.NDArray[np.int64], keys: Keys, free: Rows, top: int) -> int:
        """One more in *counts* for each of *keys*; those that are new take the last of the *top* leading *free* rows.

        Returns how many of these are left.
        """
        return int(_count_in(self._table, self._column, counts, _words(keys), free, top))

    def count_out(self, counts: npt.NDArray[np.int64], keys: Keys, free: Rows, top: int) -> int:
        """The inverse of :meth:`count_in`; a key that is not here is passed over."""
        return int(_count_out(self._table, self._column, counts, _words(keys), free, top))

    def remember(self, taken: npt.NDArray[np.bool_], keys: Keys, after: int, found: Rows) -> int:
        """For :class:`KeyRing`: where each of *keys* is goes to *found*, new ones to the places from *after* on."""
        return int(_remember(self._table, self._column, taken, _words(keys), after, found))

    def leading(self, keys: Keys, state: npt.NDArray[np.uint8], ready: int) -> int:
        """How many leading *keys* have a row in state *ready*, assuming that presence is closed under prefix."""
        return int(_leading(self._table, self._column, state, ready, _words(keys)))


class KeyRing:
    """The last different keys of many, at most *capacity*; those seen again move to the front when they have grown old.

    The newest takes the place of the oldest.
    """

    def __init__(self, capacity: int) -> None:
        self._column = np.zeros((capacity, 2), np.uint64)
        self._taken = np.zeros(capacity, np.bool_)
        self._table = KeyTable(self._column)
        self._next = 0

    def note(self, keys: Keys) -> Rows:
        """Remember *keys* ``[n, 2]``; where each was before, -1 for those that are new."""
        found = np.empty(len(keys), np.int32)
        self._next = self._table.remember(self._taken, keys, self._next, found)
        return found


class KeyCounts:
    """How many holders each key has; grows as needed."""

    def __init__(self) -> None:
        self._resize(16)
        self._num_free = 16

    def _resize(self, rows: int) -> None:
        self._column = np.zeros((rows, 2), np.uint64)
        self._counts = np.zeros(rows, np.int64)
        self._free: Rows = np.arange(rows - 1, -1, -1, dtype=np.int32)
        self._table = KeyTable(self._column)

    def __len__(self) -> int:
        return len(self._counts) - self._num_free

    @property
    def keys(self) -> Keys:
        """The keys ``[n, 2]`` that have a holder."""
        held: Keys = self._column[self._counts > 0]
        return held

    def knows(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of *keys* ``[n, 2]`` have a holder."""
        known: npt.NDArray[np.bool_] = self._table.find(keys) >= 0
        return known

    def only_one(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of *keys* ``[n, 2]`` have exactly one holder."""
        rows = self._table.find(keys)
        one: npt.NDArray[np.bool_] = (rows >= 0) & (self._counts[rows] == 1)
        return one

    def missing(self, keys: Keys) -> Keys:
        """Those of *keys* ``[n, 2]`` that have no holder, each once."""
        unknown = self._table.find(keys) < 0
        end = keys[first_true(unknown) :]  # of a chain, mostly all behind the first that is missing are
        absent: Keys = end if np.count_nonzero(unknown) == len(end) else keys[unknown]
        # Only a collision repeats a key within a chain, and half a key is enough to see that there is none.
        if len(absent) > 1 and len(set(absent[:, 0].tolist())) < len(absent):
            absent = np.unique(absent, axis=0)
        return absent

    def add(self, keys: Keys) -> None:
        """One more holder for each of *keys*, which are distinct."""
        if len(keys) > self._num_free:  # though some may be here already
            self._grow(len(self) + len(keys))
        self._num_free = self._table.count_in(self._counts, keys, self._free, self._num_free)

    def remove(self, keys: Keys) -> Keys:
        """One holder less for each of *keys*; returns those that have none left."""
        before = self._num_free
        self._num_free = self._table.count_out(self._counts, keys, self._free, before)
        return pick_keys(self._column, self._free[before : self._num_free])

    def _grow(self, needed: int) -> None:
        keys, counts = self.keys, self._counts[self._counts > 0]
        self._resize(1 << (2 * needed - 1).bit_length())
        rows = np.arange(len(keys), dtype=np.int32)
        self._column[rows], self._counts[rows] = keys, counts
        self._num_free = len(self._counts) - len(keys)
        self._free[: self._num_free] = np.arange(len(self._counts) - 1, len(keys) - 1, -1, dtype=np.int32)
        self._table.insert(rows)


def _words(keys: Keys) -> npt.NDArray[np.int64]:
    """Keys as writable, contiguous signed words: the one array type that the kernels are compiled for."""
    words = keys.view(np.int64)
    return words if words.flags.writeable and words.flags.c_contiguous else np.array(words)
