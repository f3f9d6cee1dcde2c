"""What the adapter's own count says and what the ledger says are the same, to the token."""

from __future__ import annotations

import torch
from tiny_models import BLOCK, tiny_llama

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.integration.transformers import TransformersCacheAdapter


def test_served_tokens_are_the_adapters_and_the_first_token_is_timed() -> None:
    """Three turns of a conversation: the first has no history, the others get all of it."""
    model = tiny_llama()
    with CacheManager(backend=CPUBackend(size_gb=0.02), enable_metrics=True) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, block_tokens=BLOCK)
        tokens = torch.arange(1, 4 * BLOCK).remainder(50).add(1).reshape(1, -1)
        for _ in range(3):
            tokens = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=BLOCK, do_sample=False
            )
        manager.wait()
        state, status = manager.state(), adapter.status()
        assert state["served_tokens"] == status["reused_tokens"] > 0
        assert state["hit_rate"] == 1.0
        first = next(row for row in state["durations"] if row["operation"] == "first_token")
        assert first["count"] == status["requests"] == 3
        assert not model._forward_hooks
        adapter.detach()
        assert manager.check() == []


def test_nothing_is_hooked_into_the_model_where_nothing_is_measured() -> None:
    """A forward hook costs, so it is there only with enable_metrics=True."""
    model, seen = tiny_llama(), []
    register = model.register_forward_hook
    model.register_forward_hook = lambda *a, **k: seen.append(a) or register(*a, **k)
    with CacheManager(backend=CPUBackend(size_gb=0.02)) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, block_tokens=BLOCK)
        tokens = torch.ones(1, 2 * BLOCK, dtype=torch.long)
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=False)
        adapter.detach()
    assert seen == []
