"""What the adapter's own count says and what the ledger says are the same, to the token."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from tiny_models import BLOCK, prompt, tiny_llama

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.integration.base import Rate
from kvcache_factory.integration.transformers import TransformersCacheAdapter
from kvcache_factory.integration.transformers.first_token import FirstToken
from kvcache_factory.integration.transformers.observing import AttentionMass


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


def test_the_watch_of_another_request_may_leave_during_a_pass() -> None:
    """Torch lists whom to call before it looks up who wants keywords: one that leaves in between is given none."""
    model, seen = tiny_llama(), list[float]()
    space: Any = SimpleNamespace(first_token=seen.append)
    watch = FirstToken(model, True, Rate(0.0)).of(space)
    model.register_forward_hook(lambda *_: watch.__exit__())
    other = threading.Thread(target=watch.__enter__)
    other.start()
    other.join()
    model(input_ids=prompt(8))
    assert seen == []
    assert len(model._forward_hooks) == 1


def test_an_observer_of_another_cache_may_leave_during_a_pass() -> None:
    """As the watch for first tokens, before and after a layer."""
    model = tiny_llama()
    plain = model(input_ids=prompt(8)).logits
    for register in ("register_forward_pre_hook", "register_forward_hook"):
        cache = SimpleNamespace(layers=[None] * model.config.num_hidden_layers)
        observer = AttentionMass(model, cache, 0, 8)
        leaving = getattr(observer.modules[0], register)(lambda *_, observer=observer: observer.__exit__())
        observer.__enter__()
        assert torch.equal(model(input_ids=prompt(8)).logits, plain)
        leaving.remove()
        assert observer.mass is None
        assert not observer.modules[0]._forward_hooks
