"""``bench disk``: put and get of slot images through the disk store, as a ratio to the disk's own rate.

Four threads each move chains of blocks between a slab and the store, in one call a chain, as the I/O pool does.  The
yardstick moves single blocks at random places of a file of the same size in the same directory: fio with four psync
jobs where fio is installed, else a probe of our own with four threads.  All files are written once before the clock
runs, both sides take turns, and what counts is the median over rounds of same-round ratios of wall time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..block.envelope import Header, pack_header
from ..block.spec import BlockSpec
from ..errors import StoreError
from ..memory.slab import Slab
from ..store.disk import DiskStore
from ..store.disk.aio import BATCH_BYTES, SlotFile, allocate
from . import fio, measure
from .l1 import MODELS

THREADS = 4
_WORKING_SET = 1 << 30
_ROUND = 512 << 20
_CHAINS_A_THREAD = 4  # places in the slab that a thread goes round


class Reference(Protocol):
    """What the store is measured against."""

    name: str

    def rate(self, op: str) -> float:
        """Bytes per second of one round of ``put`` or ``get``."""

    def close(self) -> None:
        """Give everything back."""


class StoreBed:
    """An open store, full of chains of *batch* blocks, a slab with images to write and one to read into."""

    def __init__(self, directory: Path, spec: BlockSpec, working_set: int, round_bytes: int) -> None:
        self.spec = spec
        self.batch = max(2, BATCH_BYTES // spec.slot_bytes)
        self.chains = max(2 * THREADS, working_set // (self.batch * spec.slot_bytes))
        self.calls = max(1, round_bytes // (THREADS * self.batch * spec.slot_bytes))
        self.images, self.target = (Slab(THREADS * _CHAINS_A_THREAD * self.batch, spec.slot_bytes) for _ in range(2))
        self.target.view[:] = 0
        self._seal_images()
        segment = min(256 << 20, 8 * self.batch * spec.slot_bytes)
        # Chains are freed and written again, and segments are of whole slots: a few segments more than the set.
        self.store = DiskStore(directory, int(1.2 * self.chains * self.batch * spec.slot_bytes) + 4 * segment, segment)
        self.store.open(spec, self.chains * self.batch)
        self._written = np.zeros(self.chains, np.int64)
        self._rng = np.random.default_rng(0)
        self._pool = ThreadPoolExecutor(THREADS)
        for chain in range(self.chains):
            self._write(chain, chain % (THREADS * _CHAINS_A_THREAD))

    @property
    def io(self) -> str:
        """``direct`` or ``buffered``."""
        return str(self.store.stats()["io"])

    def put(self) -> float:
        """Bytes per second of one round of writes over chains that were freed before."""
        parts = self._parts()
        for chain in parts.ravel().tolist():
            self.store.free(self._rows(chain))
        return self._timed(self._write, parts)

    def get(self) -> float:
        """Bytes per second of one round of reads, which are checked afterwards."""
        parts = self._parts()
        rate = self._timed(self._read, parts)
        for thread, chains in enumerate(parts):
            self._check(int(chains[-1]), self._place(thread, len(chains) - 1))
        return rate

    def close(self) -> None:
        """Give the memory back and let go of the files."""
        self._pool.shutdown()
        self.store.close()
        self.images.close()
        self.target.close()

    def _parts(self) -> npt.NDArray[np.int64]:
        """Chains for one round, int64 [threads, calls], all different."""
        calls = min(self.calls, self.chains // THREADS)
        return self._rng.permutation(self.chains)[: THREADS * calls].reshape(THREADS, calls)

    def _timed(self, move: Callable[[int, int], None], parts: npt.NDArray[np.int64]) -> float:
        def work(thread: int) -> None:
            for number, chain in enumerate(parts[thread].tolist()):
                move(chain, self._place(thread, number))

        started = time.perf_counter()
        list(self._pool.map(work, range(THREADS)))
        return parts.size * self.batch * self.spec.slot_bytes / (time.perf_counter() - started)

    @staticmethod
    def _place(thread: int, number: int) -> int:
        return thread * _CHAINS_A_THREAD + number % _CHAINS_A_THREAD

    def _rows(self, number: int) -> npt.NDArray[np.int32]:
        return np.arange(number * self.batch, (number + 1) * self.batch, dtype=np.int32)

    def _write(self, chain: int, place: int) -> None:
        if self.store.write(self._rows(chain), self.images, self._rows(place), 0) != self.batch:
            raise StoreError("the benchmark could not write all of its blocks; the figures would mean nothing")
        self._written[chain] = place

    def _read(self, chain: int, place: int) -> None:
        if self.store.read(self._rows(chain), self.target, self._rows(place), 0) != self.batch:
            raise StoreError("the benchmark lost blocks that it had written; the figures would mean nothing")

    def _check(self, chain: int, place: int) -> None:
        """Compare what was read with the images that were written."""
        images = self.images.view[self._rows(int(self._written[chain]))]
        if not np.array_equal(self.target.view[self._rows(place)], images):
            raise StoreError("the benchmark read other bytes than it had written; the figures would mean nothing")

    def _seal_images(self) -> None:
        """Images of random bytes: some disks are faster with bytes that repeat."""
        spec = self.spec
        rng = np.random.default_rng(2)
        for row in range(self.images.slots):
            image = self.images.view[row]
            image[spec.header_bytes :] = np.frombuffer(rng.bytes(spec.slot_bytes - spec.header_bytes), np.uint8)
            header = Header(
                identity_digest=bytes(16),
                key=row.to_bytes(16, "little"),
                parent_key=bytes(16),
                tokens=np.zeros(spec.block_tokens, np.uint32),
                payload_bytes=spec.payload_bytes,
                payload_checksum=0,
                layout="LCND",
            )
            pack_header(header, spec.header_bytes, memoryview(image))


class Probe:
    """Single blocks at random places of one file, by four threads: the disk's own rate where fio is not there.

    Its memory is a slab like the store's: direct I/O is up to twice as fast with huge pages, which fio goes without.
    """

    name = "probe"

    def __init__(self, path: Path, block: int, working_set: int, round_bytes: int, direct: bool) -> None:
        self._path, self._block, self._direct = path, block, direct
        self._blocks = max(2 * THREADS, working_set // block)
        self._calls = max(1, min(round_bytes // block, self._blocks) // THREADS)
        self._memory = Slab(THREADS, block)
        self._memory.view[:] = np.frombuffer(np.random.default_rng(3).bytes(block), np.uint8)
        self._pool = ThreadPoolExecutor(THREADS)
        self._rng = np.random.default_rng(1)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            allocate(fd, self._blocks * block)
        finally:
            os.close(fd)
        self._round("put", np.arange(self._blocks // THREADS * THREADS).reshape(THREADS, -1))

    def rate(self, op: str) -> float:
        """Bytes per second of one round."""
        places = self._rng.permutation(self._blocks)[: THREADS * self._calls].reshape(THREADS, -1)
        started = time.perf_counter()
        self._round(op, places)
        return places.size * self._block / (time.perf_counter() - started)

    def close(self) -> None:
        """End the threads and give the memory back."""
        self._pool.shutdown()
        self._memory.close()

    def _round(self, op: str, places: npt.NDArray[np.int64]) -> None:
        list(self._pool.map(lambda thread: self._move(op, thread, places[thread].tolist()), range(THREADS)))

    def _move(self, op: str, thread: int, places: Sequence[int]) -> None:
        with SlotFile(self._path, write=op == "put", direct=self._direct) as file:
            buffer = [memoryview(self._memory.view[thread])]
            for place in places:
                done = (file.write if op == "put" else file.read)(place * self._block, buffer)
                if done != 1:
                    raise StoreError("the probe moved less than a block; the figures would mean nothing")


def run_disk(
    progress: measure.Progress | None = None, quick: bool = False, path: Path | None = None
) -> list[dict[str, Any]]:
    """Rows ``op`` (put | get), ``block_bytes``, ``ratio`` to ``reference`` (``fio psync x4`` or ``probe``), ``batch``.

    Further columns: ``block_tokens``, ``threads``, ``io`` (direct | buffered), ``gb_s`` and ``reference_gb_s`` (1e9
    bytes per second of wall time).  Files are made in a new directory below *path* (default: the system's directory
    for temporary files) and removed.  *quick* moves a few blocks: a check that it runs, not a measurement.
    """
    report = progress or measure.quiet
    sizes, rounds = ((24 << 20, 8 << 20), 1) if quick else ((_WORKING_SET, _ROUND), 7)
    models = MODELS[1:2] if quick else MODELS
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvcache-factory-bench-", dir=path) as folder:
        for number, spec in enumerate(models):
            report(number, len(models), f"{spec.payload_bytes >> 10} KiB blocks")
            rows += _measure(Path(folder) / str(number), spec, *sizes, rounds)
    report(len(models), len(models), "done")
    return rows


def _measure(folder: Path, spec: BlockSpec, working_set: int, round_bytes: int, rounds: int) -> list[dict[str, Any]]:
    folder.mkdir()
    try:
        bed = StoreBed(folder / "store", spec, working_set, round_bytes)
        try:
            direct = bed.io == "direct"
            kind = fio.Fio if fio.find() else Probe
            reference: Reference = kind(folder / "reference", spec.slot_bytes, working_set, round_bytes, direct)
            try:
                rates = _rounds(bed, reference, rounds)
            finally:
                reference.close()
            return [_row(op, bed, reference, rates) for op in ("put", "get")]
        finally:
            bed.close()
    finally:
        shutil.rmtree(folder)


def _rounds(bed: StoreBed, reference: Reference, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Rates by side and op; the sides take turns at going first, and one round before does not count."""
    rates: dict[tuple[str, str], list[float]] = {(side, op): [] for side in ("us", "them") for op in ("put", "get")}
    for number in range(rounds + 1):
        for op, ours in (("put", bed.put), ("get", bed.get)):
            for side in ("us", "them") if number % 2 else ("them", "us"):
                rate = ours() if side == "us" else reference.rate(op)
                if number:
                    rates[side, op].append(rate)
    return rates


def _row(op: str, bed: StoreBed, reference: Reference, rates: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    us, them = rates["us", op], rates["them", op]
    return {
        "op": op,
        "block_bytes": bed.spec.payload_bytes,
        "block_tokens": bed.spec.block_tokens,
        "batch": bed.batch,
        "threads": THREADS,
        "io": bed.io,
        "ratio": round(measure.median_ratio(us, them), 3),
        "reference": reference.name,
        "gb_s": round(statistics.median(us) / 1e9, 3),
        "reference_gb_s": round(statistics.median(them) / 1e9, 3),
    }
