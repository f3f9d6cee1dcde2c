"""Open addressing from 128-bit keys to row numbers, in arrays.

The keys themselves live in the index's column; the table holds row numbers only.  Linear probing at a load of at most
one half, deletion by shifting back, so that there are no tombstones and never a rebuild.  All loops see keys as pairs
of signed 64-bit words: numba would otherwise turn mixed signed and unsigned arithmetic into floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..jit import kernel

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]

_CHUNK = 1024


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


@kernel("i8(i4[::1], i8[:,::1], i4[::1])")
def _insert(table: Any, column: Any, rows: Any) -> int:
    mask = len(table) - 1
    for i in range(len(rows)):
        row = rows[i]
        at = column[row, 0] & mask
        while table[at] >= 0:
            there = table[at]
            if column[there, 0] == column[row, 0] and column[there, 1] == column[row, 1]:
                return i
            at = (at + 1) & mask
        table[at] = row
    return len(rows)


@kernel("void(i4[::1], i8[:,::1], i4[::1])")
def _remove(table: Any, column: Any, rows: Any) -> None:
    mask = len(table) - 1
    for i in range(len(rows)):
        row = rows[i]
        hole = column[row, 0] & mask
        while table[hole] >= 0 and table[hole] != row:
            hole = (hole + 1) & mask
        if table[hole] < 0:  # not here: a bug elsewhere, which must not become an endless loop under a lock
            continue
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

    def remove(self, rows: Rows) -> None:
        """Forget *rows*; one that is not here is passed over."""
        _remove(self._table, self._column, rows)

    def leading(self, keys: Keys, state: npt.NDArray[np.uint8], ready: int) -> int:
        """How many leading *keys* have a row in state *ready*, assuming that presence is closed under prefix."""
        return int(_leading(self._table, self._column, state, ready, _words(keys)))


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
        absent: Keys = keys[self._table.find(keys) < 0]
        # Only a collision repeats a key within a chain, and half a key is enough to see that there is none.
        if len(np.unique(absent[:, 0])) < len(absent):
            absent = np.unique(absent, axis=0)
        return absent

    def add(self, keys: Keys) -> None:
        """One more holder for each of *keys*, which are distinct."""
        rows = self._table.find(keys)
        new = keys[rows < 0]
        self._counts[rows[rows >= 0]] += 1
        if len(new) > self._num_free:
            self._grow(len(self) + len(new))
        top = self._num_free
        fresh = self._free[top - len(new) : top].copy()
        self._num_free -= len(new)
        self._column[fresh] = new
        self._counts[fresh] = 1
        self._table.insert(fresh)

    def remove(self, keys: Keys) -> Keys:
        """One holder less for each of *keys*; returns those that have none left."""
        rows = self._table.find(keys)
        rows = rows[rows >= 0]
        self._counts[rows] -= 1
        gone = rows[self._counts[rows] == 0]
        left: Keys = self._column[gone]
        self._table.remove(gone)
        self._free[self._num_free : self._num_free + len(gone)] = gone
        self._num_free += len(gone)
        return left

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
