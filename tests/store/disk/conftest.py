"""Stores that are closed when the test ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.disk.blocks import Cache, open_store


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the store will make its directory."""
    return tmp_path / "cache"


@pytest.fixture
def opened(directory: Path) -> Iterator[Callable[..., Cache]]:
    """Opens caches on the directory; each call is another process as far as the store can tell."""
    caches: list[Cache] = []

    def one(path: Path = directory, **options: object) -> Cache:
        caches.append(Cache(open_store(path, **options)))  # type: ignore[arg-type]
        return caches[-1]

    yield one
    for cache in caches:
        cache.close()
