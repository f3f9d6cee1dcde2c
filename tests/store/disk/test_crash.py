"""kill -9 at random moments, slot reuse included: what is found afterwards is whole, and it is what it says it is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.disk.blocks import SEGMENT, Cache, disk_usage

Opened = Callable[..., Cache]


def kill_again_and_again(directory: Path, opened: Opened, workers: object, times: int) -> None:
    """Two processes write, free and reuse; one after the other is killed, and everything is read back and compared."""
    start, kill = workers.start, workers.kill  # type: ignore[attr-defined]
    chance = random.Random(7)
    survivor = start(directory, 1, 6)
    read = 0
    for turn in range(times):
        victim = start(directory, turn + 2, 6)
        time.sleep(chance.random() * 0.05)
        kill(victim)
        # One look after each death; what the survivor frees and reuses meanwhile may be a miss, but never wrong.
        cache = opened(segments=6)
        read += len(cache.number_of) - cache.check()
        if turn % 4 == 3:
            kill(survivor)
            cache.refresh()
            assert cache.check() == 0, "every owner is dead, and nothing was being written: nothing may be missing"
            cache.close()
            survivor = start(directory, times + turn + 2, 6)
        else:
            cache.close()
        assert disk_usage(directory) <= 6 * SEGMENT
    assert read > 20 * times


def test_nothing_wrong_is_ever_read_after_kills(directory: Path, opened: Opened, workers: object) -> None:
    """Twenty kills; the long run of two hundred is `make soak`."""
    kill_again_and_again(directory, opened, workers, 20)


@pytest.mark.soak
def test_nothing_wrong_is_ever_read_after_two_hundred_kills(directory: Path, opened: Opened, workers: object) -> None:
    """The same, two hundred times."""
    kill_again_and_again(directory, opened, workers, 200)
