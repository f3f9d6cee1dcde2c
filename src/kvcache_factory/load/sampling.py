"""One moment of a run: memory and processor time of the process, and a yardstick for the machine itself."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..manager import CacheManager
from .watch import Watch

Row = dict[str, Any]

_YARD = np.random.default_rng(0).random(1 << 13)


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def yardstick_ms() -> float:
    """Processor time of a piece of work that is always the same.

    It takes longer on a machine whose caches and cores others use as well, and for no other reason.
    """
    begun = time.thread_time()
    for turn in range(4):
        np.sort(np.roll(_YARD, turn))
        sum({number: number for number in range(2000)}.values())
    return (time.thread_time() - begun) * 1e3


def sample(manager: CacheManager, watch: Watch, generator_bytes: int, at_s: float) -> Row:
    """What could drift, now."""
    state, counts = manager.state(), watch.counts
    tiers = state["tiers"]
    return {
        "kind": "sample",
        "t_s": round(at_s, 3),
        "resident_bytes": resident_bytes(),
        "generator_bytes": generator_bytes,
        "python_blocks": sys.getallocatedblocks(),
        "held_bytes": sum(tier["held_bytes"] for tier in tiers),
        "fragmentation_bytes": sum(sum(tier["fragmentation"].values()) for tier in tiers),
        "sessions": len(state["sessions"]),
        "cpu_s": round(time.process_time(), 4),
        "yardstick_ms": round(yardstick_ms(), 4),
        "requests": counts.requests,
        "computed_tokens": counts.computed_tokens,
        "answered_tokens": counts.answered_tokens,
        "served_tokens": counts.served_tokens,
        "reusable_tokens": counts.reusable_tokens,
    }
