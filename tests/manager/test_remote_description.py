"""Descriptions of remote levels: what cannot work is refused where it is written down."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_factory import CacheManager, CPUBackend, DiskBackend, GPUBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.errors import ConfigError

REMOTE = RemoteBackend(connector="MOCK", ingestion="all")


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([REMOTE], "last level, with memory above"),
        ([REMOTE, CPUBackend()], "last level"),
        ([CPUBackend(), REMOTE, REMOTE], "last level"),
        ([CPUBackend(staging=True)], "nothing but a RemoteBackend"),
        ([CPUBackend(), CPUBackend(staging=True)], "nothing but a RemoteBackend"),
        ([CPUBackend(staging=True), DiskBackend("x"), REMOTE], "nothing but a RemoteBackend"),
        ([CPUBackend(staging=True), RemoteBackend(connector="MOCK")], "ingestion='hot'"),
        ([CPUBackend(staging=True), RemoteBackend(connector="MOCK", ingestion="evicted")], "ingestion='evicted'"),
    ],
)
def test_levels_that_cannot_work(levels: list[Any], said: str) -> None:
    """Each with a word on what would."""
    with pytest.raises(ConfigError, match=said):
        HierarchicalBackend(levels)


@pytest.mark.parametrize("backend", [REMOTE, CPUBackend(staging=True)], ids=repr)
def test_a_level_that_needs_others(backend: Any) -> None:
    """Alone it is no cache."""
    with pytest.raises(ConfigError, match="needs memory above"):
        CacheManager(backend)


@pytest.mark.parametrize(
    "wrong",
    [
        {"connector": ""},
        {"namespace": ""},
        {"ingestion": "warm"},
        {"hot_hits": 0},
        {"op_batch": 0},
        {"per_token_timeout_ms": 0},
        {"max_wait_s": -1},
        {"max_inflight_tokens": -1},
        {"workers": 0},
        {"double_get_blocks": -1},
        {"double_get_ratio": 1.5},
    ],
    ids=str,
)
def test_values_that_cannot_work(wrong: dict[str, Any]) -> None:
    """The error names field, value and what is allowed."""
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))}=.*: use "):
        RemoteBackend(**{"connector": "MOCK", **wrong})


def test_an_unknown_connector_is_told_at_once() -> None:
    """When the manager is described, not when the first model is registered."""
    with pytest.raises(ConfigError, match="did you mean MOCK"):
        CacheManager(HierarchicalBackend([CPUBackend(), RemoteBackend(connector="MOKC")]))


def test_options_are_not_shown() -> None:
    """They may hold a password."""
    assert "hunter2" not in repr(RemoteBackend(connector="MOCK", options={"password": "hunter2"}))


def test_any_memory_may_be_above() -> None:
    """Host or device, with a disk between or not."""
    for above in ([CPUBackend()], [GPUBackend(device="cpu")], [CPUBackend(), DiskBackend("x")]):
        CacheManager(HierarchicalBackend([*above, REMOTE])).close()
