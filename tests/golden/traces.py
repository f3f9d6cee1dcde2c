"""Where the traces are, and replays of a policy on them at a capacity in per cent of the unique blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvcache_factory.registry import make_policy
from kvcache_factory.simulate.flat import replay_flat
from kvcache_factory.simulate.replay import DEFAULTS, Outcome, Replay, Settings, Size
from kvcache_factory.simulate.study import parse_policy
from kvcache_factory.simulate.workload import Workload

HOME = Path(__file__).resolve().parents[2].parent / "shared" / "reference" / "traces"
TRACES = Path(os.environ.get("KVCACHE_FACTORY_TRACES") or HOME)
CONVERSATION, SYNTHETIC = "mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"
AGENTS = "claude_code_sessions_512.jsonl.gz"

GetTrace = Callable[[str], Workload]


def blocks(read: Workload, percent: float) -> int:
    """A capacity in blocks."""
    return max(1, int(read.unique * percent / 100))


def replay(read: Workload, policy: str, percent: float, settings: Settings = DEFAULTS) -> Outcome:
    """Through the engine's own index."""
    return Replay(read, make_policy(policy), [Size("cache", blocks(read, percent))], settings).run()


def flat(read: Workload, policy: str, percent: float) -> float:
    """Block hits on unrelated blocks; *policy* may have options, as in ``s3fifo:threshold=1``."""
    return replay_flat(read, parse_policy(policy), blocks(read, percent)).block_hit
