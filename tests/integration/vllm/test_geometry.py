"""What a configuration of vLLM says about KV: taken, or refused with the reason.  vLLM's own classes, no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engines import needs_vllm

from kvcache_factory.block.spec import Layout
from kvcache_factory.errors import ConfigError, LayoutError
from kvcache_factory.integration.vllm.geometry import VERIFIED_ISAS, read_geometry

pytestmark = needs_vllm

PARALLEL = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
CACHE = {"cache_dtype": "auto", "calculate_kv_scales": False}


def read(*specs: Any, parallel: Any = None, speculative: Any = None, cache: Any = None, heads: int = 2) -> Any:
    """The geometry of a model whose layers have these specs."""
    import torch

    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: heads,
        hf_text_config=SimpleNamespace(
            to_dict=lambda: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        ),
        dtype=torch.float32,
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**PARALLEL, **(parallel or {})}),
        speculative_config=SimpleNamespace(method=speculative) if speculative else None,
        cache_config=SimpleNamespace(**{**CACHE, **(cache or {})}),
        model_config=model,
    )
    groups = [
        SimpleNamespace(layer_names=[f"model.layers.{n}.self_attn.attn"], kv_cache_spec=spec)
        for n, spec in enumerate(specs)
    ]
    return read_geometry(config, SimpleNamespace(kv_cache_groups=groups, num_blocks=10))


def full(**more: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    usual = {"block_size": 64, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return FullAttentionSpec(**{**usual, **more})


def latent() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.float32)


def state() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=64, shapes=((4, 16),), dtypes=(torch.float32,))


def window() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=512)


def test_plain_full_attention_is_taken() -> None:
    """Heads, sizes and packing are those of the configuration."""
    geometry = read(full())
    assert (geometry.engine_tokens, geometry.engine_blocks, geometry.heads) == (64, 10, 2)
    assert (geometry.tag, geometry.parts) == (Layout.vllm_cpu(64), 1)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ((latent,), "MLAAttentionSpec"),
        ((state,), "MambaSpec"),
        ((full, state), "FullAttentionSpec, MambaSpec"),
        ((window,), "SlidingWindowSpec"),
        ((full, window), "2 group.* FullAttentionSpec, SlidingWindowSpec"),
        ((lambda: full(sliding_window=512),), "windows of 512 tokens"),
        ((lambda: full(attention_chunk_size=256),), "windows of 256 tokens"),
        ((lambda: full(head_size_v=32),), "packed in a way without a name"),
        ((lambda: full(num_head_slots=1),), "packed in a way without a name"),
        ((lambda: full(tokens_per_state=2),), "packed in a way without a name"),
        ((lambda: full(non_causal=True),), "attends to later tokens"),
    ],
)
def test_what_cannot_be_restored_exactly_is_refused_with_the_reason(specs: Any, words: str) -> None:
    """Latent attention, running states, windows, hybrids of them, and packings that nobody has compared."""
    with pytest.raises(LayoutError, match=words):
        read(*(make() for make in specs))


def test_scales_of_the_moment_and_other_settings_are_refused() -> None:
    """A setting that cannot work is named."""
    with pytest.raises(LayoutError, match="scales that are computed at run time"):
        read(full(), cache={"cache_dtype": "fp8", "calculate_kv_scales": True})
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        read(full(), parallel={"pipeline_parallel_size": 2})
    with pytest.raises(ConfigError, match="speculative decoding by 'eagle'"):
        read(full(), speculative="eagle")


def test_heads_of_80_and_112_use_a_kernel_whose_packing_is_the_same() -> None:
    """vLLM takes 'vec16' for them, which ``test_packing.py`` compares bit for bit."""
    assert "vec16" in VERIFIED_ISAS
    for size in (80, 112):
        assert read(full(head_size=size)).tag == Layout.vllm_cpu(64)


@pytest.mark.parametrize("isa", ["amx", "neon", "rvv"])
def test_a_packing_that_was_not_compared_is_refused(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of another processor may order elements in another way."""
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: isa)
    with pytest.raises(LayoutError, match=f"for {isa!r} .* no name yet"):
        read(full())


def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was verified there yet."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(LayoutError, match="no packing has a name yet"):
        read(full())
