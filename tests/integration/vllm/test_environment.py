"""Two engines that only the offloading framework's variables configure: the second one is warm by way of Redis."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import TIMEOUT_S, environment, needs_vllm

from kvcache_factory.demo.model import ensure_model

pytestmark = [needs_vllm, pytest.mark.soak]
PROGRAM = Path(__file__).with_name("environment_program.py")


def run(**variables: str) -> dict[str, Any]:
    named = {f"AIBRIX_KV_CACHE_OL_{name}": value for name, value in variables.items()}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(ensure_model("float32"))],
        env=environment(**named),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, f"no result, exit status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    result: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT "))
    return result


def test_a_deployment_moves_over_without_editing_a_line() -> None:
    """Twelve of 400 tokens' blocks of 32 come from the server, and the answer is the same; a limit is kept to."""
    servers = pytest.importorskip("tests.servers", reason="the root of the checkout is not on the path")
    with servers.redis_server() as server:
        variables = {
            "L1_CACHE_CAPACITY_GB": "0.25",
            "L2_CACHE_BACKEND": "REDIS",
            "L2_CACHE_INGESTION_TYPE": "ALL",
            "REDIS_URL": server.url,
        }
        cold, warm, limited = run(**variables), run(**variables), run(**variables, MAX_SEQ_LEN="200")
    assert cold["cached"] == 0
    assert warm == {"cached": 384, "ids": cold["ids"]}
    assert limited == {"cached": 192, "ids": cold["ids"]}
