"""Tensor-parallel ranks act on the least that any of them has, with one collective for each match."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache_factory.block.plan import Match, Segment

PROGRAM = Path(__file__).with_name("rank_program.py")


def run_ranks(ranks: int, meeting: Path) -> list[dict[str, Any]]:
    """What each rank printed."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(ranks), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    answers = []
    try:
        for process in running:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err[-3000:]
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in running:
            process.kill()
    return answers


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_act_on_the_minimum(ranks: int, tmp_path: Path) -> None:
    """Also when one has nothing, and when one's manager is closed; nobody asks more often than the others."""
    answers = run_ranks(ranks, tmp_path / "meeting")
    fewer = 8 - (ranks - 1)
    expected = [[0, []], [8, [0] * 8], [fewer, [0] * fewer], [0, []], [0, []]]
    assert [answer["seen"] for answer in answers] == [expected] * ranks
    assert [answer["asked"] for answer in answers] == [5] * ranks


def test_a_match_can_be_shortened() -> None:
    """Segments are cut where the run ends; the lease stays."""
    rows = np.arange(3, dtype=np.int32)
    match = Match("r", 6, 24, (Segment(0, 0, rows), Segment(1, 3, rows)), "", 9)
    shorter = match.shortened(4, "why")
    assert (shorter.blocks, shorter.tokens, shorter.reason, shorter.lease) == (4, 16, "why", 9)
    assert [(s.tier, s.first, s.rows.tolist()) for s in shorter.segments] == [(0, 0, [0, 1, 2]), (1, 3, [0])]
    assert match.shortened(0, "why").segments == ()
    assert match.shortened(6, "why") is match
