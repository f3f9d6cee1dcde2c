"""Two real engines, one after the other, over one Redis: what the first has computed, the second loads."""

from __future__ import annotations

from typing import Any

import pytest
from engines import needs_vllm, play
from tests.servers import redis_server

pytestmark = [needs_vllm, pytest.mark.soak]


def over(url: str, **options: Any) -> dict[str, Any]:
    """An engine's manager: memory above the server, with patience for a busy machine."""
    remote = {"type": "remote", "connector": "REDIS", "options": {"url": url, "timeout_s": 60.0}, **options}
    patient = {"per_token_timeout_ms": 60_000, "max_wait_s": 60, "ingestion": "all", **remote}
    memory = {"type": "cpu", "size_gb": 0.25}
    return {"manager": {"backend": {"type": "hierarchical", "levels": [memory, patient]}}}


def test_a_second_engine_is_warm() -> None:
    """It asks when a request arrives, loads what has come, and gives the same answer as without a cache."""
    with redis_server() as server:
        cold = play("answer_once", "settle", connector=over(server.url))["answer_once"]
        assert cold["answer"]["cached"] == [0]
        played = play("answer_once", "figures", connector=over(server.url))
        warm = played["answer_once"]
        assert warm["answer"]["cached"] == [640]
        assert warm["answer"]["ids"] == cold["answer"]["ids"] == warm["expected"] == cold["expected"]
        assert (played["figures"]["check"], played["figures"]["leases"]) == ([], 0)
