"""Requests that a warm cache would corrupt, or that ask for something else, are left alone and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import left_padded, prompt, tiny_llama
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM

from kvcache_factory.errors import UnsupportedGenerationError
from kvcache_factory.integration.base import QUIET_REQUESTS
from kvcache_factory.integration.transformers import TransformersCacheAdapter

Attach = Callable[..., TransformersCacheAdapter]
VERSION_4 = transformers.__version__ < "5"
CACHE = "past_key_values" if VERSION_4 else "cache"


def own_cache(model: LlamaForCausalLM) -> DynamicCache:
    """A cache of the caller's own that holds the first 40 tokens of the prompt."""
    cache = DynamicCache(config=model.config)
    model(prompt(64)[:, :40], **{CACHE: cache})
    return cache


def embedded(model: LlamaForCausalLM) -> dict[str, Any]:
    return {"inputs_embeds": model.get_input_embeddings()(prompt(64)).detach()}


def right_padded() -> dict[str, torch.Tensor]:
    batch = left_padded(64, 40)
    return {name: tensor.flip(1) for name, tensor in batch.items()}


CASES: dict[str, tuple[str, Callable[[LlamaForCausalLM], dict[str, Any]]]] = {
    "prompt lookup": ("assisted decoding", lambda m: {"inputs": prompt(64), "prompt_lookup_num_tokens": 3}),
    "assistant": ("assisted decoding", lambda m: {"inputs": prompt(64), "assistant_model": tiny_llama(1)}),
    "own cache": ("a cache of the caller's own", lambda m: {"inputs": prompt(64), CACHE: own_cache(m)}),
    "own cache, old name": (
        "a cache of the caller's own",
        lambda m: {"inputs": prompt(64), "past_key_values": own_cache(m)},
    ),
    "static": ("cache_implementation", lambda m: {"inputs": prompt(64), "cache_implementation": "static"}),
    "no cache": ("use_cache=False", lambda m: {"inputs": prompt(64), "use_cache": False}),
    "embeddings": ("inputs other than token ids", embedded),
    "positions": (
        "inputs other than token ids",
        lambda m: {"inputs": prompt(64), "position_ids": torch.arange(64)[None]},
    ),
    "no input": ("inputs other than token ids", lambda m: {}),
    "right padding": ("attention mask other than left padding", lambda m: right_padded()),
    "holes": (
        "attention mask other than left padding",
        lambda m: {"inputs": prompt(64), "attention_mask": (torch.arange(64) % 7 > 0).long()[None]},
    ),
}


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_what_a_cache_must_not_touch(case: str, model: LlamaForCausalLM, attach: Attach) -> None:
    """With the prompt stored, the call gives what it gives without the adapter, and the reason is counted."""
    reason, make = CASES[case]
    plain = model.generate(**make(model), max_new_tokens=8, do_sample=False)
    adapter = attach(model)
    model.generate(prompt(64), max_new_tokens=2, do_sample=False)
    before = adapter.status()["lookups"]
    assert torch.equal(model.generate(**make(model), max_new_tokens=8, do_sample=False), plain)
    status = adapter.status()
    assert status["bypassed"] == {reason: 1}
    assert (status["lookups"], status["errors"]) == (before, 0)


def test_assisted_decoding_can_be_refused_instead(model: LlamaForCausalLM, attach: Attach) -> None:
    """A strict adapter says what would happen, before anything does."""
    attach(model, strict=True)
    with pytest.raises(UnsupportedGenerationError, match="strict=False"):
        model.generate(prompt(64), prompt_lookup_num_tokens=3, max_new_tokens=4)


def test_a_warm_cache_would_corrupt_prompt_lookup(model: LlamaForCausalLM) -> None:
    """Why the guard is there: Transformers feeds the whole prompt again behind the cached prefix.

    When this fails, a version of Transformers has mended it, and the guard can learn about that version.
    """
    cache = own_cache(model)
    output = model.generate(
        prompt(64),
        prompt_lookup_num_tokens=3,
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        **{CACHE: cache},
    )
    held = cache.layers[0].keys.shape[2]
    assert held > output.sequences.shape[1] or VERSION_4


