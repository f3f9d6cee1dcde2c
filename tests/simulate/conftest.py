"""Compiled kernels wherever numba is allowed, and short traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvcache_factory import jit
from kvcache_factory.simulate.workload import Workload, read_trace

Write = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Compile before the first test."""
    assert jit.warm_up() or jit.numba_refused(), jit.status()


def mooncake(chains: Iterable[list[int]], step_ms: int = 1000, output: int = 10) -> list[dict[str, Any]]:
    """Lines of a Mooncake trace with these chains, one request a step."""
    return [
        {"timestamp": i * step_ms, "input_length": 512 * len(chain), "output_length": output, "hash_ids": chain}
        for i, chain in enumerate(chains)
    ]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows (or raw lines) to a trace file."""

    def put(rows: Iterable[Any], name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return put


@pytest.fixture
def workload(write: Write) -> Callable[[Iterable[list[int]]], Workload]:
    """A workload of these chains."""
    return lambda chains: read_trace(write(mooncake(chains)))
