"""The L1 benchmark runs over every path, gives rows of the promised shape, and refuses to time lost blocks."""

import pytest

from kvcache_factory.bench import l1, measure
from kvcache_factory.errors import StoreError


def test_a_quick_run_gives_a_row_for_each_op_path_and_block_size() -> None:
    """Every row is flat, positive, and names what it measured; progress ends at the end."""
    seen: list[tuple[float, float]] = []
    rows = l1.run_l1(progress=lambda done, total, text="": seen.append((done, total)), quick=True)
    paths = {row["path"] for row in rows}
    assert "numpy" in paths
    assert {(row["op"], row["block_bytes"], row["block_tokens"]) for row in rows} == {
        (op, spec.payload_bytes, spec.block_tokens) for op in ("put", "get") for spec in l1.MODELS
    }
    assert len(rows) == 2 * len(paths) * len(l1.MODELS)
    assert all(row[key] > 0 for row in rows for key in ("batch", "ratio", "overhead_us", "gb_s", "memcpy_gb_s"))
    assert seen[-1] == (len(l1.MODELS), len(l1.MODELS))


def test_blocks_that_are_lost_end_the_measurement() -> None:
    """A get that finds less than was put would look fast; it is an error instead."""
    bed = l1.Bed(l1.SMOLLM2, 8, huge_pages=True)
    bed.fill(4)
    work = bed.gets(4, 1)
    for chain in bed.chains:
        bed.space.drop(chain)
    with pytest.raises(StoreError, match="lost blocks"):
        work()
    bed.close()


def test_candidates_take_turns_and_the_first_round_does_not_count() -> None:
    """Preparation is not timed, the order rotates, and each candidate has one time a round."""
    order: list[str] = []

    def candidate(name: str) -> measure.Preparation:
        return lambda: lambda: order.append(name)

    times = measure.round_robin({name: candidate(name) for name in "abc"}, 2)
    assert "".join(order) == "abcbcacab"
    assert {name: len(t) for name, t in times.items()} == {"a": 2, "b": 2, "c": 2}
    assert measure.median_ratio([2.0, 4.0, 9.0], [1.0, 1.0, 1.0]) == 4.0
