"""A model whose KV cannot be restored exactly is refused when it is attached, with the layers and the reason."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import BLOCK, prompt, tiny_llama
from transformers import LlamaForCausalLM

from kvcache_factory import CacheManager
from kvcache_factory.errors import ConfigError, LayoutError
from kvcache_factory.integration.transformers import TransformersCacheAdapter

Attach = Callable[..., TransformersCacheAdapter]

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=8))


def gemma3() -> Any:
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=types))


def mamba() -> Any:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0)
    )


def qwen3_next() -> Any:
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **SMALL,
            layer_types=types,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    )


def deepseek() -> Any:
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
            pad_token_id=0,
        )
    )


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    )


def moving_rope(kind: str) -> Callable[[], Any]:
    half = 4  # of a head of 8
    scaling = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    return lambda: tiny_llama(rope_scaling=scaling)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sliding": (mistral, "layers 0-3: a sliding window"),
    "hybrid of windows": (gemma3, "layers 0-1, 3: a sliding window"),
    "state space": (mamba, "state"),
    "hybrid of linear": (qwen3_next, "state"),
    "latent": (deepseek, "one shape"),
    "encoder and decoder": (t5, "encoder-decoder"),
    "dynamic rope": (moving_rope("dynamic"), "length of the prompt"),
    "long rope": (moving_rope("longrope"), "length of the prompt"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_layers_and_reason(kind: str, attach: Attach) -> None:
    """The error says which layers, and why; the model is left as it was."""
    make, reason = REFUSED[kind]
    model = make().eval()
    with pytest.raises(LayoutError, match=reason):
        attach(model)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_fixed_rope_scaling_is_served(kind: str, thrice: Callable[..., Any]) -> None:
    """Scalings that rotate by position alone are as good as none."""
    scaling = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_llama(rope_scaling=scaling)
    outcome = thrice(model, input_ids=prompt(70), max_new_tokens=8, do_sample=False)
    assert outcome.status["reused_tokens"] == 64


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt", "gpt_neox", "falcon"])
def test_other_families_with_plain_layers_are_served(family: str, thrice: Callable[..., Any]) -> None:
    """Grouped, multi-query and plain heads; rotary, learned and fused projections."""
    torch.manual_seed(0)
    makers: dict[str, Callable[[], Any]] = {
        "qwen2": lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, use_sliding_window=False)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256)
        ),
        "opt": lambda: transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=64,
                hidden_size=32,
                ffn_dim=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                word_embed_proj_dim=32,
            )
        ),
        "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
            )
        ),
        "falcon": lambda: transformers.FalconForCausalLM(
            transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        ),
    }
    model = makers[family]().eval()
    model.generation_config.eos_token_id = None
    ids = prompt(50) % 60 + 3
    mask = torch.ones_like(ids)
    outcome = thrice(model, input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert outcome.status["reused_tokens"] == 48


def test_attach_twice_is_refused(model: LlamaForCausalLM, attach: Attach) -> None:
    """Two adapters on one model would fight for its cache."""
    attach(model)
    with pytest.raises(ConfigError, match=r"detach\(\)"):
        attach(model)


def test_a_replaced_generate_is_not_replaced_again(model: LlamaForCausalLM, attach: Attach) -> None:
    """What somebody else put there is not understood, so the adapter does not stand in front of it."""
    model.generate = lambda *args, **kwargs: None
    with pytest.raises(ConfigError, match="replaced generate"):
        attach(model)


def test_detach_undoes_attach(model: LlamaForCausalLM, attach: Attach) -> None:
    """Afterwards the instance has nothing of its own, and a second detach does nothing."""
    before = dict(vars(model))
    adapter = attach(model)
    assert adapter.attached
    adapter.detach()
    adapter.detach()
    assert vars(model) == before
    assert not adapter.attached
    assert adapter.status()["hooked"] == []


def test_what_was_saved_survives_detach(model: LlamaForCausalLM, attach: Attach) -> None:
    """The manager keeps the blocks, and the next adapter finds them."""
    attach(model).detach()
    first = attach(model)
    model.generate(prompt(64), max_new_tokens=2)
    first.detach()
    second = attach(model)
    model.generate(prompt(64), max_new_tokens=2)
    assert second.status()["reused_tokens"] == 48


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_of_the_model_is_not_attached(
    model: LlamaForCausalLM, attach: Attach, duplicate: Callable[[Any], Any]
) -> None:
    """A copy generates by itself, with its own weights; nothing of the adapter goes with it."""
    adapter = attach(model)
    other = duplicate(model)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    assert not torch.equal(other.generate(prompt(20), max_new_tokens=8), model.generate(prompt(20), max_new_tokens=8))
    assert adapter.status()["requests"] == 1


def test_a_model_of_another_geometry_in_the_same_manager(attach: Attach) -> None:
    """One manager has slots of one size; a model that does not fit them is refused by the manager."""
    attach(tiny_llama())
    with pytest.raises(ConfigError):
        attach(tiny_llama(num_hidden_layers=3))


def test_status_says_what_is_hooked(model: LlamaForCausalLM, attach: Attach) -> None:
    """Plain values that can be printed or sent as JSON."""
    import json

    status = attach(model).status()
    json.dumps(status)
    assert status["model"] == "LlamaForCausalLM"
    assert status["hooked"] == ["generate"]
    assert status["cache_argument"] in {"cache", "past_key_values"}
    assert status["block_tokens"] == BLOCK


def test_attaching_draws_no_random_numbers(manager: CacheManager) -> None:
    """A program's seed gives the same numbers with and without the adapter, dropout or not."""
    model = tiny_llama(attention_dropout=0.5).train()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    TransformersCacheAdapter.attach(model, manager).detach()
    assert torch.equal(torch.rand(1), expected)
