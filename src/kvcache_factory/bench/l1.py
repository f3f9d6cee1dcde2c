"""``bench l1``: put and get of blocks through a CacheManager in DRAM, as a ratio to libc's memcpy of whole blocks.

The engine side is a paged cache with one tensor [2, blocks, 16, heads, dim] per layer.  A put is one ``save`` of a
chain that was dropped before the clock ran; a get is ``match``, ``load`` and ``release`` with the keys known.  The
yardstick copies as many bytes in whole contiguous blocks between mappings with the same page size.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import numpy as np

from ..backend import GIB, CPUBackend
from ..block.identity import Identity
from ..block.key import KeyChain
from ..block.spec import BlockSpec, KVDtype
from ..errors import StoreError
from ..manager import CacheManager
from ..memory import PagedRegion, Slab, choose, force, move
from . import measure

ENGINE_TOKENS = 16
LLAMA = BlockSpec(KVDtype.BF16, num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=ENGINE_TOKENS)
SMOLLM2 = BlockSpec(KVDtype.BF16, num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=ENGINE_TOKENS)
MODELS = [msgspec.structs.replace(m, block_tokens=n) for n in (16, 64) for m in (LLAMA, SMOLLM2)]
_WORKING_SET = 768 << 20  # bytes on each side: far beyond any cache
# Bytes that one candidate moves per round: several times what the caches hold, so that each candidate pays for writing
# back the lines it has dirtied, instead of leaving them to the next one.
_ROUND = 128 << 20


class Bed:
    """An engine's paged cache and a manager that is full of chains of *batch* blocks: the places of one benchmark.

    *options* go to the manager.
    """

    def __init__(self, spec: BlockSpec, blocks: int, *, huge_pages: bool, seed: int = 0, **options: Any) -> None:
        self.spec = spec
        self.blocks = blocks
        self._rng = np.random.default_rng(seed)
        self.engine = Slab(blocks, spec.payload_bytes, huge_pages=huge_pages)
        self.engine.view[:] = 1
        self.region = PagedRegion.from_tensors(_paged_tensors(self.engine, spec), spec)
        size_gb = (blocks + 2) * (spec.slot_bytes + 4 * spec.block_tokens + 1024) / GIB
        self.manager = CacheManager(CPUBackend(size_gb=size_gb, huge_pages=huge_pages), **options)
        self.space = self.manager.register(spec, Identity("bench", spec.dtype.value, spec.block_tokens))
        self.chains: list[KeyChain] = []

    def fill(self, batch: int) -> None:
        """Hold as many chains of *batch* blocks as there is room for, and nothing else."""
        for chain in self.chains:
            self.space.drop(chain)
        count = max(self.blocks // batch, 1)
        tokens = self._rng.integers(0, 2**31, (count, batch * self.spec.block_tokens), np.uint32)
        self.chains = [self.space.chain(row) for row in tokens]
        for chain in self.chains:
            self._put(chain, self.places(batch))

    def places(self, batch: int) -> Any:
        """Random engine blocks, int [batch, m], all different."""
        parts = self.region.parts
        return self._rng.permutation(self.blocks * parts)[: batch * parts].reshape(batch, parts)

    def puts(self, batch: int, calls: int) -> measure.Work:
        """Work that saves *calls* chains, dropped now, from random places."""
        plan = [(chain, self.places(batch)) for chain in self._some(calls)]
        for chain, _ in plan:
            self.space.drop(chain)

        def work() -> None:
            for chain, places in plan:
                self._put(chain, places)

        return work

    def gets(self, batch: int, calls: int) -> measure.Work:
        """Work that loads *calls* chains to random places."""
        plan = [(chain, self.places(batch)) for chain in self._some(calls)]

        def work() -> None:
            for chain, places in plan:
                match = self.space.match(chain, "bench")
                if self.space.load(match, self.region, self.region.positions(places)) != batch:
                    raise StoreError("the benchmark lost blocks that it had saved; the figures would mean nothing")
                self.space.release("bench")

        return work

    def close(self) -> None:
        """Give the memory back."""
        self.manager.close()
        del self.region
        self.engine.close()

    def _put(self, chain: KeyChain, places: Any) -> None:
        if self.space.save(chain, self.region, self.region.positions(places)) != len(places):
            raise StoreError("the benchmark could not save all of its blocks; the figures would mean nothing")

    def _some(self, calls: int) -> list[KeyChain]:
        return [self.chains[i] for i in self._rng.permutation(len(self.chains))[:calls]]


def run_l1(progress: measure.Progress | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``op`` (put | get), ``path``, ``block_bytes``, ``batch``, ``ratio`` to memcpy and ``overhead_us`` a block.

    ``overhead_us`` is the time of the same call while the copy itself does nothing: keys are known, everything else
    (look-up, verification, reservation, leases, counts, the descriptors of all pieces) is done.  Further columns:
    ``block_tokens``, ``pages`` (huge | small), ``gb_s`` and ``memcpy_gb_s`` (1e9 bytes per second of thread CPU time).
    *quick* takes one small batch in a small working set: a check that it runs, not a measurement.
    """
    report = progress or measure.quiet
    paths = ["numba", "numpy"] if choose() == "numba" else ["numpy"]
    batches, rounds, working_set = ((4,), 2, 24 << 20) if quick else ((1, 8, 64), 11, _WORKING_SET)
    beds = [(spec, huge) for spec in MODELS for huge in ((True,) if quick else (True, False))]
    rows: list[dict[str, Any]] = []
    for done, (spec, huge) in enumerate(beds):
        report(done, len(beds), f"{spec.payload_bytes >> 10} KiB blocks, {'huge' if huge else 'small'} pages")
        rows.extend(_measure_bed(spec, huge, working_set, batches, paths, rounds))
    report(len(beds), len(beds), "done")
    return rows


