"""Fixtures of the adapter's tests; what they are made of is in ``tiny_models``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.integration.transformers import TransformersCacheAdapter

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file are no package

from tiny_models import BLOCK, Outcome, byte_tokenizer, tiny_llama


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def manager() -> Iterator[CacheManager]:
    with CacheManager(backend=CPUBackend(size_gb=0.02)) as manager:
        yield manager
        assert manager.check() == []
        assert manager.state()["leases"] == 0


@pytest.fixture
def attach(manager: CacheManager) -> Iterator[Callable[..., TransformersCacheAdapter]]:
    """Attach with small blocks; whatever is still attached at the end is detached."""
    adapters: list[TransformersCacheAdapter] = []

    def attach(model: PreTrainedModel, **options: Any) -> TransformersCacheAdapter:
        adapters.append(TransformersCacheAdapter.attach(model, manager, **{"block_tokens": BLOCK, **options}))
        return adapters[-1]

    yield attach
    for adapter in adapters:
        adapter.detach()


@pytest.fixture
def thrice(attach: Callable[..., TransformersCacheAdapter]) -> Callable[..., Outcome]:
    """Run one call without the cache, then twice with it, and hold all three outputs to be equal."""

    def run(model: PreTrainedModel, seed: int | None = None, **call: Any) -> Outcome:
        def once() -> torch.Tensor:
            if seed is not None:
                torch.manual_seed(seed)
            output = model.generate(**call)
            return output if isinstance(output, torch.Tensor) else output.sequences

        plain = once()
        adapter = attach(model)
        cold, warm = once(), once()
        adapter.detach()
        status = adapter.status()
        assert status["last_error"] == ""
        assert torch.equal(plain, cold)
        assert torch.equal(plain, warm)
        return Outcome(plain, status)

    return run


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()
