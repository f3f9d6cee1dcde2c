"""The books of GRE about blocks: steps 1 to 4, 8 and 9, as loops over columns.

Columns of the book: uses again, last gap, last use, open spell, class, depth.  The first four outlive the block's stay,
as a ghost.  A spell is named by its number; its slot in the ring is the number modulo the ring's length, and holds
that number for as long as the spell has not been overwritten.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..jit import helper, kernel

AGAIN, GAP, LAST, OPEN, CLASS, DEPTH = range(6)
COLUMNS, GHOST_COLUMNS = 6, 4

LEAVES, RANDOM, SPELLS, REFUSED = range(4)
"""State: leaves, state of the random numbers, spells so far, whether a newcomer was refused."""

SAMPLE = 64

# The loops draw random numbers from a 48-bit congruence (that of drand48), which gives the same numbers in compiled
# code and in Python.  What a leaf is worth changes when it comes into the next age bucket, is used, or the table is
# learned anew: `worth` keeps (index, valid until, epoch of the table), so that most draws read one line of memory.


@helper
def _bucket_of(age: Any) -> Any:
    """Age bucket of *age* seconds: below 2 s the first, then each 1.4 times as long as the one before."""
    return 0 if age < 2.0 else min(1 + int(math.log(age / 2.0) / 0.3364722366212129), 27)


@helper
def _class_of(again: Any, gap: Any, place: Any, hint: Any, output: Any) -> Any:
    """Number of the class of a block that was used *again* times, the last time after *gap* seconds."""
    uses = 0 if again < 1 else 1 if again < 2 else 2 if again < 4 else 3 if again < 9 else 4
    pause = 0 if gap < 0 else 1 if gap < 30 else 2 if gap < 120 else 3 if gap < 600 else 4
    return (((uses * 3 + min(max(place, 0), 2)) * 3 + hint) * 5 + pause) * 7 + output


@helper
def _use(row: Any, known: Any, now: Any, book: Any, ring: Any) -> None:
    """End the spell of *row*, if it has one, and count its use: step 2."""
    slots = len(ring)
    if known:
        spell = int(book[row, 3])
        if spell >= 0 and ring[spell % slots, 4] == spell:
            ring[spell % slots, 1] = _bucket_of(now - ring[spell % slots, 0])
        book[row, 0] += 1
        book[row, 1] = now - book[row, 2]
    else:
        book[row, 0] = 0
        book[row, 1] = -1
    book[row, 2] = now
    book[row, 3] = -1


@helper
def _begin(row: Any, weight: Any, now: Any, book: Any, ring: Any, state: Any) -> None:
    """Begin a spell of *row* in the oldest slot, or give the one that has begun more weight: step 4."""
    slots = len(ring)
    spell = int(book[row, 3])
    if spell >= 0 and ring[spell % slots, 4] == spell:
        ring[spell % slots, 3] += weight
        return
    spell = state[2]
    state[2] = spell + 1
    book[row, 3] = spell
    ring[spell % slots, 0] = now
    ring[spell % slots, 1] = -1
    ring[spell % slots, 2] = book[row, 4]
    ring[spell % slots, 3] = weight
    ring[spell % slots, 4] = spell


@kernel("void(i4[::1], i8, f8, i8, i8, i8, i8, f8[:,::1], f8[:,::1], f8[:,::1], f8[:,::1], i8[::1])")
def touch(
    rows: Any,
    hits: Any,
    now: Any,
    first: Any,
    total: Any,
    hint: Any,
    output: Any,
    past: Any,
    book: Any,
    worth: Any,
    ring: Any,
    state: Any,
) -> None:
    """Enter a use of *rows*, which lie from block *first* on in a chain of *total*: steps 2 to 4.

    The first *hits* were here; *past* has what ghosts tell of the others.
    """
    count = len(rows)
    for i in range(count):
        row = rows[i]
        known = True
        if i >= hits:
            known = past[i - hits, 0] >= 0
            for c in range(4):
                book[row, c] = past[i - hits, c]
        _use(row, known, now, book, ring)
        book[row, 4] = _class_of(book[row, 0], book[row, 1], total - 1 - first - i, hint, output)
        book[row, 5] = first + i
        worth[row, 2] = -1
    weight = total**-0.5
    others = total - 2
    draws = others if others <= 8 else 8
    for d in range(draws + 2):
        w = weight
        if d >= draws:
            at = total - 2 + d - draws
        elif others <= 8:
            at = d
        else:
            state[1] = (state[1] * 0x5DEECE66D + 11) & 0xFFFFFFFFFFFF
            at = ((state[1] >> 16) * others) >> 32
            w = weight * others / 8
        if first <= at < first + count:
            _begin(rows[at - first], w, now, book, ring, state)


@kernel("void(i4[::1], i8, f8[:,::1], f8[:,::1], f8[:,::1])")
def finish(rows: Any, output: Any, book: Any, worth: Any, ring: Any) -> None:
    """Enter how much the request that used *rows* has generated, in their classes and their open spells."""
    slots = len(ring)
    for i in range(len(rows)):
        row = rows[i]
        cls = int(book[row, 4])
        cls = cls - cls % 7 + output
        book[row, 4] = cls
        worth[row, 2] = -1
        spell = int(book[row, 3])
        if spell >= 0 and ring[spell % slots, 4] == spell:
            ring[spell % slots, 2] = cls


@kernel("void(f8, i8, i8, i8, i8, f8[:,::1], f8[:,::1], f8[::1])")
def bid(now: Any, first: Any, total: Any, hint: Any, output: Any, past: Any, table: Any, out: Any) -> None:
    """What new blocks are worth: the index of the class that they would have, at age 0."""
    for i in range(len(past)):
        known = past[i, 0] >= 0
        again = past[i, 0] + 1 if known else 0.0
        gap = now - past[i, 2] if known else -1.0
        out[i] = table[_class_of(again, gap, total - 1 - first - i, hint, output), 0]


def _leave_numpy(
    now: float,
    want: int,
    bids: Any,
    parent: Any,
    children: Any,
    pins: Any,
    states: Any,
    table: Any,
    epoch: Any,
    edges: Any,
    book: Any,
    worth: Any,
    leaves: Any,
    position: Any,
    state: Any,
    out: Any,
) -> int:
    state[REFUSED] = 0
    for found in range(want):
        count = int(state[LEAVES])
        if not count:
            return found
        rows = leaves[:count]
        if count > SAMPLE:
            draws = np.empty(SAMPLE, np.int64)
            seed = int(state[RANDOM])
            for i in range(SAMPLE):
                seed = (seed * 0x5DEECE66D + 11) & 0xFFFFFFFFFFFF
                draws[i] = ((seed >> 16) * count) >> 32
            state[RANDOM] = seed
            rows = rows[draws]
        age = np.maximum(now - book[rows, LAST], 0.0)
        bucket = np.where(age < 2.0, 0, 1 + np.log(np.maximum(age, 2.0) / 2.0) / 0.3364722366212129).astype(np.int64)
        values = table[book[rows, CLASS].astype(np.int64), np.minimum(bucket, 27)]
        at = int(np.lexsort((-book[rows, DEPTH], book[rows, LAST], values))[0])
        if found < len(bids) and bids[found] < values[at]:
            state[REFUSED] = 1
            return found
        row = int(rows[at])
        state[LEAVES] = count - 1
        moved = leaves[count - 1]
        leaves[position[row]] = moved
        position[moved] = position[row]
        position[row] = -1
        out[found] = row
        if len(parent) and parent[row] >= 0:
            above = parent[row]
            children[above] -= 1
            if states[above] == 2 and not children[above] and not pins[above] and position[above] < 0:
                leaves[state[LEAVES]], position[above] = above, state[LEAVES]
                state[LEAVES] += 1
    return want


@helper
def _worst(now: Any, table: Any, epoch: Any, edges: Any, book: Any, worth: Any, leaves: Any, state: Any) -> Any:
    """The least valuable of 64 random leaves, of equals the least recently used, then the deepest."""
    count = state[0]
    best = -1
    for s in range(min(count, 64)):
        at = s
        if count > 64:
            state[1] = (state[1] * 0x5DEECE66D + 11) & 0xFFFFFFFFFFFF
            at = ((state[1] >> 16) * count) >> 32
        row = leaves[at]
        if worth[row, 2] != epoch or now >= worth[row, 1]:
            bucket = _bucket_of(now - book[row, 2])
            worth[row, 0] = table[int(book[row, 4]), bucket]
            worth[row, 1] = book[row, 2] + edges[bucket]
            worth[row, 2] = epoch
        if best < 0 or worth[row, 0] < worth[best, 0]:
            best = row
        elif worth[row, 0] == worth[best, 0]:
            earlier = book[row, 2] < book[best, 2]
            if earlier or (book[row, 2] == book[best, 2] and book[row, 5] > book[best, 5]):
                best = row
    return best


@kernel(
    "i8(f8, i8, f8[::1], i4[::1], i4[::1], i4[::1], u1[::1], "
    "f8[:,::1], f8, f8[::1], f8[:,::1], f8[:,::1], i4[::1], i4[::1], i8[::1], i4[::1])",
    fallback=_leave_numpy,
)
def leave(
    now: Any,
    want: Any,
    bids: Any,
    parent: Any,
    children: Any,
    pins: Any,
    states: Any,
    table: Any,
    epoch: Any,
    edges: Any,
    book: Any,
    worth: Any,
    leaves: Any,
    position: Any,
    state: Any,
    out: Any,
) -> int:
    """Let the least valuable of 64 random leaves leave, *want* times, unless a newcomer is worth less: steps 8 and 9.

    Without a tree (no columns), a victim's parent does not become a leaf.
    """
    state[3] = 0
    for found in range(want):
        if state[0] == 0:
            return found
        row = _worst(now, table, epoch, edges, book, worth, leaves, state)
        if found < len(bids) and bids[found] < worth[row, 0]:
            state[3] = 1
            return found
        last = state[0] - 1
        state[0] = last
        leaves[position[row]] = leaves[last]
        position[leaves[last]] = position[row]
        position[row] = -1
        out[found] = row
        if len(parent) == 0 or parent[row] < 0:
            continue
        above = parent[row]
        children[above] -= 1
        if states[above] == 2 and children[above] == 0 and pins[above] == 0 and position[above] < 0:
            leaves[last] = above
            position[above] = last
            state[0] = last + 1
    return int(want)
