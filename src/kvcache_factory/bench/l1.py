"""``bench l1``: put and get of blocks in DRAM, as a ratio to libc's memcpy of whole blocks.

The engine side is a paged cache with one tensor [2, blocks, 16, heads, dim] per layer; the other side is a slab of
slots.  Both lie in mappings with the same page size.  The yardstick copies as many bytes in whole contiguous blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec, KVDtype
from ..memory import PagedRegion, Slab, choose, force, gather, scatter
from ..memory.move import descriptors
from . import measure

ENGINE_TOKENS = 16
MODELS = {
    "2 MiB / 16 tokens": BlockSpec(KVDtype.BF16, num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16),
    "360 KiB / 16 tokens": BlockSpec(KVDtype.BF16, num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16),
    "2 MiB / 64 tokens": BlockSpec(KVDtype.BF16, num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=64),
    "360 KiB / 64 tokens": BlockSpec(KVDtype.BF16, num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=64),
}
_WORKING_SET = 768 << 20  # bytes on each side: far beyond any cache
# Bytes that one candidate moves per round: several times what the caches hold, so that each candidate pays for writing
# back the lines it has dirtied, instead of leaving them to the next one.
_ROUND = 128 << 20


class Bed:
    """An engine's paged cache and a slab of slots for one model, both faulted in, and random places in them."""

    def __init__(self, spec: BlockSpec, working_set: int, huge_pages: bool, seed: int = 0) -> None:
        self.spec = spec
        self.blocks = max(working_set // spec.payload_bytes, 1)
        self.engine = Slab(self.blocks, spec.payload_bytes, huge_pages=huge_pages)
        self.slab = Slab(self.blocks, spec.slot_bytes, huge_pages=huge_pages)
        self.engine.view[:] = 1
        self.slab.view[:] = 2
        self.region = PagedRegion.from_tensors(_paged_tensors(self.engine, spec), spec)
        self._rng = np.random.default_rng(seed)

    def places(self, batch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Engine blocks [batch, m] and slots [batch], all different within the call."""
        parts = self.region.parts
        engine = self._rng.permutation(self.blocks * parts)[: batch * parts].reshape(batch, parts)
        return engine, self._rng.permutation(self.blocks)[:batch]

    def close(self) -> None:
        """Give the memory back."""
        del self.region
        self.engine.close()
        self.slab.close()


def _paged_tensors(engine: Slab, spec: BlockSpec) -> list[Any]:
    import torch

    flat = torch.from_numpy(engine.view.reshape(-1)).view(getattr(torch, spec.dtype.value))
    shape = (2, -1, ENGINE_TOKENS, spec.num_kv_heads, spec.head_dim)
    return [layer.view(shape) for layer in flat.view(spec.num_layers, -1).unbind()]


@dataclass(frozen=True)
class _Case:
    op: str
    batch: int
    calls: int  # per round


_Maker = Callable[[Bed, _Case], Callable[[], object]]


def run_l1(progress: measure.Progress | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``op`` (put | get), ``path``, ``block_bytes``, ``batch``, ``ratio`` to memcpy and ``overhead_us`` a block.

    Further columns: ``block_tokens``, ``pages`` (huge | small), ``gb_s`` and ``memcpy_gb_s`` (1e9 bytes per second of
    thread CPU time).  *quick* takes one small batch in a small working set: a check that it runs, not a measurement.
    """
    report = progress or measure.quiet
    paths = ["numba", "numpy"] if choose() == "numba" else ["numpy"]
    batches, rounds, working_set = ((8,), 3, 32 << 20) if quick else ((1, 8, 64), 11, _WORKING_SET)
    models = [(name, spec, huge) for name, spec in MODELS.items() for huge in ((True,) if quick else (True, False))]
    rows: list[dict[str, Any]] = []
    for done, (name, spec, huge) in enumerate(models):
        report(done, len(models), name)
        bed = Bed(spec, working_set, huge)
        pages = "huge" if bed.slab.huge_pages else "small"
        try:
            for case in _cases(bed, batches):
                rows.extend({**row, "pages": pages} for row in _measure(bed, case, paths, rounds))
        finally:
            bed.close()
    report(len(models), len(models), "done")
    return rows


def _cases(bed: Bed, batches: tuple[int, ...]) -> Iterator[_Case]:
    for batch in batches:
        batch = min(batch, bed.blocks)
        calls = max(_ROUND // (batch * bed.spec.payload_bytes), 1)
        for op in ("put", "get"):
            yield _Case(op, batch, calls)


def _measure(bed: Bed, case: _Case, paths: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    times = measure.round_robin(
        {
            "memcpy": _planned(bed, case, rounds, _memcpy),
            "overhead": _planned(bed, case, rounds, _describe),
            **{path: _forced(path, _planned(bed, case, rounds, _move)) for path in paths},
        },
        rounds,
    )
    moved = case.calls * case.batch * bed.spec.payload_bytes
    for path in paths:
        yield {
            "op": case.op,
            "path": path,
            "block_bytes": bed.spec.payload_bytes,
            "block_tokens": bed.spec.block_tokens,
            "batch": case.batch,
            "ratio": round(measure.median_ratio(times["memcpy"], times[path]), 3),
            "overhead_us": round(statistics.median(times["overhead"]) * 1e6 / (case.calls * case.batch), 3),
            "gb_s": round(moved / statistics.median(times[path]) / 1e9, 2),
            "memcpy_gb_s": round(moved / statistics.median(times["memcpy"]) / 1e9, 2),
        }


def _planned(bed: Bed, case: _Case, rounds: int, make: _Maker) -> measure.Candidate:
    """A candidate whose random places, different in every round, are chosen before the clock runs."""
    plans = [[make(bed, case) for _ in range(case.calls)] for _ in range(rounds + 1)]

    def run(number: int) -> None:
        for call in plans[number]:
            call()

    return run


def _forced(path: str, candidate: measure.Candidate) -> measure.Candidate:
    def run(number: int) -> None:
        with force(path):
            candidate(number)

    return run


def _move(bed: Bed, case: _Case) -> Callable[[], object]:
    engine, slots = bed.places(case.batch)
    move = gather if case.op == "put" else scatter
    region, slab, offset = bed.region, bed.slab, bed.spec.header_bytes
    return lambda: move(region, region.positions(engine), slab, slots, offset, region.tag)


def _describe(bed: Bed, case: _Case) -> Callable[[], object]:
    engine, slots = bed.places(case.batch)
    region, slab, offset = bed.region, bed.slab, bed.spec.header_bytes
    return lambda: descriptors(region, region.positions(engine), slab, slots, offset, region.tag)


def _memcpy(bed: Bed, case: _Case) -> Callable[[], object]:
    engine, slots = bed.places(case.batch)
    outside = bed.engine.address(engine[:, 0] // bed.region.parts).tolist()
    inside = (bed.slab.address(slots) + np.uint64(bed.spec.header_bytes)).tolist()
    dst, src = (inside, outside) if case.op == "put" else (outside, inside)
    nbytes = bed.spec.payload_bytes
    return lambda: measure.memcpy_blocks(dst, src, nbytes)
