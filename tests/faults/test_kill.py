"""kill -9 at any moment of writing, slot reuse included, two processes at once: who comes next reads right bytes."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.faults.harness import used_bytes
from tests.faults.worker import Child, children, read_all, work

CONVERSATIONS, BLOCKS = 60, 10
DISK_MB = 3
OPTIONS = {"disk_mb": DISK_MB, "dram": 24}


def expect_all_is_well(said: Any) -> int:
    """The last words of a process that found nothing wrong; returns how much it did."""
    assert not isinstance(said, str), said
    assert said["problems"] == []
    assert said["errors"] == {}
    return int(said["done"])


def kill_repeatedly(path: Path, times: int, seed: int, kind: str) -> int:
    """Two processes write and read, one of them is killed, a third reads it all; returns how many blocks were right."""
    draw = random.Random(seed)
    right = 0

    def start(number: int) -> Child:
        child = Child(work, path, number, CONVERSATIONS, BLOCKS, kind=kind, **OPTIONS)
        started.append(child)
        return child

    with children() as started:
        pair = [start(0), start(1)]
        for child in pair:
            assert child.answer() == "ready"
        for number in range(times):
            until = time.monotonic() + draw.random() * 0.1
            while time.monotonic() < until:
                assert used_bytes(path) <= DISK_MB << 20
                time.sleep(0.004)
            victim = draw.randrange(2)
            pair[victim].kill()
            assert not pair[1 - victim].pipe.poll(), pair[1 - victim].pipe.recv()
            reader = Child(read_all, path, CONVERSATIONS, BLOCKS, kind=kind, **OPTIONS)
            started.append(reader)
            right += expect_all_is_well(reader.answer())
            pair[victim] = start(number + 2)
            assert pair[victim].answer() == "ready"
        for child in pair:
            expect_all_is_well(child.stop())
    assert used_bytes(path) <= DISK_MB << 20
    return right


@pytest.mark.parametrize(("kind", "times"), [("cpu", 9), ("gpu", 3), ("three", 3)])
def test_what_a_killed_process_leaves_is_right(tmp_path: Path, kind: str, times: int) -> None:
    """After each kill, a fresh process compares every block that it can match with what its tokens say."""
    assert kill_repeatedly(tmp_path / "kv", times, 0, kind) > 0


@pytest.mark.soak
def test_two_hundred_kills(tmp_path: Path) -> None:
    """The same, until every moment has had its turn."""
    assert kill_repeatedly(tmp_path / "kv", 200, 1, "cpu") > 0
