"""From a list of token ids to the keys of its blocks: CPU time a token, by builder."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..block import KEY_BUILDERS, Identity, KeyChain

TOKENS = 128 * 1024
BLOCK_TOKENS = 16


def run_keys(progress: Callable[..., None] | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``builder``, ``ns_per_token``: 128k token ids in 16-token blocks, median of thread CPU time.

    *progress* is called with steps done, steps in all and a line of text.
    """
    rounds = 3 if quick else 25
    tokens = random.Random(0).choices(range(150_000), k=TOKENS)
    identity = Identity(model="bench", kv_dtype="bfloat16", block_tokens=BLOCK_TOKENS)
    rows: list[dict[str, Any]] = []
    for done, builder in enumerate(KEY_BUILDERS):
        if progress is not None:
            progress(done, len(KEY_BUILDERS), f"keys {builder}")
        seconds = statistics.median(_once(identity, builder, tokens) for _ in range(rounds))
        rows.append({"builder": builder, "ns_per_token": round(seconds / TOKENS * 1e9, 2)})
    if progress is not None:
        progress(len(KEY_BUILDERS), len(KEY_BUILDERS), "keys")
    return rows


def _once(identity: Identity, builder: str, tokens: list[int]) -> float:
    chain = KeyChain(identity, builder=builder)
    start = time.thread_time()
    chain.extend(tokens)
    return time.thread_time() - start
