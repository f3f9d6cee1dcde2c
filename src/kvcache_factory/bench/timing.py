"""``bench timing``: what measuring costs a request.

Three managers do the same: one measures nothing, one the time of each operation (TIME_MEASUREMENT_ENABLED), one that of
its stages too (BREAKDOWN_MEASUREMENT_ENABLED).  A request is matched, loaded and released; a save stores blocks that
were dropped before.
"""

from __future__ import annotations

import statistics
from typing import Any

from .. import jit
from ..backend import GIB, CPUBackend
from ..block.identity import Identity
from ..block.key import KeyChain
from ..block.spec import BlockSpec, KVDtype
from ..manager import CacheManager
from ..memory.region import PagedRegion
from .measure import Progress, Work, quiet, round_robin

SIZES = (1, 64)
"""Blocks of a request."""
CALLS = 20
OPERATIONS = ("request", "save")
MODES = {
    "off": {"enable_metrics": False},
    "time": {"enable_metrics": True},
    "stages": {"enable_metrics": True, "measure_stages": True},
}


def run_timing(progress: Progress | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``op``, ``blocks``, ``off_us``, ``time_us``, ``stages_us``, ``time_share`` and ``stages_share`` of off."""
    progress = progress or quiet
    jit.warm_up()
    rounds = 3 if quick else 15
    rows = []
    for number, blocks in enumerate(SIZES):
        times: dict[str, dict[str, list[float]]] = {op: {mode: [] for mode in MODES} for op in OPERATIONS}
        for turn in range(len(MODES)):
            progress(number * len(MODES) + turn, len(SIZES) * len(MODES), f"{blocks} blocks")
            _measure(blocks, turn, rounds, times)
        rows += [{"op": op, "blocks": blocks, **_figures(times[op])} for op in OPERATIONS]
    progress(1, 1)
    return rows


def _measure(blocks: int, turn: int, rounds: int, times: dict[str, dict[str, list[float]]]) -> None:
    """Add the seconds of *rounds* rounds; who is made first, and so gets which memory, changes with the *turn*."""
    order = [*MODES][turn:] + [*MODES][:turn]
    subjects = {mode: Subject(blocks, MODES[mode]) for mode in order}
    try:
        for op in OPERATIONS:
            for mode, seconds in round_robin({m: getattr(s, op) for m, s in subjects.items()}, rounds).items():
                times[op][mode] += seconds
    finally:
        for subject in subjects.values():
            subject.manager.close()


def _figures(times: dict[str, list[float]]) -> dict[str, float]:
    us = {f"{mode}_us": round(statistics.median(times[mode]) / CALLS * 1e6, 2) for mode in MODES}
    shares = {
        f"{mode}_share": round(statistics.median(a / b for a, b in zip(times[mode], times["off"], strict=True)) - 1, 4)
        for mode in ("time", "stages")
    }
    return us | shares


class Subject:
    """A manager with one prompt of *blocks* blocks of 128 KiB, and an engine's tensors."""

    def __init__(self, blocks: int, options: dict[str, Any]) -> None:
        import torch

        spec = BlockSpec(KVDtype.F16, num_layers=8, num_kv_heads=2, head_dim=64, block_tokens=32)
        self.manager = CacheManager(CPUBackend(size_gb=2 * blocks * spec.slot_bytes / GIB + 0.01), **options)
        self.space = self.manager.register(spec, Identity("bench", "float16", spec.block_tokens))
        tensor = torch.zeros((blocks, spec.num_layers, 2, spec.block_tokens, spec.num_kv_heads, spec.head_dim))
        self.region = PagedRegion.from_cross_layer(tensor.to(torch.float16), spec)
        self.positions = self.region.positions(list(range(blocks)))
        self.chain: KeyChain = self.space.chain(range(blocks * spec.block_tokens))
        self.space.save(self.chain, self.region, self.positions)

    def request(self) -> Work:
        """Match, load, release."""

        def work() -> None:
            for number in range(CALLS):
                match = self.space.match(self.chain, str(number))
                loaded = self.space.load(match, self.region, self.positions)
                self.space.release(str(number))
                assert loaded == len(self.positions)

        return work

    def save(self) -> Work:
        """Drop and store again."""

        def work() -> None:
            for _ in range(CALLS):
                self.space.drop(self.chain)
                stored = self.space.save(self.chain, self.region, self.positions)
                assert stored == len(self.positions)

        return work
