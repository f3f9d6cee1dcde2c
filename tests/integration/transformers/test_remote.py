"""A remote level under the Transformers adapter: one process warms another, and a dead store costs only its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvcache_factory import CacheManager, CPUBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.connector import mock
from kvcache_factory.integration.transformers import TransformersCacheAdapter
from kvcache_factory.keyspace import MAX_WAIT_S

SHARE = "transformers"
PROMPT = torch.arange(1, 41)[None]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    mock.forget(SHARE)


@contextmanager
def attached(model: LlamaForCausalLM, **options: Any) -> Iterator[tuple[CacheManager, TransformersCacheAdapter]]:
    """A manager of its own above the shared store, and the model attached to it."""
    level = {"connector": "MOCK", "options": {"share": SHARE}, "ingestion": "all", **options}
    patient = {"per_token_timeout_ms": 60_000.0, "max_wait_s": 60.0, **level}
    with CacheManager(HierarchicalBackend([CPUBackend(size_gb=0.02), RemoteBackend(**patient)])) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, block_tokens=4)
        try:
            yield manager, adapter
        finally:
            adapter.detach()
        assert manager.wait(60)
        assert manager.check() == []


def generate(model: LlamaForCausalLM) -> torch.Tensor:
    output = model.generate(PROMPT, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(PROMPT))
    assert isinstance(output, torch.Tensor)
    return output


def test_a_second_process_is_warm(model: LlamaForCausalLM) -> None:
    """Its memory is empty; what the first one stored is there when it looks, and the output is the same."""
    plain = generate(model)
    with attached(model) as (manager, _):
        assert torch.equal(generate(model), plain)
        manager.wait(60)
    with attached(model) as (manager, _):
        assert torch.equal(generate(model), plain)
        hits = {(row["tier"], row["event"]): row["blocks"] for row in manager.state()["events"]}
        assert hits["remote", "hit"] >= 9
        assert hits["cpu", "loaded"] >= 9


def test_a_dead_store_is_a_miss(model: LlamaForCausalLM) -> None:
    """Generation goes on as without a cache."""
    plain = generate(model)
    with attached(model) as (manager, _):
        level = manager._chain.remote
        assert level is not None
        level.store._connector.close()  # type: ignore[attr-defined]
        assert torch.equal(generate(model), plain)


def test_nobody_waits_longer_than_computing_takes(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was measured the bound is the fixed one; then it is what the prompt's missing part would take."""
    waits: list[float] = []
    with attached(model) as (manager, adapter):
        monkeypatch.setattr(type(adapter.space), "ask_remotely", lambda space, chains, wait_s: waits.append(wait_s))
        generate(model)
        assert waits == [MAX_WAIT_S]
        rate = adapter._prefill.value
        assert rate > 0
        adapter._prefill.value = 1000.0
        generate(model)  # what the first call stored is in memory: 11 blocks of 4 tokens, more than the prompt
        assert waits[1:] == [0.0]
        adapter._prefill.value = 1000.0
        manager.reset()
        generate(model)
        assert waits[2:] == [40 / 1000.0]
