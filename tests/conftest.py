"""Settings of all tests: nothing depends on the clock, the load, the network or earlier runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: two workers on two cores must not start four threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from kvcache_factory.context import Context

settings.register_profile(
    "project",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def no_fault_is_hidden_by_a_miss(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Failures are answered as misses, and so would be a test's own misspelt call: such errors fail the test."""
    hidden: list[str] = []
    failed = Context.failed

    def noting(self: Context, verb: str, error: Exception) -> None:
        if isinstance(error, (AttributeError, NameError)):
            hidden.append(f"{verb}: {error!r}")
        failed(self, verb, error)

    monkeypatch.setattr(Context, "failed", noting)
    yield
    assert not hidden
