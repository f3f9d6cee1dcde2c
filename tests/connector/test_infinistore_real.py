"""INFINISTORE over TCP with its real client and server (0.2.35), as far as a machine without RDMA can have them.

Two things are not as a user has them: the server sees an RDMA device that does not exist (``fake_verbs.c``, without
which it refuses to start), and runs without its management port.  The protocol, client and store are theirs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.servers import Server, free_port, program, until

from kvcache_factory.connector import Connector
from kvcache_factory.connector.infinistore import InfiniStoreConnector, InfiniStoreOptions, InfiniStoreTCP
from kvcache_factory.testing.connectors import PAGE, Call, ConnectorTests, Memory

PACKAGES = Path(__file__).parents[2] / ".venv-infinistore"
_SERVER = """
import asyncio, sys, uvloop, infinistore
loop = uvloop.new_event_loop()
asyncio.set_event_loop(loop)
config = infinistore.ServerConfig(
    service_port=int(sys.argv[1]), manage_port=1, prealloc_size=1, minimal_allocate_size=16, dev_name="fake0",
    link_type="IB", log_level="error")
infinistore.register_server(loop, config)
loop.run_forever()
"""


@contextmanager
def infinistore_server() -> Iterator[Server]:
    """A server with a pool of 1 GiB; skips the test, with the reason, where it cannot be had."""
    if not (PACKAGES / "infinistore").is_dir():
        pytest.skip("infinistore is not installed (make setup installs it where it can be had)")
    compiler, source = program("cc"), Path(__file__).with_name("fake_verbs.c")
    with tempfile.TemporaryDirectory(prefix="kvcache-factory-infinistore-") as name, ExitStack() as stack:
        library = Path(name) / "libfake_verbs.so"
        built = subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True)
        if built.returncode:
            pytest.skip(f"the device that does not exist cannot be built: {built.stderr.splitlines()[0]}")
        port = free_port()
        environment = ["env", f"LD_PRELOAD={library}", f"PYTHONPATH={PACKAGES}"]
        server = Server([*environment, sys.executable, "-c", _SERVER, str(port)], port, Path(name))
        stack.callback(server.close)
        wait_for(server)
        yield server


def wait_for(server: Server) -> None:
    """Until it takes connections, or has ended."""
    import socket

    def listens() -> bool:
        assert server.process.poll() is None, (server.directory / f"{server.port}.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", server.port)) == 0

    until(listens, "the server of InfiniStore listens")


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with infinistore_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))  # helpers have the path of their parent


def made(executor: Executor, port: int, **options: Any) -> Any:
    given = InfiniStoreOptions(connection_type="TCP", service_port=port, **options)
    return InfiniStoreConnector.from_options("conn", executor, given)


class Prefixed(InfiniStoreTCP):
    """Keys of one test only: the server cannot be emptied."""

    prefix = b""

    def _ask_locked(self, call: Any, verb: str, keys: Sequence[bytes], places: Any) -> Any:
        return super()._ask_locked(call, verb, [self.prefix + key for key in keys], places)


class TestInfiniStoreTCP(ConnectorTests):
    @pytest.fixture(autouse=True)
    def _server(self, shared_server: Server, tmp_path: Path) -> None:
        self.port = shared_server.port

    @pytest.fixture
    def size(self) -> int:
        """One block of a small model."""
        return 2 << 20

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        connector = Prefixed("conn", executor, InfiniStoreOptions(connection_type="TCP", service_port=self.port))
        connector.prefix = f"{directory}/".encode()
        return connector


def test_a_server_that_is_killed_and_comes_back(executor: Executor, call: Call) -> None:
    """Its client would crash this process: here a call fails, and the next server is used without being told."""
    memory = Memory(PAGE)
    with infinistore_server() as server:
        connector = made(executor, server.port, timeout_s=3.0)
        assert connector.open().is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()
        server.kill()
        for _ in range(3):
            assert not call(connector.get(b"key", memory[1])).is_ok()
        server.start()
        wait_for(server)
        until(lambda: call(connector.put(b"key", memory[0])).is_ok(), "the new server is used")
        assert call(connector.get(b"key", memory[2])).is_ok()
        assert np.array_equal(memory.row(memory.bytes, 2), memory.original(0))
        connector.close()


def test_a_frozen_server_is_a_timeout(executor: Executor, call: Call) -> None:
    """SIGSTOP: the helper is killed after its deadline, and the server is used again when it goes on."""
    memory = Memory(PAGE)
    with infinistore_server() as server:
        connector = made(executor, server.port, timeout_s=1.0, start_timeout_s=2.0)
        assert connector.open().is_ok()
        server.freeze()
        assert call(connector.put(b"key", memory[0])).is_timeout()
        server.thaw()
        until(lambda: call(connector.put(b"key", memory[0])).is_ok(), "the server is used again")
        connector.close()
