"""Stores that are closed when the test ends, however it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.disk.blocks import Cache, open_store

ROOT = Path(__file__).parents[3]


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


class Workers:
    """Processes on a directory (see ``worker.py``), all of them dead when the test ends."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, path: Path, *arguments: object) -> subprocess.Popen[str]:
        """Start one and wait until it has done what it should, or is in the middle of it."""
        command = [sys.executable, "-m", "tests.store.disk.worker", str(path), *map(str, arguments)]
        worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._all.append(worker)
        assert worker.stdout is not None
        assert worker.stdout.readline(), "the worker died before there was anything to kill"
        return worker

    def kill(self, worker: subprocess.Popen[str]) -> None:
        """Kill it as nothing can be prepared for, and wait until it is gone."""
        assert worker.poll() is None, f"the worker ended by itself with {worker.returncode}"
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()
        self._all.remove(worker)


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Starts and kills other processes."""
    made = Workers()
    yield made
    for worker in list(made._all):
        worker.kill()
        worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()
