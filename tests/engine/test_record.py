"""Comparing and writing records: the compiled pass, the loop itself and numpy agree on every verdict."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.engine import record
from kvcache_factory.engine.tree import PENDING, READY

ROWS, TOKENS = 6, 3
small = st.integers(0, 1)


def three_ways(kernel: Any, *arguments: Any) -> list[Any]:
    """Results of the kernel as it is called here, of its fallback, and of its loop over memoryviews."""
    plain = [memoryview(a) if isinstance(a, np.ndarray) else a for a in arguments]
    return [kernel(*arguments), kernel.fallback(*arguments), kernel.loop(*plain)]


@given(
    st.permutations(range(ROWS)),
    st.integers(1, ROWS),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from(["", "parent", "state", "fidelity", "extras", "tokens"]),
    st.integers(0, ROWS - 1),
)
def test_every_way_of_comparing_finds_the_same_first_difference(
    order: list[int], length: int, ready: bool, worst: int, spoiled: str, at: int
) -> None:
    """One thing is wrong in one row, or nothing: the number of that row and the reason, or the whole run."""
    rows = np.array(order[:length], np.int32)
    state, fidelity = np.full(ROWS, READY, np.uint8), np.zeros(ROWS, np.uint8)
    extras = np.arange(2 * ROWS, dtype=np.int64).reshape(ROWS, 2)
    tokens = np.arange(TOKENS * ROWS, dtype=np.uint32).reshape(ROWS, TOKENS)
    parent = np.full(ROWS, -1, np.int32)
    parent[rows] = [-2, *rows[:-1]]
    expected = extras[rows].copy(), tokens[rows].copy()
    row = order[at]
    if spoiled == "parent":
        parent[row] += 1
    elif spoiled == "state":
        state[row] = PENDING
    elif spoiled == "fidelity":
        fidelity[row] = 1
    elif spoiled == "extras":
        extras[row, at % 2] += 1
    elif spoiled == "tokens":
        tokens[row, at % TOKENS] += 1
    found = three_ways(record._compare, parent, state, fidelity, extras, tokens, rows, -2, ready, worst, *expected)
    verdict = {"state": record.NOT_READY, "fidelity": record.NOT_EXACT}.get(spoiled, record.DIFFERS)
    harmless = not spoiled or (spoiled == "state" and not ready) or (spoiled == "fidelity" and worst > 0)
    stop, reason = (length, record.AGREES) if harmless or at >= length else (at, verdict)
    assert [divmod(int(one), 4) for one in found] == [(stop, reason)] * 3


@given(st.permutations(range(ROWS)), st.integers(1, ROWS), st.integers(-2, 3), st.integers(0, 9))
def test_every_way_of_writing_fills_the_same_columns(order: list[int], length: int, tip: int, start: int) -> None:
    """Only the rows that were reserved change, and they change alike."""
    rows = np.array(order[:length], np.int32)
    extras = np.arange(2 * length, dtype=np.int64).reshape(length, 2)
    tokens = np.arange(TOKENS * length, dtype=np.uint32).reshape(length, TOKENS)
    results = []
    for way in (record._write, record._write.fallback, record._write.loop):
        columns = [
            np.full(ROWS, 7, kind)
            for kind in (np.int32, np.int32, np.int32, np.uint8, np.bool_, np.uint32, np.bool_, np.uint64)
        ]
        columns += [np.full((ROWS, 2), 7, np.int64), np.full((ROWS, TOKENS), 7, np.uint32)]
        given_arrays: list[Any] = [rows, *columns]
        if way is record._write.loop:
            given_arrays = [memoryview(a) for a in given_arrays]
        assert way is not None
        way(*given_arrays, tip, start, extras, tokens)
        results.append(columns)
    for column, other, third in zip(*results, strict=True):
        assert np.array_equal(column, other)
        assert np.array_equal(column, third)
    assert results[0][0][rows].tolist() == [tip, *rows[:-1].tolist()]
    assert (np.delete(results[0][3], rows) == 7).all()


@given(st.lists(st.sampled_from([PENDING, READY, 3]), min_size=1, max_size=ROWS))
def test_blocks_are_published_all_or_none(states: list[int]) -> None:
    """If one was dropped meanwhile, none is shown by the fast way; all are let go of by their operation."""
    rows = np.arange(len(states), dtype=np.int32)
    for way in (record._publish, record._publish.fallback, record._publish.loop):
        assert way is not None
        state, busy = np.array(states, np.uint8), np.ones(len(states), np.bool_)
        whole = way(rows, state, busy)
        assert bool(whole) == (set(states) == {PENDING})
        assert not busy.any()
        assert state.tolist() == ([READY] * len(states) if whole else states)
