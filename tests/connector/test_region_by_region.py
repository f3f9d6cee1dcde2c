"""Connectors that take regions when they are ready, and say when each has come: in one call for a batch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.servers import redis_cluster, redis_server

from kvcache_factory.connector.base import ConnectorConfig
from kvcache_factory.connector.names import create_connector
from kvcache_factory.connector.shfs import SharedFilesConnector
from kvcache_factory.memory.slab import Slab
from kvcache_factory.store.remote import RemoteSettings, RemoteStore
from kvcache_factory.testing import tiny_spec

SPEC = tiny_spec()
NAMES = [b"name/%d" % n for n in range(8)]
ROWS = np.arange(8, dtype=np.int32)


@pytest.fixture(params=["SHFS", "ROCKSDB", "REDIS", "CLUSTER"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A connector and its options."""
    if request.param == "ROCKSDB":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    if request.param in ("SHFS", "ROCKSDB"):
        yield request.param, {"root": str(tmp_path), **({"min_free_gb": 0.0} if request.param == "SHFS" else {})}
        return
    with contextlib.ExitStack() as stack:
        if request.param == "CLUSTER":
            server = stack.enter_context(redis_cluster())[0]
        else:
            server = stack.enter_context(redis_server())
        yield "REDIS", {"url": server.url}


@pytest.fixture
def store(place: tuple[str, dict[str, Any]]) -> Iterator[tuple[RemoteStore, Slab]]:
    """A store of pieces of one block around it, and memory."""
    name, options = place
    made = RemoteStore(
        lambda executor: create_connector(ConnectorConfig(name, "tests", "0", executor), options),
        RemoteSettings(name=name, sent_piece_bytes=1, look_bytes=1),
    )
    slab = Slab(8, SPEC.slot_bytes, huge_pages=False)
    made.open(SPEC, [slab], 8)
    yield made, slab
    made.close()
    slab.close()


def test_blocks_are_put_as_they_were_prepared_and_checked_as_they_came(store: tuple[RemoteStore, Slab]) -> None:
    """Each is written before it is sent, shorter where that was said, and seen once, in order, with what it holds."""
    remote, slab = store
    slab.view[:] = 0

    def prepare(part: slice) -> list[int]:
        for block in range(part.start, part.stop):
            slab.view[block] = block + 1
        return [SPEC.slot_bytes - (SPEC.slot_bytes - SPEC.header_bytes) * (part.start % 2)]

    assert remote.put(NAMES, slab, ROWS, 60, prepare=prepare).count == 8
    slab.view[:] = 0
    seen: list[int] = []

    def check(part: slice) -> None:
        for block in range(part.start, part.stop):
            assert set(slab.view[block, : SPEC.header_bytes]) == {block + 1}
            assert set(slab.view[block, SPEC.header_bytes :]) == {0 if block % 2 else block + 1}
            seen.append(block)

    done = remote.get(NAMES, slab, ROWS, 60, check=check)
    assert (done.count, done.reason, seen) == (8, "", list(range(8)))


def test_what_is_never_ready_is_not_put(store: tuple[RemoteStore, Slab]) -> None:
    """What was ready before it is there and counted; what is behind it is not; the connection is as good as before."""
    remote, slab = store

    def prepare(part: slice) -> None:
        if part.start == 5:
            raise ValueError("broken")

    for _ in range(2):
        done = remote.put(NAMES, slab, ROWS, 60, prepare=prepare)
        assert (done.done, done.count, done.reason, done.detail) == (True, 5, "not_ready", "ValueError: broken")
        assert [remote.exists([name], 60).count for name in NAMES] == [1] * 5 + [0] * 3
    late = remote.put(NAMES[5:], slab, ROWS[5:], 0, prepare=lambda part: None)
    assert late.wait(60)
    assert (late.count, late.reason) == (0, "timeout")
    assert remote.get(NAMES, slab, ROWS, 60).count == 5
    assert remote.delete(NAMES, 60).count == 8


def test_a_value_that_is_missing_ends_what_is_checked(store: tuple[RemoteStore, Slab]) -> None:
    """Those behind it have come too, and are not looked at."""
    remote, slab = store
    assert remote.put(NAMES, slab, ROWS, 60).count == 8
    assert remote.delete(NAMES[3:4], 60).count == 1
    seen: list[int] = []
    done = remote.get(NAMES, slab, ROWS, 60, check=lambda part: seen.extend(range(part.start, part.stop)))
    assert (done.count, done.reason, seen) == (3, "absent", [0, 1, 2])


def test_a_block_is_checked_while_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call: its second value is read only after the first was checked."""
    checked, get = threading.Event(), SharedFilesConnector._get

    def reading(self: SharedFilesConnector, key: bytes, mr: Any) -> Any:
        assert key == NAMES[0] or checked.wait(60)
        return get(self, key, mr)

    monkeypatch.setattr(SharedFilesConnector, "_get", reading)
    options = {"root": str(tmp_path), "min_free_gb": 0.0}
    remote = RemoteStore(
        lambda executor: create_connector(ConnectorConfig("SHFS", "tests", "0", executor), options),
        RemoteSettings(name="SHFS", piece_bytes=1, look_bytes=1),
    )
    slab = Slab(8, SPEC.slot_bytes, huge_pages=False)
    remote.open(SPEC, [slab], 8)
    assert remote.put(NAMES, slab, ROWS, 60).count == 8
    assert remote.get(NAMES, slab, ROWS, 60, check=lambda part: checked.set()).count == 8
    remote.close()
    slab.close()
