"""Profiles reach a Pyroscope server (a stand-in that takes pushes) by the real agent, in a process of its own."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvcache_factory import CacheManager, MissingDependencyError
from kvcache_factory.environment import PREFIX
from kvcache_factory.testing import tiny_identity, tiny_spec

pytest.importorskip("pyroscope", reason="pyroscope-io is not installed (pip install 'kvcache-factory[profiling]')")

PROGRAM = """
import sys, time
from kvcache_factory import CacheManager
from kvcache_factory.testing import tiny_identity, tiny_spec

def busy_in_this_function(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))

managers = [CacheManager.from_env(l1_cache_capacity_gb=0.01) for _ in range(2)]
for manager in managers:
    manager.register(tiny_spec(), tiny_identity(tiny_spec()))
managers[0].close()
busy_in_this_function(1.0)  # the other one goes on
managers[1].close()
print("done")
"""


class Server:
    """Takes pushes as a Pyroscope server does, and keeps them."""

    def __init__(self) -> None:
        self.pushes: list[tuple[str, bytes]] = []
        pushes = self.pushes

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                zipped = self.headers.get("Content-Encoding") == "gzip"
                pushes.append((self.path, gzip.decompress(body) if zipped else body))
                self.send_response(200)
                self.send_header("Content-Type", "application/proto")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self._thread.join()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **{PREFIX + name: value for name, value in variables.items()}}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=120)


def unpacked(body: bytes) -> bytes:
    """A push, and the profiles inside it, which may be compressed once more."""
    found, at = body, body.find(b"\x1f\x8b\x08")
    while at >= 0:
        found += zlib.decompressobj(31).decompress(body[at:])
        at = body.find(b"\x1f\x8b\x08", at + 1)
    return found


def test_profiles_are_pushed_while_a_manager_is_open(server: Server) -> None:
    """PROFILING_ENABLED: the function that was busy is in what the server got, under the documented name."""
    done = run(PROFILING_ENABLED="1", PROFILING_SERVER_ADDRESS=server.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert {path for path, _ in server.pushes} == {"/push.v1.PusherService/Push"}
    everything = b"".join(unpacked(body) for _, body in server.pushes)
    assert b"aibrix.kvcache" in everything
    assert b"busy_in_this_function" in everything


def test_nothing_is_pushed_unless_it_is_wanted(server: Server) -> None:
    """The address alone starts nothing."""
    done = run(PROFILING_SERVER_ADDRESS=server.url)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert server.pushes == []


def test_a_server_that_is_not_there_harms_nobody() -> None:
    """The cache works, and closes without an error."""
    done = run(PROFILING_ENABLED="1", PROFILING_SERVER_ADDRESS="http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first model comes; describing a manager needs nothing."""
    monkeypatch.setitem(sys.modules, "pyroscope", None)
    spec = tiny_spec()
    with (
        CacheManager(profiling_server="http://127.0.0.1:4040") as manager,
        pytest.raises(MissingDependencyError, match=r"pip install 'kvcache-factory\[profiling\]'"),
    ):
        manager.register(spec, tiny_identity(spec))


class Agent:
    """Stands for the package: notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def configure(self, **options: Any) -> None:
        self.calls.append(options["server_address"])

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_process_has_one_agent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Started by the first manager, ended by the last; another address is not followed, and that is said."""
    agent = Agent()
    monkeypatch.setitem(sys.modules, "pyroscope", agent)
    managers = [
        CacheManager.from_env({}, l1_cache_capacity_gb=0.01, profiling_server=f"http://{host}:4040")
        for host in ("a", "a", "b")
    ]
    for manager in managers:
        for _ in range(2):
            manager.register(tiny_spec(), tiny_identity(tiny_spec()))
    assert "profiles go to http://a:4040 already, and not to http://b:4040" in caplog.text
    for manager in managers:
        assert agent.calls == ["http://a:4040"]
        manager.close()
        manager.close()
    assert agent.calls == ["http://a:4040", "shutdown"]
