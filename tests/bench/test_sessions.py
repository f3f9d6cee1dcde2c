"""The benchmark of many threads: the same turns whatever their number, and conversations that go on."""

import pytest

from kvcache_factory.bench import sessions


def test_a_run_has_a_row_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are flat, and one thread is its own measure.  The run itself checks what the manager holds."""
    monkeypatch.setattr(sessions, "SESSIONS", 32)
    rows = sessions.run_sessions(quick=True)
    assert [row["threads"] for row in rows] == list(sessions.THREADS)
    assert rows[0]["ratio"] == 1.0
    assert all(row["turns_per_s"] > 0 and row["cpu_ms"] > 0 for row in rows)