def _measure_bed(
    spec: BlockSpec, huge: bool, working_set: int, batches: tuple[int, ...], paths: list[str], rounds: int
) -> Iterator[dict[str, Any]]:
    blocks = max(working_set // spec.payload_bytes, 1)
    bed = Bed(spec, blocks, huge_pages=huge)
    slots = Slab(blocks, spec.slot_bytes, huge_pages=huge)
    slots.view[:] = 2
    try:
        for batch in sorted({min(b, blocks) for b in batches}):
            bed.fill(batch)
            for op in ("put", "get"):
                for row in _measure(bed, slots, op, batch, paths, rounds):
                    yield {**row, "pages": "huge" if slots.huge_pages else "small"}
    finally:
        slots.close()
        bed.close()


def _measure(bed: Bed, slots: Slab, op: str, batch: int, paths: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    nbytes = bed.spec.payload_bytes
    calls = min(max(_ROUND // (batch * nbytes), 1), max(len(bed.chains) // 2, 1))
    candidates: dict[str, measure.Preparation] = {"memcpy": lambda: _memcpy(bed, slots, op, batch, calls)}
    for path in paths:
        candidates[path] = _over(path, bed, op, batch, calls)
        candidates[f"{path} overhead"] = _over(path, bed, op, batch, calls, copying=False)
    times = measure.round_robin(candidates, rounds)
    moved = calls * batch * nbytes / 1e9
    for path in paths:
        overhead = statistics.median(times[f"{path} overhead"]) / (calls * batch)
        yield {
            "op": op,
            "path": path,
            "block_bytes": nbytes,
            "block_tokens": bed.spec.block_tokens,
            "batch": batch,
            "ratio": round(measure.median_ratio(times["memcpy"], times[path]), 3),
            "overhead_us": round(overhead * 1e6, 3),
            "gb_s": round(moved / statistics.median(times[path]), 2),
            "memcpy_gb_s": round(moved / statistics.median(times["memcpy"]), 2),
        }


def _over(path: str, bed: Bed, op: str, batch: int, calls: int, *, copying: bool = True) -> measure.Preparation:
    def prepare() -> measure.Work:
        work = bed.puts(batch, calls) if op == "put" else bed.gets(batch, calls)

        def forced() -> None:
            with force(path), nullcontext() if copying else without_copying():
                work()

        return forced

    return prepare


@contextmanager
def without_copying() -> Iterator[None]:
    """Let copies do nothing, so that what is around them can be measured."""
    names = vars(move)
    copy_batch = names["copy_batch"]
    names["copy_batch"] = lambda *_: None
    try:
        yield
    finally:
        names["copy_batch"] = copy_batch


def _memcpy(bed: Bed, slots: Slab, op: str, batch: int, calls: int) -> measure.Work:
    rng, n = np.random.default_rng(), batch * calls
    inside = (slots.address(rng.integers(0, bed.blocks, n)) + np.uint64(bed.spec.header_bytes)).tolist()
    outside = bed.engine.address(rng.integers(0, bed.blocks, n)).tolist()
    dst, src = (inside, outside) if op == "put" else (outside, inside)
    return lambda: measure.memcpy_blocks(dst, src, bed.spec.payload_bytes)


def _paged_tensors(engine: Slab, spec: BlockSpec) -> list[Any]:
    import torch

    flat = torch.from_numpy(engine.view.reshape(-1)).view(getattr(torch, spec.dtype.value))
    shape = (2, -1, ENGINE_TOKENS, spec.num_kv_heads, spec.head_dim)
    return [layer.view(shape) for layer in flat.view(spec.num_layers, -1).unbind()]
