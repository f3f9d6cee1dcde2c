"""The OpenAI server with ``--kv-transfer-config``: three processes, and settings from the environment."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import TIMEOUT_S, environment, needs_vllm

from kvcache_factory.demo.model import ensure_model

pytestmark = needs_vllm

TRANSFER = {
    "kv_connector": "KVCacheFactoryConnector",
    "kv_connector_module_path": "kvcache_factory.integration.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}

SOURCES = "vllm:prompt_tokens_cached_by_source_total"


class Server:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
        return json.loads(text) if text else None

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a Prometheus counter over those of its labels that contain *label*."""
        rows = [row for row in self.get("/metrics").splitlines() if row.startswith(name) and label in row]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


@contextmanager
def serving(model: str, log: Path, **variables: str) -> Iterator[Server]:
    """A server on a free port, ready for requests; ended at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"model": model, "host": "127.0.0.1", "port": str(port), "dtype": "float32", "max-model-len": "1024",
               "block-size": "64", "kv-cache-memory-bytes": str(256 << 20),
               "kv-transfer-config": json.dumps(TRANSFER)}  # fmt: skip
    listed = [word for name, value in options.items() for word in (f"--{name}", value)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *listed, "--enforce-eager"],
            env=environment(processes=True, VLLM_SERVER_DEV_MODE="1", **variables),
            stdout=output,
            stderr=output,
        )
        try:
            server = Server(port)
            _wait_for(process, server, log)
            yield server
        finally:
            process.terminate()
            process.wait(120)


def _wait_for(process: subprocess.Popen[bytes], server: Server, log: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"the server does not answer:\n{log.read_text(errors='replace')[-4000:]}")


def test_a_server_and_its_successor(tmp_path: Path) -> None:
    """A completion is computed, then loaded from DRAM, then by another server from the directory: always the same."""
    model = str(ensure_model("float32"))
    patient = tmp_path / "kv.toml"
    patient.write_text("[vllm]\nlookup_wait_s = 60\nmax_wait_s = 60\n")
    variables = {
        "KVCACHE_FACTORY_MEMORY_GB": "0.25",
        "KVCACHE_FACTORY_DISK_PATH": str(tmp_path / "kv"),
        "KVCACHE_FACTORY_DISK_GB": "1",
        "KVCACHE_FACTORY_LOAD_DECISION": "always",
        "KVCACHE_FACTORY_CONFIG_FILE": str(patient),
    }
    body = {
        "model": model,
        "prompt": [(7 * i * i + 11 * i) % 40_000 + 10 for i in range(500)],
        "max_tokens": 12,
        "temperature": 0,
        "kv_transfer_params": {"session_id": "a visitor"},
    }
    with serving(model, tmp_path / "log", **variables) as server:
        cold = server.post("/v1/completions", body)
        server.post("/reset_prefix_cache")
        warm = server.post("/v1/completions", body)
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
        assert warm["kv_transfer_params"] == {"loaded_tokens": 448, "session_id": "a visitor"}
        assert server.metric("vllm:kvcache_factory_blocks_loaded_total") == 7
        assert server.metric("vllm:kvcache_factory_blocks_saved_total") == 7
        assert server.metric(SOURCES, 'source="host"') == 448
        assert server.metric("vllm:external_prefix_cache_hits_total") == 448
        time.sleep(2)
    with serving(model, tmp_path / "log", **variables) as server:
        again = server.post("/v1/completions", body)
        assert again["choices"][0]["text"] == cold["choices"][0]["text"]
        assert again["kv_transfer_params"]["loaded_tokens"] == 448
        assert server.metric(SOURCES, 'source="disk"') == 448
