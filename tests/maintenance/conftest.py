"""Directories with blocks of known models, written by stores that live or have gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache_factory.block.envelope import Header, checksum, pack_header
from kvcache_factory.block.identity import Identity
from kvcache_factory.block.key import KeyChain
from kvcache_factory.block.spec import BlockSpec, KVDtype
from kvcache_factory.memory.slab import Slab
from kvcache_factory.store.disk import DiskStore
from kvcache_factory.store.disk.identities import leave_note
from kvcache_factory.testing import open_cache  # noqa: F401  a fixture

SPEC = BlockSpec(KVDtype.F32, num_layers=1, num_kv_heads=2, head_dim=16, block_tokens=16)
HOUR_NS = 3600 * 10**9


def identity(model: str = "model-a", **parts: Any) -> Identity:
    """An identity of the test's geometry."""
    return Identity(model, "float32", SPEC.block_tokens, **parts)


class Writer:
    """One process on the directory, as far as anybody can tell; *age_ns* is how long ago it says it writes."""

    def __init__(self, path: Path) -> None:
        import time

        self.path = path
        self.age_ns = 0
        self.store = DiskStore(path, 8 << 20, 256 << 10, now_ns=lambda: time.time_ns() - self.age_ns)
        self.store.open(SPEC, 512)
        self.store.scan()
        self._slab = Slab(64, SPEC.slot_bytes, huge_pages=False)
        self._rows = 0

    def write(self, whose: Identity, blocks: int, *, seed: int = 0, first: int = 0, note: bool = True) -> np.ndarray:
        """Write blocks *first* to *blocks* - 1 of the chain number *seed*; returns their rows."""
        tokens = np.random.default_rng(seed).integers(0, 1000, blocks * SPEC.block_tokens)
        chain = KeyChain(whose)
        chain.extend(tokens)
        parents = [whose.digest, *(chain.key_bytes(i) for i in range(blocks))]
        for i in range(first, blocks):
            image = memoryview(self._slab.view[i])
            payload = np.random.default_rng((seed, i)).bytes(SPEC.payload_bytes)
            image[SPEC.header_bytes : SPEC.header_bytes + len(payload)] = payload
            header = Header(
                identity_digest=whose.digest,
                key=chain.key_bytes(i),
                parent_key=parents[i],
                tokens=chain.token_blocks[i],
                payload_bytes=len(payload),
                payload_checksum=checksum(payload),
                layout="LCHND",
            )
            pack_header(header, SPEC.header_bytes, image)
        rows = np.arange(self._rows, self._rows + blocks - first, dtype=np.int32)
        self._rows += len(rows)
        depths = np.arange(first, blocks, dtype=np.int32)
        assert self.store.write(rows, self._slab, depths, 0, depths=depths) == len(rows)
        if note:
            leave_note(self.path, whose)
        return rows

    def close(self) -> None:
        """End, which leaves what was written."""
        self.store.close()
        self._slab.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the directory of the disk tier will be."""
    return tmp_path / "cache"


@pytest.fixture
def writer(directory: Path) -> Iterator[Callable[[], Writer]]:
    """Makes writers on the directory."""
    made: list[Writer] = []

    def make() -> Writer:
        made.append(Writer(directory))
        return made[-1]

    yield make
    for one in made:
        one.close()
