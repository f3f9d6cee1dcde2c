"""The benchmark of connectors: both sides move the same bytes, and what comes back wrong is no figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.servers import redis_server

from kvcache_factory.bench import l2, raw_clients
from kvcache_factory.connector import mock
from kvcache_factory.connector.mock import MockConnector
from kvcache_factory.errors import ConfigError, StoreError

OWN = "kvcache_factory.connector.mock:MockConnector"


@pytest.mark.parametrize(("connector", "compared"), [("MOCK", True), ("shfs", True), ("ROCKSDB", True), (OWN, False)])
def test_a_row_for_each_way_and_size(connector: str, compared: bool) -> None:
    """With a ratio where there is a yardstick; a store in a directory gets one of its own."""
    if connector == "ROCKSDB":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    rows = l2.run_l2(connector, quick=True)
    assert [(row["op"], row["block_bytes"]) for row in rows] == [
        ("put", 128 << 10), ("get", 128 << 10), ("put", 2 << 20), ("get", 2 << 20)
    ]  # fmt: skip
    shown = connector if connector == OWN else connector.upper()
    assert all(row["connector"] == shown and row["gb_s"] >= 0 and row["rounds"] == 1 for row in rows)
    assert all(
        (row[key] is not None) == compared for row in rows for key in ("beside", "ratio", "verified_ratio", "raw_gb_s")
    )


def test_options_reach_the_connector() -> None:
    """As name=value; anything else is an error."""
    l2.run_l2("MOCK", ["share=bench"], quick=True)
    assert mock._shared["bench"] == {}, "what was stored is deleted"
    with pytest.raises(ConfigError, match="name=value"):
        l2.run_l2("MOCK", ["share"], quick=True)
    with pytest.raises(ConfigError, match=r"no option 'shared'; use use_rdma"):
        l2.run_l2("MOCK", ["shared=x"], quick=True)
    with pytest.raises(ConfigError, match="use_noop='perhaps'"):
        l2.run_l2("MOCK", ["use_noop=perhaps"], quick=True)
    with pytest.raises(ConfigError, match="did you mean"):
        l2.run_l2("MOK", quick=True)


def test_wrong_bytes_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that loses or changes blocks is an error, not a rate."""

    async def nothing(self: MockConnector, key: bytes, mr: Any) -> Any:
        return mock.Status()

    monkeypatch.setattr(MockConnector, "get", nothing)
    with pytest.raises(StoreError, match="came back wrong"):
        l2.run_l2("MOCK", quick=True)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="after 0 of"):
        l2.run_l2("MOCK", ["use_noop=true"], quick=True)


def test_raw_files_give_back_what_they_took(tmp_path: Path) -> None:
    """The yardstick does the same work."""
    client = raw_clients.RawFiles({"root": tmp_path})
    target = bytearray(2 * 5000)
    views = [memoryview(target)[:5000], memoryview(target)[5000:]]
    client.put([b"a", b"b"], [memoryview(b"x" * 5000), memoryview(b"y" * 5000)])
    client.get([b"b", b"a"], views)
    assert bytes(target) == b"y" * 5000 + b"x" * 5000


def test_a_slow_store_gets_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the time that a size has, no round begins, once there are three; the rows say how many there were."""
    monkeypatch.setattr(l2, "_SIZE_S", 0.0)
    monkeypatch.setattr(l2, "_TOTAL_BYTES", 8 << 20)
    assert [row["rounds"] for row in l2.run_l2("MOCK")] == [3] * 4


@pytest.mark.parametrize("size", [64 << 10, 3 << 20])
@pytest.mark.parametrize("client", ["socket", "redis-py"])
def test_raw_redis_gives_back_what_it_took(client: str, size: int) -> None:
    """Whatever share of the answers it asks for ahead."""
    if client == "redis-py":
        pytest.importorskip("redis", reason="the package redis is not installed")
    with redis_server() as server:
        clients = raw_clients.raw_clients("REDIS", {"url": server.url})
        raw = clients[client]
        names, sent = [b"%d" % i for i in range(5)], [bytes([i]) * size for i in range(5)]
        raw.put(names, [memoryview(value) for value in sent])
        target = [bytearray(size) for _ in names]
        raw.get(names, [memoryview(value) for value in target])
        assert target == sent
        for each in clients.values():
            each.close()


@pytest.mark.parametrize("connector", ["SHFS", "ROCKSDB"])
def test_a_directory_that_is_given_can_be_measured_again_and_again(connector: str, tmp_path: Path) -> None:
    """Yardsticks have directories of their own in it, which go with them: an old database is no empty one."""
    if connector == "ROCKSDB":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    for _ in range(2):
        assert len(l2.run_l2(connector, [f"root={tmp_path}"], quick=True)) == 4
    assert not list(tmp_path.glob("raw-*"))


def test_a_yardstick_whose_package_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured."""
    monkeypatch.setattr(raw_clients, "find_spec", lambda name: None)
    with redis_server() as server:
        rows = l2.run_l2("REDIS", [f"url={server.url}"], quick=True)
    assert {row["beside"] for row in rows} == {"socket"}
