"""Log records: fields that machines read, at a rate that people bear, and nothing at import."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from kvcache_factory.observe.log import LimitedLog, recent_warnings
from kvcache_factory.testing import Opener

A = list(range(16))


def test_one_line_for_each_subject_and_minute_with_what_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The next line says how many there were; subjects do not wait for each other."""
    now = [0.0]
    log = LimitedLog("rate", clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, "kvcache_factory"):
        for _ in range(5):
            log.warning("disk", "it is slow", tier="disk")
        log.warning("cpu", "it is full")
        now[0] = 61.0
        log.warning("disk", "it is slow")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "manager 'rate': it is slow",
        "manager 'rate': it is full",
        "manager 'rate': it is slow (4 more like this were not logged)",
    ]
    first = vars(caplog.records[0])
    assert (first["kv_manager"], first["kv_event"], first["kv_tier"], first["kv_left_out"]) == (
        "rate",
        "disk",
        "disk",
        0,
    )
    assert [row["text"] for row in recent_warnings("rate")] == ["it is slow", "it is full", "it is slow"]
    assert recent_warnings("another") == []


def test_a_failure_is_a_record_with_fields_and_a_recent_warning(
    open_cache: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reads the state sees what the log says."""
    cache = open_cache(4, name="with fields")
    with caplog.at_level(logging.WARNING, "kvcache_factory"):
        cache.manager._context.failed("load", ValueError("injected"))
    (record,) = caplog.records
    assert (vars(record)["kv_verb"], vars(record)["kv_error"]) == ("load", "ValueError")
    assert "load failed" in cache.manager.state()["warnings"][-1]["text"]


def test_sessions_are_logged_with_what_they_held_and_freed(
    open_cache: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Opened and closed; bytes of all tiers, blocks that others reference not among those freed."""
    cache = open_cache(16, 16)
    with caplog.at_level(logging.INFO, "kvcache_factory"):
        for name in ("one", "two"):
            cache.manager.create_session(name)
        cache.save(A, session="one")
        cache.save(A[:8], session="two")
        cache.manager.wait()
        cache.manager.destroy_session("one")
        cache.manager.wait()
    said = [(vars(record)["kv_event"], vars(record)["kv_session"]) for record in caplog.records]
    assert said == [("session_opened", "one"), ("session_opened", "two"), ("session_closed", "one")]
    closed = vars(caplog.records[-1])
    sizes = [tier["block_bytes"] for tier in cache.manager.state()["tiers"]]
    assert closed["kv_held_bytes"] == 4 * sum(sizes)
    assert closed["kv_freed_bytes"] == 2 * sum(sizes)
    assert closed["kv_freed_blocks"] == 4


def test_importing_and_describing_log_nothing_and_configure_nothing() -> None:
    """The log belongs to the program."""
    code = (
        "import logging; from kvcache_factory import CacheManager; CacheManager(enable_metrics=True).close(); "
        "root, ours = logging.getLogger(), logging.getLogger('kvcache_factory'); "
        "assert not root.handlers and not ours.handlers and ours.level == logging.NOTSET"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
