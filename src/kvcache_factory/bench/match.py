"""``bench match``: how long a look-up of a long prompt takes, through the manager, in an index full of others.

Cases: ``peek`` counts blocks by key; ``keys_known`` finds, verifies and leases all blocks of a chain with known keys;
``from_tokens`` also hashes a list of tokens; ``next_turn`` extends a conversation that has been matched before by 1,024
tokens and matches it again.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from .. import jit
from ..backend import GPUBackend
from ..block.identity import Identity
from ..block.key import KeyChain
from ..block.spec import BlockSpec, KVDtype
from ..keyspace import KeySpace
from ..manager import CacheManager
from .measure import Candidate, Progress, quiet, thread_seconds

PROMPT = 131_072
TURN = 1_024
ROWS = 65_536


def tiny_spec(block_tokens: int) -> BlockSpec:
    """A geometry whose payload fits one page, so that an index of many rows costs little memory."""
    return BlockSpec(dtype=KVDtype.F16, num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=block_tokens)


def fill(manager: CacheManager, space: KeySpace, chain: KeyChain) -> None:
    """Enter *chain* into the first tier's index without moving bytes."""
    index = manager.first_index
    reservation = index.reserve(chain, space.root, 0, chain.num_blocks)
    index.commit(reservation.rows)


def run_match(progress: Progress | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``tokens``, ``block_tokens``, ``case``, ``ms`` (thread CPU time, median)."""
    progress = progress or quiet
    jit.warm_up()
    rounds = 5 if quick else 25
    rows = []
    for number, block_tokens in enumerate((16, 64)):
        progress(number, 2, f"{block_tokens}-token blocks")
        spec = tiny_spec(block_tokens)
        index_rows = ROWS * 16 // block_tokens
        size_gb = index_rows * (4096 + 160 + 4 * block_tokens) / 2**30
        with CacheManager(GPUBackend(device="cpu", size_gb=size_gb), name="bench") as manager:
            space = manager.register(spec, Identity("bench", "float16", block_tokens))
            for case, seconds in _cases(manager, space, rounds).items():
                ms = round(statistics.median(seconds) * 1e3, 4)
                rows.append({"tokens": PROMPT, "block_tokens": block_tokens, "case": case, "ms": ms})
    progress(2, 2)
    return rows


def _cases(manager: CacheManager, space: KeySpace, rounds: int) -> dict[str, list[float]]:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 50_000, PROMPT + TURN) for _ in range(4)]
    for start in range(0, PROMPT, PROMPT // 8):  # interleaved, so that a prompt's rows are not one run
        for prompt in prompts:
            fill(manager, space, space.chain(prompt[: start + PROMPT // 8]))
    tokens = [prompt.tolist() for prompt in prompts]
    times: dict[str, list[float]] = {"peek": [], "keys_known": [], "from_tokens": [], "next_turn": []}
    blocks = PROMPT // space.block_tokens
    for number in range(rounds + 1):
        pick = number % len(prompts)
        prompt, more = tokens[pick][:PROMPT], tokens[pick][PROMPT:]
        made: list[int] = []
        for case, run in _steps(space, prompt, more, made).items():
            seconds = thread_seconds(run, number)
            if number:
                times[case].append(seconds)
        assert made == [blocks] * 4, f"a stored prompt was not found: {made}"
        for request in ("known", "tokens", "turn"):
            space.release(request)
    return times


def _steps(space: KeySpace, prompt: list[int], more: list[int], made: list[int]) -> dict[str, Candidate]:
    chain = space.chain(prompt)

    def next_turn(_: int) -> None:
        chain.extend(more)
        made.append(space.match(chain, "turn").blocks)

    return {
        "peek": lambda _: made.append(space.peek(chain)),
        "keys_known": lambda _: made.append(space.match(chain, "known").blocks),
        "from_tokens": lambda _: made.append(space.match(space.chain(prompt), "tokens").blocks),
        "next_turn": next_turn,
    }
