"""Caches over a directory, and compiled kernels wherever numba is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.harness import DiskCache, open_cache_over

from kvcache_factory import jit
from kvcache_factory.testing import open_cache  # noqa: F401  a fixture


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Compile before the first test."""
    assert jit.warm_up() or jit.numba_refused(), jit.status()


class DiskOpener:
    """What the fixture :func:`over` gives: call it for one more cache over the directory of the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[DiskCache] = []

    def __call__(self, path: Path | None = None, **options: Any) -> DiskCache:
        cache = open_cache_over(path or self.path, **options)
        self.opened.append(cache)
        return cache


@pytest.fixture
def over(tmp_path: Path) -> Iterator[DiskOpener]:
    """Opens caches over one directory; at the end none has broken an invariant, and all are closed."""
    opener = DiskOpener(tmp_path / "kv")
    yield opener
    problems = []
    for cache in opener.opened:
        assert cache.manager.wait(60), "background work has not ended"
        problems += cache.manager.check()
    for cache in opener.opened:
        cache.manager.close()
    assert problems == []
