"""Real servers for tests: redis, etcd, prometheus on free loopback ports, ended with the block that started them.

A test that needs a program which is not installed is skipped, and says which: ``make setup-system`` installs them.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvcache_factory.connector.resp import Access, Address, RespConnection, ServerError

PATIENCE_S = 30.0
_ATTEMPTS = 5


def program(name: str) -> str:
    """Where a program is; skips the test, with the reason, where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (make setup-system installs it)")
    return found


def free_port(span: int = 1) -> int:
    """A port that nobody listens on now; with *span*, one whose neighbour at that distance is free too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port + span > 65535:
            continue
        with socket.socket() as other, suppress(OSError):
            other.bind(("127.0.0.1", port + span))
            return port


class Server:
    """One process of a server, and how to reach it."""

    def __init__(self, command: list[str], port: int, directory: Path) -> None:
        self.command, self.port, self.directory = command, port, directory
        self._log = (directory / f"{port}.log").open("ab")
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command, stdout=self._log, stderr=self._log, cwd=self.directory)

    @property
    def url(self) -> str:
        """Where a client without a password connects."""
        return f"redis://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def freeze(self) -> None:
        """Stop it from running, without ending anything (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it run on (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)

    def start(self) -> None:
        """Start it again after it was killed, on the same port."""
        self.process = self._started()

    def close(self) -> None:
        """End it for good."""
        if self.process.poll() is None:
            self.thaw()
            self.kill()
        self._log.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until *condition* holds; fails when it never does."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"never happened: {what}"
        time.sleep(0.02)


def redis_answers(port: int, access: Access | None = None) -> bool:
    """Whether a server there answers a PING."""
    try:
        connection = RespConnection(Address(port=port), access or Access())
    except (OSError, ServerError):
        return False
    try:
        return connection.ask("PING") == "PONG"
    except (OSError, ServerError):
        return False
    finally:
        connection.close()


@contextmanager
def redis_server(*arguments: str, cluster: bool = False, access: Access | None = None) -> Iterator[Server]:
    """A redis-server that keeps nothing on a disk and takes 256 MiB at most; *arguments* are added to its own."""
    path = program("redis-server")
    with tempfile.TemporaryDirectory(prefix="kvcache-factory-redis-") as name, ExitStack() as stack:
        for attempt in range(_ATTEMPTS):  # somebody else may have taken the port meanwhile
            port = free_port(10000 if cluster else 1)
            command = [path, "--port", "0" if "--tls-port" in arguments else str(port), "--bind", "127.0.0.1"]
            command += ["--save", "", "--appendonly", "no", "--maxmemory", "256mb"]
            command += ["--maxmemory-policy", "allkeys-lru", "--enable-debug-command", "yes"]
            if cluster:
                command += ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]
                command += ["--cluster-config-file", f"{port}.conf", "--cluster-node-timeout", "2000"]
            command += [word.replace("{port}", str(port)) for word in arguments]
            server = Server(command, port, Path(name))
            stack.callback(server.close)
            until(lambda s=server: s.process.poll() is not None or redis_answers(s.port, access), "an answer to PING")
            if server.process.poll() is None:
                break
            assert attempt + 1 < _ATTEMPTS, (Path(name) / f"{port}.log").read_text()
        yield server


@contextmanager
def redis_cluster(nodes: int = 3) -> Iterator[list[Server]]:
    """A cluster of masters without replicas; slots that nobody serves do not stop the others."""
    tool = program("redis-cli")
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server(cluster=True)) for _ in range(nodes)]
        places = [f"127.0.0.1:{server.port}" for server in servers]
        made = subprocess.run(
            [tool, "--cluster", "create", *places, "--cluster-yes"], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert made.returncode == 0, made.stdout + made.stderr
        for server in servers:
            until(lambda s=server: _cluster_ok(s), "the cluster is up")
        yield servers


def _cluster_ok(server: Server) -> bool:
    connection = RespConnection(Address(port=server.port), Access())
    try:
        return b"cluster_state:ok" in connection.ask("CLUSTER", "INFO")
    finally:
        connection.close()


def make_certificates(directory: Path) -> tuple[Path, Path, Path]:
    """A certificate authority of its own, and a certificate for 127.0.0.1: files of authority, certificate and key."""
    openssl = program("openssl")
    ca_key, ca, key, request, certificate, names = (
        directory / name for name in ("ca.key", "ca.crt", "redis.key", "redis.csr", "redis.crt", "names")
    )
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    for line in (
        f"req -x509 {new} -keyout {ca_key} -out {ca} -subj /CN=test -days 2",
        f"req {new} -keyout {key} -out {request} -subj /CN=redis",
        f"x509 -req -in {request} -CA {ca} -CAkey {ca_key} -CAcreateserial -out {certificate} -days 2 -extfile {names}",
    ):
        subprocess.run([openssl, *line.split()], check=True, capture_output=True)
    return ca, certificate, key


@contextmanager
def etcd_server() -> Iterator[Server]:
    """An etcd of one member; its JSON gateway answers at ``http://127.0.0.1:{port}``."""
    path = program("etcd")
    with tempfile.TemporaryDirectory(prefix="kvcache-factory-etcd-") as name, ExitStack() as stack:
        for attempt in range(_ATTEMPTS):
            port, peers = free_port(), free_port()
            client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
            command = [path, "--data-dir", f"{name}/{port}", "--listen-client-urls", client, "--log-level", "error"]
            command += ["--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-cluster"]
            command += [f"default={peer}", "--initial-advertise-peer-urls", peer, "--unsafe-no-fsync"]
            server = Server(command[:-1], port, Path(name))
            stack.callback(server.close)
            until(lambda s=server: s.process.poll() is not None or _etcd_healthy(s.port), "etcd is healthy")
            if server.process.poll() is None:
                break
            assert attempt + 1 < _ATTEMPTS, (Path(name) / f"{port}.log").read_text()
        yield server


def _etcd_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0) as answer:
            return b'"true"' in answer.read()
    except OSError:
        return False


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[int]:
    """A real Prometheus that scrapes *target* every second, with data and log in *folder*; yields its port."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "cache", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: _prometheus_ready(port), f"prometheus: {folder / 'log'}")
        yield port
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def _prometheus_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=PATIENCE_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
