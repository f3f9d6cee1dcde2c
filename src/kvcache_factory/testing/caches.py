"""Managers of a few blocks, and a pytest fixture that opens and closes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from ..backend import GIB, Backend, CPUBackend, GPUBackend, HierarchicalBackend, Level
from ..block.spec import PAGE, BlockSpec, round_up
from ..engine.index import Index
from ..keyspace import KeySpace
from ..manager import CacheManager
from .engines import FakeEngine, tiny_identity, tiny_spec


class SmallCache(NamedTuple):
    """A manager, its one key space, and an engine to go with them."""

    manager: CacheManager
    space: KeySpace
    engine: FakeEngine

    def save(self, tokens: Any, version: int = 0, **options: Any) -> int:
        """Compute and store the blocks of *tokens*; returns how many were new."""
        chain = self.space.chain(tokens)
        return self.space.save(chain, self.engine.region, self.engine.compute(chain, version), **options)

    def load(self, tokens: Any, request_id: str = "request", known: Iterable[int] = (0,)) -> list[int | None]:
        """Match, load and release; returns the version of each block that came back, None for wrong bytes."""
        chain = self.space.chain(tokens)
        match = self.space.match(chain, request_id)
        self.engine.erase()
        count = self.space.load(match, self.engine.region, self.engine.positions(match.blocks))
        self.space.release(request_id)
        return self.engine.versions(chain, count, known)


def sized_level(blocks: int, spec: BlockSpec, *, device: bool = False) -> Level:
    """A level with room for exactly *blocks* blocks: host DRAM, or the torch device ``"cpu"``."""
    slot = round_up(spec.payload_bytes, PAGE) if device else spec.slot_bytes
    size = blocks * (slot + Index.bytes_per_row(spec.block_tokens)) / GIB
    return GPUBackend(device="cpu", size_gb=size) if device else CPUBackend(size_gb=size, huge_pages=False)


def small_cache(
    *blocks: int,
    spec: BlockSpec | None = None,
    prepare: Callable[[CacheManager], object] | None = None,
    **options: Any,
) -> SmallCache:
    """A cache with *blocks* blocks in each level, open; the first of several levels is a device.

    *prepare* sees the manager before anything is allocated; the rest goes to its constructor.
    """
    spec = spec if spec is not None else tiny_spec()
    levels = [sized_level(n, spec, device=len(blocks) > 1 and i == 0) for i, n in enumerate(blocks)]
    backend: Backend = levels[0] if len(levels) == 1 else HierarchicalBackend(levels)
    manager = CacheManager(backend, **options)
    if prepare is not None:
        prepare(manager)
    return SmallCache(manager, manager.register(spec, tiny_identity(spec)), FakeEngine(spec, 32))


class Opener:
    """What the fixture :func:`open_cache` gives: call it like :func:`small_cache`."""

    def __init__(self) -> None:
        self.opened: list[SmallCache] = []

    def __call__(self, *blocks: int, **options: Any) -> SmallCache:
        cache = small_cache(*blocks, **options)
        self.opened.append(cache)
        return cache


@pytest.fixture
def open_cache() -> Iterator[Opener]:
    """Opens small caches; when the test has ended, none may have broken an invariant, and all are closed."""
    opener = Opener()
    yield opener
    for manager, _, _ in opener.opened:
        manager.wait(60)
        problems = manager.check()
        manager.close()
        assert problems == []
