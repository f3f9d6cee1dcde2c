"""The stand-ins for packages of vendors that cannot be had here.

They prove which calls are made and how answers are read, never that a vendor's server understands them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcache_factory.testing.connectors import Call

STANDINS = Path(__file__).parent / "standins"
_NAMES = ("_shelf", "infinistore", "priskv", "hpkv", "hpkv.hpkv_client", "hpkv._hpkv", "eic")


@pytest.fixture
def standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-ins come first on the path, of this process and of helpers; returns the directory of their values."""
    directory = tmp_path / "standin"
    directory.mkdir()
    monkeypatch.setenv("KVCF_STANDIN_DIRECTORY", str(directory))
    monkeypatch.syspath_prepend(str(STANDINS))
    before = {name: sys.modules.pop(name) for name in _NAMES if name in sys.modules}
    yield directory
    for name in _NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def executor() -> Iterator[Executor]:
    """Threads for calls that block."""
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def call() -> Iterator[Call]:
    """Runs coroutines of a test, one after another."""
    loop = asyncio.new_event_loop()
    yield Call(loop, 60.0)
    loop.close()
