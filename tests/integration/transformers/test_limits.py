"""Blocks and limits that the manager is told, by its arguments or the environment, hold for an attached model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.environment import PREFIX
from kvcache_factory.integration.transformers import TransformersCacheAdapter

PROMPT = torch.arange(3, 93)[None] % 60


def answer(model: LlamaForCausalLM) -> torch.Tensor:
    """Greedy, from a prompt of 90 tokens."""
    ids: torch.Tensor = model.generate(
        PROMPT, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(PROMPT)
    )
    return ids


@pytest.mark.parametrize(("asked", "tokens"), [(0, 64), (-1, 64), (32, 32)])
def test_the_managers_block_is_used(model: LlamaForCausalLM, asked: int, tokens: int) -> None:
    """Transformers has no blocks of its own: 64 unless the manager or the caller says otherwise."""
    with CacheManager(CPUBackend(size_gb=0.02), block_tokens=asked) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager)
        assert adapter.space.block_tokens == tokens
        adapter.detach()
        adapter = TransformersCacheAdapter.attach(model, manager, block_tokens=tokens)
        assert adapter.space.block_tokens == tokens
        adapter.detach()


def test_tokens_behind_the_limit_are_computed_every_time(model: LlamaForCausalLM) -> None:
    """MAX_SEQ_LEN of 50 with blocks of 16: three blocks are kept and reused, and answers stay the same."""
    plain = answer(model)
    environ = {PREFIX + "MAX_SEQ_LEN": "50", PREFIX + "BLOCK_SIZE": "16", PREFIX + "L1_CACHE_CAPACITY_GB": "0.02"}
    with CacheManager.from_env(environ) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager)
        assert torch.equal(answer(model), plain)
        assert adapter.status()["saved_blocks"] == 3
        assert torch.equal(answer(model), plain)
        status = adapter.status()
        adapter.detach()
        assert (status["reused_tokens"], status["saved_blocks"], status["last_error"]) == (48, 3, "")
        assert manager.check() == []
