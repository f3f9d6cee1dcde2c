"""Small caches, and compiled kernels wherever numba is allowed, so that those are what is tested."""

import pytest

from kvcache_factory import jit
from kvcache_factory.testing import open_cache  # noqa: F401  a fixture


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Compile before the first test; a second run with KVCACHE_FACTORY_NO_NUMBA=1 tests the fallbacks."""
    assert jit.warm_up() or jit.numba_refused(), jit.status()
