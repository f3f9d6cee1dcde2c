"""How long a directory of many blocks takes to open: ``python benchmarks/disk_scan.py [BLOCKS] [DIRECTORY]``.

Makes a directory as a process would leave it (logs complete, data files sparse), then opens it in a fresh store.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvcache_factory.block.spec import BlockSpec, KVDtype
from kvcache_factory.store.disk import DiskStore, log
from kvcache_factory.store.disk.directory import Directory
from kvcache_factory.store.disk.segment import create

SPEC = BlockSpec(KVDtype.BF16, num_layers=4, num_kv_heads=3, head_dim=64, block_tokens=64)
SEGMENT_BYTES = 256 << 20


def make(path: Path, blocks: int) -> int:
    """Write the logs; returns the number of segments."""
    directory = Directory(path)
    directory.prepare()
    slots = SEGMENT_BYTES // SPEC.slot_bytes
    if hasattr(os, "posix_fallocate"):
        del os.posix_fallocate  # data files without data: what is measured is the logs
    chance = np.random.default_rng(0)
    segments = -(-blocks // slots)
    for number in range(1, segments + 1):
        with directory.locked():
            one = create(directory, log.LogHeader(number, SPEC.slot_bytes, slots, SPEC.block_tokens, 0))
        count = min(slots, blocks - (number - 1) * slots)
        records = log.make(log.Kind.PUT, np.arange(count))
        for name in ("key", "parent", "extras", "identity"):
            records[name] = chance.integers(0, 2**63, (count, 2))
        one.append(records)
        one.let_go()
    return segments


def main() -> None:
    """Make, open, print."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as where:
        segments = make(Path(where) / "cache", blocks)
        store = DiskStore(Path(where) / "cache", 1 << 50, SEGMENT_BYTES)
        start, cpu = time.perf_counter(), time.process_time()
        store.open(SPEC, 0)
        opened = time.perf_counter()
        entries = store.scan()
        scanned = time.perf_counter()
        store.bind(np.arange(len(entries), dtype=np.int32), entries.places)
        bound, used = time.perf_counter(), time.process_time() - cpu
        again = time.perf_counter()
        store.refresh()
        looked = time.perf_counter() - again
        print(f"{len(entries):,} blocks in {segments} segments: open {opened - start:.2f} s, ", end="")
        print(f"scan {scanned - opened:.2f} s, bind {bound - scanned:.2f} s, processor {used:.2f} s; ", end="")
        print(f"refresh {looked:.4f} s")
        store.close()


if __name__ == "__main__":
    main()
