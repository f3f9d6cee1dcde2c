"""MOCK passes the kit, with every combination of what can be switched on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcache_factory.connector import Connector
from kvcache_factory.connector.mock import MockConnector, MockOptions, forget
from kvcache_factory.testing import ConnectorTests
from kvcache_factory.testing.connectors import Memory


class SharedMock(ConnectorTests):
    """Connectors of one test share their values by the name of its directory."""

    flags: dict[str, bool] = {}  # noqa: RUF012

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return MockConnector.from_options("id", executor, MockOptions(share=str(directory), **self.flags))

    @pytest.fixture(autouse=True)
    def _forget(self, tmp_path: Path) -> Iterator[None]:
        yield
        forget(str(tmp_path))


class TestPlain(SharedMock):
    """Single calls on host memory."""


class TestBatches(SharedMock):
    """Calls for a batch."""

    flags = {"use_mput_mget": True}  # noqa: RUF012


class TestRDMA(SharedMock):
    """Only registered memory is taken."""

    flags = {"use_rdma": True, "use_mput_mget": True}  # noqa: RUF012


class TestGDR(SharedMock):
    """Several regions for a value, both ways."""

    flags = {"use_gdr_put": True, "use_gdr_get": True, "use_mput_mget": True}  # noqa: RUF012


class TestGDRPutOnly(SharedMock):
    """Several regions out, one region in."""

    flags = {"use_gdr_put": True}  # noqa: RUF012


def test_memory_that_was_not_registered_is_refused() -> None:
    """With the rdma feature; a region that reaches over the end of registered memory is refused too."""
    connector = MockConnector(MockOptions(use_rdma=True))
    connector.open()
    memory = Memory(4096)
    assert asyncio.run(connector.put(b"key", memory[0])).is_invalid()
    connector.register_slabs([memory.tensor[:6000]])
    assert asyncio.run(connector.put(b"key", memory[0])).is_ok()
    assert asyncio.run(connector.put(b"key", memory[1])).is_invalid()


def test_a_sequence_of_regions_needs_gdr() -> None:
    """A caller that ignores the features is told."""
    connector = MockConnector()
    connector.open()
    memory = Memory(4096)
    assert asyncio.run(connector.put(b"key", [memory[0]])).is_invalid()
    assert asyncio.run(connector.get(b"key", [memory[0]])).is_invalid()


def test_noop_accepts_everything_and_finds_nothing() -> None:
    """For measuring what everything but the store costs."""
    connector = MockConnector(MockOptions(use_noop=True))
    connector.open()
    memory = Memory(4096)
    assert asyncio.run(connector.put(b"key", memory[0])).is_ok()
    assert asyncio.run(connector.exists(b"key")).is_not_found()
    assert asyncio.run(connector.get(b"key", memory[1])).is_not_found()


def test_variables_switch_features_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag has its variable."""
    for flag in ("USE_RDMA", "USE_MPUT_MGET", "USE_GDR_PUT", "USE_GDR_GET", "USE_NOOP"):
        monkeypatch.setenv(f"AIBRIX_KV_CACHE_OL_MOCK_{flag}", "1")
    with ThreadPoolExecutor(1) as executor:
        connector = MockConnector.from_envs("id", executor)
    feature = connector.feature
    assert (feature.rdma, feature.mput_mget, feature.gdr_put, feature.gdr_get) == (True, True, True, True)
    assert (feature.prefetch, feature.zero_copy) == (False, False)
