"""The clairvoyant optimum: what a cache could serve that knew the future, under the same rules.

Belady's rule on a tree: of the leaves that the running request does not use, the one whose next use is farthest leaves
first, the deepest of equals; a new block whose own next use is not nearer is not stored, nor what hangs on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..jit import helper, kernel
from .workload import Nodes, Workload

_DEPTH_BITS = 24
"""A rank is the number of the next request, and below it the depth."""


@helper
def _settle(rank: Any, heap: Any, place: Any, hole: Any, size: Any) -> None:
    """Let what is at *hole* rise or sink to where it belongs."""
    while hole > 0 and rank[heap[(hole - 1) >> 1]] < rank[heap[hole]]:
        up = (hole - 1) >> 1
        heap[hole], heap[up] = heap[up], heap[hole]
        place[heap[hole]] = hole
        hole = up
    while 2 * hole + 1 < size:
        down = 2 * hole + 1
        if down + 1 < size and rank[heap[down + 1]] > rank[heap[down]]:
            down += 1
        if rank[heap[down]] <= rank[heap[hole]]:
            break
        heap[hole], heap[down] = heap[down], heap[hole]
        place[heap[hole]] = hole
        hole = down
    place[heap[hole]] = hole


@helper
def _take_out(rank: Any, heap: Any, place: Any, node: Any, size: Any) -> Any:
    """Take *node* out of the heap, if it is in it; returns the heap's size."""
    hole = place[node]
    if hole < 0:
        return size
    place[node] = -1
    size -= 1
    if hole < size:
        heap[hole] = heap[size]
        _settle(rank, heap, place, hole, size)
    return size


@helper
def _put_in(rank: Any, heap: Any, place: Any, node: Any, size: Any) -> Any:
    """Put *node* into the heap; returns the heap's size."""
    heap[size] = node
    _settle(rank, heap, place, size, size + 1)
    return size + 1


@kernel("i8(i4[::1], i8[::1], i4[::1], i4[::1], i4[::1], i8, i8[::1], i4[::1], i4[::1], i4[::1], b1[::1])", yields=True)
def _optimum(
    nodes: Any,
    offsets: Any,
    uses: Any,
    parents: Any,
    depths: Any,
    capacity: Any,
    rank: Any,
    heap: Any,
    place: Any,
    children: Any,
    cached: Any,
) -> int:
    """Hits of the optimum.  *heap* holds the leaves, the highest rank first; *place* is where in it each is, or -1."""
    size = used = hits = 0
    for request in range(len(offsets) - 1):
        at, end, tip = offsets[request], offsets[request + 1], -1
        while at < end and cached[nodes[at]]:
            tip = nodes[at]
            rank[tip] = (uses[at] << _DEPTH_BITS) | depths[tip]
            at += 1
        hits += at - offsets[request]
        if tip >= 0:  # what the request uses cannot leave
            size = _take_out(rank, heap, place, tip, size)
        while at < end:
            if used >= capacity:
                if size == 0 or uses[at] >= rank[heap[0]] >> _DEPTH_BITS:
                    break
                victim = heap[0]
                size = _take_out(rank, heap, place, victim, size)
                cached[victim] = False
                used -= 1
                above = parents[victim]
                if above >= 0:
                    children[above] -= 1
                    if children[above] == 0 and above != tip:
                        size = _put_in(rank, heap, place, above, size)
            node = nodes[at]
            cached[node] = True
            used += 1
            rank[node] = (uses[at] << _DEPTH_BITS) | depths[node]
            if tip >= 0:
                children[tip] += 1
            tip = node
            at += 1
        if tip >= 0 and children[tip] == 0:
            size = _put_in(rank, heap, place, tip, size)
    return hits


def optimum(workload: Workload, capacity: int, uses: Nodes | None = None) -> float:
    """Share of all block accesses that the clairvoyant optimum serves with *capacity* blocks.

    *uses* is what :meth:`Workload.next_uses` gave, for several capacities.
    """
    if capacity >= workload.unique:
        return 1 - workload.unique / workload.blocks
    uses = workload.next_uses() if uses is None else uses
    unique, book = workload.unique, workload.book
    hits = _optimum(
        workload.nodes,
        workload.offsets,
        uses,
        book.parents,
        book.depths,
        capacity,
        np.zeros(unique, np.int64),
        np.zeros(unique + 1, np.int32),
        np.full(unique, -1, np.int32),
        np.zeros(unique, np.int32),
        np.zeros(unique, np.bool_),
    )
    return int(hits) / workload.blocks
