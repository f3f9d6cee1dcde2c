"""The key table against a dict, and counts of holders against a Counter."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.engine import table
from kvcache_factory.engine.table import KeyCounts, Keys, KeyTable

CROWDED = [0, 8, 16, 1, 9, 7, 15, 2**64 - 1, 2**63, 2**63 - 8]
"""First words of which most have the same home in a small table, and some are negative as signed numbers."""

keys = st.tuples(st.sampled_from(CROWDED), st.integers(0, 1))


def array(rows: list[tuple[int, int]]) -> Keys:
    """Keys [n, 2]."""
    return np.array(rows, np.uint64).reshape(-1, 2)


@given(st.lists(keys, max_size=60))
def test_the_table_is_a_dict_through_any_order_of_insertions_and_deletions(touched: list[tuple[int, int]]) -> None:
    """Keys with one home push each other on; deleting shifts back, and nobody becomes unreachable."""
    column = np.zeros((20, 2), np.uint64)
    held, model, free = KeyTable(column), dict[tuple[int, int], int](), list(range(20))
    universe = sorted({(w, i) for w in CROWDED for i in (0, 1)})
    for key in touched:
        if key in model:
            row = model.pop(key)
            held.remove(np.array([row], np.int32))
            free.append(row)
        else:
            row = model[key] = free.pop(0)
            column[row] = key
            assert held.insert(np.array([row], np.int32)) == 1
        assert held.find(array(universe)).tolist() == [model.get(k, -1) for k in universe]


@given(st.lists(keys, max_size=20), st.lists(keys, unique=True, min_size=1, max_size=12))
def test_a_leading_search_stops_at_the_first_gap(asked: list[tuple[int, int]], there: list[tuple[int, int]]) -> None:
    """With *leading* everything from the first absent key on is -1, by kernel and by numpy alike."""
    column = array(there)
    held = KeyTable(column)
    held.insert(np.arange(len(there), dtype=np.int32))
    rows = [there.index(k) if k in there else -1 for k in asked]
    gap = rows.index(-1) if -1 in rows else len(rows)
    assert held.find(array(asked), leading=True).tolist()[: gap + 1] == rows[: gap + 1]
    out = np.empty(len(asked), np.int32)
    table._find_numpy(held._table, column.view(np.int64), array(asked).view(np.int64), False, out)
    assert out.tolist() == rows


def test_a_key_that_is_taken_ends_an_insertion() -> None:
    """The first holder of a key keeps it; those behind the second are not findable and not half inserted."""
    column = array([(1, 1), (2, 2), (1, 1), (3, 3)])
    held = KeyTable(column)
    assert held.insert(np.arange(4, dtype=np.int32)) == 2
    assert held.find(column).tolist() == [0, 1, 0, -1]


def test_removing_what_is_not_there_ends() -> None:
    """A row that has left already is passed over; the others go and stay findable."""
    column = array([(0, 0), (8, 0), (16, 0)])
    held = KeyTable(column)
    held.insert(np.array([0, 2], np.int32))
    held.remove(np.array([1, 0], np.int32))
    assert held.find(column).tolist() == [-1, -1, 2]


@given(st.integers(0, 40), st.integers(0, 40))
def test_a_gallop_finds_the_end_of_what_is_ready(length: int, ready: int) -> None:
    """The length of the leading run, for runs of any length and chains of any length."""
    column = np.stack([np.arange(40), np.arange(40)], axis=1).astype(np.uint64)
    held = KeyTable(column)
    held.insert(np.arange(40, dtype=np.int32))
    state = np.where(np.arange(40) < ready, 2, 1).astype(np.uint8)
    assert held.leading(column[:length], state, 2) == min(length, ready)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 60), unique=True, max_size=30)), max_size=12))
def test_holders_are_counted_like_a_counter(steps: list[tuple[bool, list[int]]]) -> None:
    """Keys come with their first holder, go with their last, and the columns grow as needed."""
    counts, model = KeyCounts(), Counter[int]()
    for add, numbers in steps:
        held = array([(n, n) for n in numbers])
        if add:
            counts.add(held)
            model.update(numbers)
        else:
            gone = counts.remove(held)
            model.subtract([n for n in numbers if model[n]])
            assert {int(n) for n in gone[:, 0]} == {n for n in numbers if n in model and not model[n]}
            model = +model
        assert len(counts) == len(model)
        assert {int(n) for n in counts.keys[:, 0]} == set(model)


def test_a_key_twice_in_one_chain_is_one_key_to_its_holder() -> None:
    """Colliding blocks of one chain must not be held twice: removing them would look for a second row for ever."""
    counts, twice = KeyCounts(), array([(1, 1), (2, 2), (1, 1)])
    counts.add(counts.missing(twice))
    assert len(counts) == 2
    assert len(counts.remove(counts.keys)) == 2
    assert len(counts) == 0
