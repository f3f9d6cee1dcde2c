"""The benchmark of counting compares the same gets, and leaves the ledger as it was."""

from kvcache_factory.bench import l1, ledger
from kvcache_factory.engine.ledger import Event


def test_a_quick_run_gives_a_row_for_each_mode() -> None:
    """Every row is flat and names what it measured."""
    rows = ledger.run_ledger(quick=True)
    assert [row["mode"] for row in rows] == ["counts", "durations"]
    assert all(row["get_us"] > 0 and isinstance(row["cost"], float) for row in rows)


def test_modes_count_what_they_say_and_end_with_the_context() -> None:
    """Off counts nothing, counts measures nothing, and afterwards everything is as before."""
    bed = l1.Bed(l1.SMOLLM2, 8, huge_pages=True, enable_metrics=True)
    bed.fill(4)
    counted = bed.manager.ledger
    seen = {}
    for mode in ledger.MODES:
        hits, loads = counted.total(Event.HIT, "cpu").blocks, counted.histograms().get(("cpu", "load"))
        with ledger.counting(bed, mode):
            bed.gets(4, 1)()
        after = counted.histograms().get(("cpu", "load"))
        calls = (after.calls if after else 0) - (loads.calls if loads else 0)
        seen[mode] = (counted.total(Event.HIT, "cpu").blocks - hits, calls)
    assert seen == {"off": (0, 0), "counts": (4, 0), "durations": (4, 1)}
    assert counted.timed
    assert ledger._nothing not in [counter.add for counter in ledger.COUNTERS]
    bed.close()
