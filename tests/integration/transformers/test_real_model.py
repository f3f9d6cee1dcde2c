"""A real language model, SmolLM2-135M-Instruct, converted once into the user's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.block.identity import fingerprint_directory
from kvcache_factory.demo.model import ensure_model, load_model
from kvcache_factory.integration.transformers import TransformersCacheAdapter

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model")]

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
FACTS = (
    "Facts about the lighthouse of Kervo. It was built in 1873 by Anna Lindqvist. It is 41 metres high and painted "
    "green and white. Its lamp is seen from 19 miles away. The keeper lives in the house beside it with two goats, "
    "which are called Salt and Pepper. Boats come on Mondays. Read the facts and answer my questions briefly."
)


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    return load_model("float32")


@pytest.fixture
def adapter(real: tuple[Any, Any]) -> Iterator[TransformersCacheAdapter]:
    model, tokenizer = real
    with CacheManager(backend=CPUBackend(size_gb=0.1)) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, tokenizer=tokenizer)
        yield adapter
        adapter.detach()
        assert manager.check() == []


def test_it_is_named_by_its_directory(adapter: TransformersCacheAdapter) -> None:
    """The converted files, the live model and ``doctor`` agree on whose KV it is."""
    assert adapter.status()["fingerprint"] == fingerprint_directory(ensure_model("float32"))
    spec = adapter.space.spec
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.rope.theta) == (30, 3, 64, 100000.0)


def test_a_conversation_is_answered_in_context_from_loaded_blocks(adapter: TransformersCacheAdapter) -> None:
    """Turn 2 asks about turn 1: answered from its facts, with every full block of turn 1 loaded, and as without."""
    session = adapter.manager.create_session("lighthouse")
    messages = [{"role": "user", "content": f"{FACTS} In which year was it built?"}]
    first = adapter.chat(session, messages, **GREEDY)
    assert "1873" in first.text
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Who built it?"}]
    second = adapter.chat(session, messages, **GREEDY)
    assert "Lindqvist" in second.text
    held = first.prompt_tokens + len(first.token_ids) - 1
    assert second.reused_tokens == held // 64 * 64 > 100
    adapter.detach()
    assert adapter.chat(session, messages, **GREEDY).token_ids == second.token_ids


@pytest.mark.parametrize(
    "settings", [{"num_beams": 2}, {"do_sample": True, "temperature": 0.9}], ids=["beams", "sample"]
)
def test_other_ways_of_decoding(
    real: tuple[Any, Any], adapter: TransformersCacheAdapter, settings: dict[str, Any]
) -> None:
    """Beams and seeded samples are those of the plain model, from loaded blocks."""
    model, tokenizer = real
    inputs = tokenizer(FACTS, return_tensors="pt")

    def run(generate: Callable[..., torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(11)
        return generate(**inputs, **{**GREEDY, "max_new_tokens": 6, **settings})

    plain = run(lambda **call: type(model).generate(model, **call))
    assert torch.equal(run(model.generate), plain)
    assert torch.equal(run(model.generate), plain)
    assert adapter.status()["reused_tokens"] == 64


def test_a_padded_batch(real: tuple[Any, Any], adapter: TransformersCacheAdapter) -> None:
    """Questions of different lengths behind one text, in one batch."""
    model, tokenizer = real
    tokenizer.padding_side = "left"
    questions = [f"{FACTS} How high is it?", f"{FACTS} What are the names of the goats of the keeper?"]
    batch = tokenizer(questions, return_tensors="pt", padding=True)
    call = {**batch, **GREEDY, "max_new_tokens": 6}
    plain = type(model).generate(model, **call)
    for _ in range(2):
        assert torch.equal(model.generate(**call), plain)
    assert adapter.status()["hits"] == 2


def test_bfloat16_starts_as_without_the_cache() -> None:
    """In bf16 rounding may part the answers later; the first tokens, far from a tie, are the same."""
    model, tokenizer = load_model("bfloat16")
    inputs = tokenizer(f"{FACTS} The lighthouse was built in", return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    with CacheManager(backend=CPUBackend(size_gb=0.1)) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager)
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), plain)
        assert adapter.status()["reused_tokens"] == 64
        adapter.detach()
