"""Engines that come and go, and a directory that stays."""

from __future__ import annotations

from pathlib import Path

from engines import kill_after, needs_vllm, play

pytestmark = needs_vllm


def test_a_fresh_process_loads_what_another_saved(tmp_path: Path) -> None:
    """Computed once; then loaded by a new process, by one with other blocks, and by one with children."""
    connector = {"disk_path": str(tmp_path / "kv"), "disk_gb": 1}
    cold = play("answer_once", "settle", connector=connector)["answer_once"]
    assert cold["answer"]["cached"] == [0]
    for engine in ({}, {"block_size": 32}, {"processes": True}):
        warm = play("answer_once", connector=connector, **engine)["answer_once"]
        assert warm["answer"]["cached"] == [640]
        assert warm["answer"]["ids"] == cold["answer"]["ids"] == warm["expected"] == cold["expected"]


def test_an_engine_that_is_killed_leaves_only_sound_blocks(tmp_path: Path) -> None:
    """Killed in the middle of saving; the next engine answers as expected, and may find what was written."""
    connector = {"disk_path": str(tmp_path / "kv"), "disk_gb": 1}
    kill_after("SAVED 2", "save_until_killed", connector=connector)
    played = play("after_a_kill", "figures", connector=connector)
    scene = played["after_a_kill"]
    assert scene["answer"]["ids"] == scene["expected"]
    assert scene["answer"]["cached"][0] >= 64
    assert (played["figures"]["check"], played["figures"]["leases"]) == ([], 0)
