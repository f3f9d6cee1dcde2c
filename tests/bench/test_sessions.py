"""The benchmark of many threads: the same turns whatever their number, and conversations that go on."""

import pytest

from kvcache_factory.bench import sessions


def test_a_run_has_a_row_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For both sizes of blocks; one thread is its own measure.  The run itself checks what the manager holds."""
    monkeypatch.setattr(sessions, "SESSIONS", 32)
    rows = sessions.run_sessions(quick=True)
    sizes = [spec.payload_bytes for spec in sessions.SPECS]
    assert [(row["block_bytes"], row["threads"]) for row in rows] == [(s, t) for s in sizes for t in sessions.THREADS]
    assert all(row["ratio"] == 1.0 for row in rows if row["threads"] == 1)
    assert all(row["turns_per_s"] > 0 and row["cpu_ms"] > 0 for row in rows)
