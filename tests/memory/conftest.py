"""Both copy paths, so that every test of movement runs over each of them."""

from collections.abc import Iterator

import pytest

from kvcache_factory import jit
from kvcache_factory.memory import transfer

PATHS = ["numpy"] if jit.numba_refused() else list(transfer.PATHS)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The copy path that the test runs over."""
    if request.param == "numba" and transfer.choose() != "numba":
        pytest.skip(f"the numba path is not available here: {transfer.why()}")
    with transfer.force(request.param):
        yield request.param
