"""Real traces, each read once.

They are not part of this repository: they are looked for in ../shared/reference/traces, or in the directory that
KVCACHE_FACTORY_TRACES names, and what needs them is skipped, with the reason, where they are not.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.golden.traces import TRACES, GetTrace

from kvcache_factory import jit
from kvcache_factory.simulate.workload import Workload, read_trace


@pytest.fixture(scope="session")
def trace() -> Iterator[GetTrace]:
    """Each trace, read once."""
    read: dict[str, Workload] = {}
    jit.warm_up()

    def get(name: str) -> Workload:
        path = TRACES / name
        if not path.is_file():
            pytest.skip(f"the trace {path} is not there; set KVCACHE_FACTORY_TRACES to its directory")
        if name not in read:
            read[name] = read_trace(path, strict=True)
        return read[name]

    yield get
    for workload in read.values():
        workload.close()
