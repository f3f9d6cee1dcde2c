"""``bench timing`` runs and has a row for each operation and size."""

from __future__ import annotations

from kvcache_factory.bench.timing import MODES, OPERATIONS, SIZES, Subject, run_timing


def test_rows_have_three_times_and_two_shares() -> None:
    """Off, time and stages in microseconds; nothing is asserted about how they compare."""
    rows = run_timing(quick=True)
    assert [(row["op"], row["blocks"]) for row in rows] == [(op, n) for n in SIZES for op in OPERATIONS]
    for row in rows:
        assert all(row[f"{mode}_us"] > 0 for mode in MODES)
        assert {"time_share", "stages_share"} < set(row)


def test_the_modes_measure_what_they_say() -> None:
    """Nothing, operations, operations and stages."""
    seen = {}
    for mode, options in MODES.items():
        subject = Subject(1, options)
        subject.request()()
        subject.save()()
        operations = {row["operation"] for row in subject.manager.state()["durations"]}
        seen[mode] = ("load" in operations, "load_copy" in operations)
        subject.manager.close()
    assert seen == {"off": (False, False), "time": (True, False), "stages": (True, True)}
