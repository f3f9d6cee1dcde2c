"""Engines that come and go, and a directory that stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Waiting, kill_after, needs_vllm, play

pytestmark = needs_vllm


@pytest.mark.soak
def test_a_fresh_process_loads_what_another_saved(tmp_path: Path) -> None:
    """Computed once; then loaded by a new process, by one with other blocks, and by one with children."""
    connector = {"disk_path": str(tmp_path / "kv"), "disk_gb": 1}
    cold = play("answer_once", "settle", connector=connector)["answer_once"]
    assert cold["answer"]["cached"] == [0]
    for engine in ({}, {"block_size": 32}, {"processes": True}):
        warm = play("answer_once", connector=connector, **engine)["answer_once"]
        assert warm["answer"]["cached"] == [640]
        assert warm["answer"]["ids"] == cold["answer"]["ids"] == warm["expected"] == cold["expected"]


def test_an_engine_that_is_killed_in_mid_save_leaves_only_sound_blocks(tmp_path: Path) -> None:
    """``kill -9`` while a prompt is half written: the next engine loads the one before it, and computes that one."""
    connector = {"disk_path": str(tmp_path / "kv"), "disk_gb": 1}
    kill_after("WRITING", "killed_while_writing", connector=connector)
    played = play("after_a_kill", "figures", connector=connector)
    written, torn = (played["after_a_kill"][name] for name in ("written", "half written"))
    assert written["answer"]["cached"] == [576]
    assert written["answer"]["ids"] == written["expected"]
    assert torn["answer"]["cached"] == [0]
    assert torn["answer"]["ids"] == torn["expected"]
    assert (played["figures"]["check"], played["figures"]["leases"]) == ([], 0)


def test_a_prefill_engine_hands_over_to_a_decode_engine(tmp_path: Path) -> None:
    """Both run; what the producer saves after the consumer has started is loaded by it, and it saves nothing."""
    connector = {"disk_path": str(tmp_path / "kv"), "disk_gb": 1}
    decode = Waiting("answer_once", "figures", connector=connector)
    try:
        prefill = play("answer_once", "settle", connector=connector, more={"transfer": {"kv_role": "kv_producer"}})
        played = decode.go_on()
    finally:
        decode.close()
    scene = played["answer_once"]
    assert scene["answer"]["cached"] == [640]
    assert scene["answer"]["ids"] == prefill["answer_once"]["answer"]["ids"] == scene["expected"]
    assert "vllm:kvcache_factory_blocks_saved" not in {
        name for name, count in played["figures"]["metrics"].items() if count
    }
