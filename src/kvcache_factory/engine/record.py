"""Records of rows: written when blocks are reserved, compared when they are found; a key never decides alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..jit import kernel
from .table import Keys, Rows
from .tree import PENDING, READY, Tree, as_slice

AGREES, DIFFERS, NOT_READY, NOT_EXACT = 0, 1, 2, 3
_VERDICTS = 4

_I8 = "Array(i8, 2, 'C', True)"
_U4 = "Array(u4, 2, 'C', True)"


def _compare_numpy(
    parent: Any,
    state: Any,
    fidelity: Any,
    extras: Any,
    tokens: Any,
    rows: Any,
    above: int,
    ready: bool,
    worst: int,
    chain_extras: Any,
    chain_tokens: Any,
) -> int:
    span = as_slice(rows)
    parents = np.concatenate((np.array([above], np.int32), rows[:-1]))
    verdict = np.where(fidelity[span] > worst, NOT_EXACT, AGREES)
    if ready:
        verdict[state[span] != READY] = NOT_READY
    wrong = (parent[span] != parents) | (extras[span] != chain_extras).any(axis=1)
    if tokens.shape[1]:
        tokens_differ = tokens[span] != chain_tokens
        if tokens_differ.any():
            wrong |= tokens_differ.any(axis=1)
    verdict[wrong] = DIFFERS
    stops = verdict != AGREES
    if not stops.any():
        return len(rows) * _VERDICTS
    at = int(stops.argmax())
    return at * _VERDICTS + int(verdict[at])


@kernel(
    f"i8(i4[::1], u1[::1], u1[::1], i8[:,::1], u4[:,::1], i4[::1], i8, b1, i8, {_I8}, {_U4})",
    fallback=_compare_numpy,
)
def _compare(
    parent: Any,
    state: Any,
    fidelity: Any,
    extras: Any,
    tokens: Any,
    rows: Any,
    above: Any,
    ready: Any,
    worst: Any,
    chain_extras: Any,
    chain_tokens: Any,
) -> int:
    width = tokens.shape[1]
    for i in range(len(rows)):
        row = rows[i]
        if parent[row] != above or extras[row, 0] != chain_extras[i, 0] or extras[row, 1] != chain_extras[i, 1]:
            return i * _VERDICTS + DIFFERS
        for t in range(width):
            if tokens[row, t] != chain_tokens[i, t]:
                return i * _VERDICTS + DIFFERS
        if ready and state[row] != READY:
            return i * _VERDICTS + NOT_READY
        if fidelity[row] > worst:
            return i * _VERDICTS + NOT_EXACT
        above = row
    return len(rows) * _VERDICTS


def _write_numpy(
    rows: Any,
    parent: Any,
    depth: Any,
    children: Any,
    state: Any,
    busy: Any,
    hits: Any,
    wipe: Any,
    checksum: Any,
    extras: Any,
    tokens: Any,
    tip: int,
    start: int,
    chain_extras: Any,
    chain_tokens: Any,
) -> None:
    span = as_slice(rows)
    parent[rows[1:]] = rows[:-1]
    parent[rows[0]] = tip
    depth[span] = np.arange(start, start + len(rows))
    children[span] = 1
    children[rows[-1]] = 0
    state[span] = PENDING
    busy[span] = True
    hits[span] = 0
    wipe[span] = False
    checksum[span] = 0
    extras[span] = chain_extras
    if tokens.shape[1]:
        tokens[span] = chain_tokens


@kernel(
    "void(i4[::1], i4[::1], i4[::1], i4[::1], u1[::1], b1[::1], u4[::1], b1[::1], u8[::1], i8[:,::1], u4[:,::1], "
    f"i8, i8, {_I8}, {_U4})",
    fallback=_write_numpy,
)
def _write(
    rows: Any,
    parent: Any,
    depth: Any,
    children: Any,
    state: Any,
    busy: Any,
    hits: Any,
    wipe: Any,
    checksum: Any,
    extras: Any,
    tokens: Any,
    tip: Any,
    start: Any,
    chain_extras: Any,
    chain_tokens: Any,
) -> None:
    above = tip
    width = tokens.shape[1]
    for i in range(len(rows)):
        row = rows[i]
        parent[row] = above
        depth[row] = start + i
        children[row] = 1
        state[row] = PENDING
        busy[row] = True
        hits[row] = 0
        wipe[row] = False
        checksum[row] = 0
        extras[row, 0] = chain_extras[i, 0]
        extras[row, 1] = chain_extras[i, 1]
        for t in range(width):
            tokens[row, t] = chain_tokens[i, t]
        above = row
    children[rows[len(rows) - 1]] = 0


def _publish_numpy(rows: Any, state: Any, busy: Any) -> bool:
    busy[rows] = False
    if (state[rows] != PENDING).any():
        return False
    state[rows] = READY
    return True


@kernel("b1(i4[::1], u1[::1], b1[::1])", fallback=_publish_numpy)
def _publish(rows: Any, state: Any, busy: Any) -> bool:
    whole = True
    for i in range(len(rows)):
        busy[rows[i]] = False
        if state[rows[i]] != PENDING:
            whole = False
    if whole:
        for i in range(len(rows)):
            state[rows[i]] = READY
    return whole


def _unchanged_numpy(rows: Any, generation: Any, known: Any) -> int:
    changed = generation[as_slice(rows)] != known[: len(rows)]
    return int(changed.argmax()) if changed.any() else len(rows)


@kernel("i8(i4[::1], u4[::1], u4[::1])", fallback=_unchanged_numpy)
def unchanged(rows: Any, generation: Any, known: Any) -> int:
    """How many leading *rows* are still of the generation that is *known* of them."""
    for i in range(len(rows)):
        if generation[rows[i]] != known[i]:
            return i
    return len(rows)


def write(tree: Tree, rows: Rows, tip: int, start: int, extras: Keys, tokens: Any) -> None:
    """Fill the columns of reserved *rows*, which hold the blocks from number *start* on of a chain below *tip*."""
    counts = (tree.parent, tree.depth, tree.children, tree.state, tree.busy, tree.hits, tree.wipe, tree.checksum)
    _write(rows, *counts, tree.extras_words, tree.tokens, tip, start, extras.view(np.int64), tokens)


def publish(tree: Tree, rows: Rows) -> bool:
    """End the work on *rows* and make them visible, unless some were dropped meanwhile: then False, and none is."""
    return bool(_publish(rows, tree.state, tree.busy))


def compare(tree: Tree, rows: Rows, above: int, ready: bool, worst: int, extras: Keys, tokens: Any) -> tuple[int, int]:
    """How many leading *rows* are what a chain expects, and why the next is not.

    The first row must have *above* as its parent, each other the row before it; all must hold *extras* [n, 2] and
    *tokens* [n, block_tokens], be visible if *ready*, and be at most as lossy as *worst*.
    """
    if not len(rows):
        return 0, AGREES
    columns = (tree.parent, tree.state, tree.fidelity, tree.extras_words, tree.tokens)
    # An enum would make the compiled kernel look its type up anew, which takes longer than the comparison.
    run: int = _compare(*columns, rows, above, ready, int(worst), extras.view(np.int64), tokens)
    return divmod(run, _VERDICTS)