def test_the_assistant_may_be_attached_too(model: LlamaForCausalLM, attach: Attach) -> None:
    """An attached model that drafts for another one is called by Transformers with its own cache: left alone."""
    drafter = tiny_llama(1)
    call = {"assistant_model": drafter, "max_new_tokens": 8, "do_sample": False}
    plain = model.generate(prompt(64), **call)
    adapter = attach(drafter)
    drafter.generate(prompt(64), max_new_tokens=2)
    assert torch.equal(model.generate(prompt(64), **call), plain)
    assert adapter.status()["lookups"] == 1


def test_the_default_kind_of_cache_may_be_named(model: LlamaForCausalLM, attach: Attach) -> None:
    """``cache_implementation="dynamic"`` is what the adapter makes, as an argument and in a GenerationConfig."""
    config = GenerationConfig(max_new_tokens=5, do_sample=False, cache_implementation="dynamic")
    plain = model.generate(prompt(64), generation_config=config)
    adapter = attach(model)
    for _ in range(2):
        assert torch.equal(model.generate(prompt(64), generation_config=config), plain)
    again = model.generate(prompt(64), max_new_tokens=5, do_sample=False, cache_implementation="dynamic")
    assert torch.equal(again, plain)
    assert adapter.status()["hits"] == 2
    assert config.cache_implementation == "dynamic"


def test_a_model_in_training_with_dropout_is_left_alone(attach: Attach) -> None:
    """Dropout makes KV that nobody should get again; training mode alone, without dropout, does not."""
    model = tiny_llama(attention_dropout=0.1).train()
    adapter = attach(model)
    model.generate(prompt(64), max_new_tokens=2)
    assert adapter.status()["bypassed"] == {"dropout": 1}
    without = tiny_llama(1).train()
    adapter = attach(without)
    without.generate(prompt(64), max_new_tokens=2)
    assert adapter.status()["lookups"] == 1


def test_autocast_makes_kv_of_another_kind(model: LlamaForCausalLM, attach: Attach) -> None:
    """Under autocast the dtype of KV is not the one that was registered."""
    adapter = attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(prompt(64), max_new_tokens=2)
    assert adapter.status()["bypassed"] == {"autocast": 1}


def test_a_custom_decoding_loop_is_left_alone(model: LlamaForCausalLM, attach: Attach) -> None:
    """What a caller's own loop does with a cache is not known."""
    adapter = attach(model)

    def loop(model: LlamaForCausalLM, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids

    assert torch.equal(model.generate(prompt(20), custom_generate=loop), prompt(20))
    assert adapter.status()["bypassed"] == {"custom_generate": 1}


@pytest.mark.parametrize(
    ("call", "error"),
    [({"max_new_tokens": 3, "no_such_argument": 1}, ValueError), ({"max_new_tokens": -1}, ValueError)],
)
def test_errors_of_the_caller_are_those_of_transformers(
    model: LlamaForCausalLM, attach: Attach, call: dict[str, Any], error: type[Exception]
) -> None:
    """Wrong arguments raise what they raise without the adapter, and no lease is left behind."""
    with pytest.raises(error) as plain:
        model.generate(prompt(40), **call)
    attach(model)
    with pytest.raises(error) as attached:
        model.generate(prompt(40), **call)
    assert str(attached.value) == str(plain.value)


def test_an_adapter_that_serves_nothing_says_so_once(
    model: LlamaForCausalLM, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """Attached, yet never looked up in many requests: one warning that names the reasons."""
    attach(model)
    with caplog.at_level(logging.WARNING, "kvcache_factory"):
        for _ in range(QUIET_REQUESTS + 5):
            model.generate(prompt(4), max_new_tokens=1, use_cache=False)
    warned = [record.getMessage() for record in caplog.records if "none of" in record.getMessage()]
    assert len(warned) == 1
    assert "use_cache=False" in warned[0]
