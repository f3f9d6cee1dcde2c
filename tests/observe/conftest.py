"""Small caches, and compiled kernels wherever numba is allowed."""

from __future__ import annotations

import pytest

from kvcache_factory import jit
from kvcache_factory.testing import open_cache  # noqa: F401  a fixture


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Compile before the first test."""
    assert jit.warm_up() or jit.numba_refused(), jit.status()
