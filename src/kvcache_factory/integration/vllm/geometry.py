"""How vLLM keeps KV: read from its configuration by both sides, and refused where it could not be restored exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ...block.spec import BlockSpec, KVDtype, Layout, RopeParameters, round_up, storage_block_tokens
from ...errors import ConfigError, LayoutError
from ...memory.packed import PackedRegion

if TYPE_CHECKING:
    import torch

VERIFIED_ISAS = ("vec", "vec16")
"""vLLM's CPU kernels whose packing was compared with ours, bit for bit; 'vec16' serves heads of 80 or 112."""


class Geometry(msgspec.Struct, frozen=True):
    """What both sides derive from one configuration.

    Attributes
    ----------
    spec:
        A storage block with the heads of all ranks.
    tag:
        The order in which this engine's workers write payloads.
    engine_tokens, engine_blocks:
        Size and number of the engine's blocks.
    layers:
        Names of the attention layers in the order of the model.
    heads:
        KV heads of one rank.
    """

    spec: BlockSpec
    tag: Layout
    engine_tokens: int
    engine_blocks: int
    layers: tuple[str, ...]
    heads: int

    @property
    def parts(self) -> int:
        """Engine blocks in a storage block."""
        return self.spec.block_tokens // self.engine_tokens

    def first_head(self, rank: int, ranks: int) -> int:
        """The first KV head of a tensor-parallel *rank*; ranks beyond the heads hold copies of the same ones."""
        total = self.spec.num_kv_heads
        return rank * self.heads if total >= ranks else rank // (ranks // total)


def read_geometry(vllm_config: Any, kv_cache_config: Any, block_tokens: int = 0) -> Geometry:
    """The geometry of this engine.

    *block_tokens* of a storage block; 0: the engine's block, at least 64 tokens; -1: the engine's block.
    Raises LayoutError, saying why, for KV that could not be restored exactly, and ConfigError for settings that
    cannot work together.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    _check_parallel(vllm_config.parallel_config)
    _check_decoding(vllm_config.speculative_config)
    cache = _only_full_attention(kv_cache_config)
    engine_tokens = int(cache.block_size)
    tokens = engine_tokens if block_tokens < 0 else block_tokens or storage_block_tokens(engine_tokens)
    if tokens % engine_tokens:
        raise ConfigError(
            f"block_tokens={tokens} is not a multiple of the engine's block of {engine_tokens} tokens; use "
            f"{round_up(tokens, engine_tokens)}"
        )
    group = kv_cache_config.kv_cache_groups[0]
    model = vllm_config.model_config
    dtype = _dtype(cache.dtype, vllm_config.cache_config)
    spec = BlockSpec(
        dtype=dtype,
        num_layers=len(group.layer_names),
        num_kv_heads=int(model.get_total_num_kv_heads()),
        head_dim=int(cache.head_size),
        block_tokens=tokens,
        rope=RopeParameters.from_config(model.hf_text_config.to_dict()),
    )
    return Geometry(
        spec=spec,
        tag=_packing(vllm_config, cache, engine_tokens),
        engine_tokens=engine_tokens,
        engine_blocks=int(kv_cache_config.num_blocks),
        layers=tuple(sorted(group.layer_names, key=extract_layer_index)),
        heads=int(cache.num_kv_heads),
    )


def make_region(geometry: Geometry, tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> PackedRegion:
    """The region over a worker's tensors; LayoutError when they are not what the configuration said."""
    missing = [name for name in geometry.layers if name not in tensors]
    more = sorted(set(tensors) - set(geometry.layers))
    if missing or more:
        raise LayoutError(f"the worker's KV layers differ from the scheduler's: without {missing}, more {more}")
    ordered = [tensors[name] for name in geometry.layers]
    want = (geometry.engine_blocks, geometry.heads, geometry.engine_tokens, 2 * geometry.spec.head_dim)
    for name, tensor in zip(geometry.layers, ordered, strict=True):
        if tuple(tensor.shape) != want:
            raise LayoutError(f"{name}: the KV tensor has shape {tuple(tensor.shape)}, expected {want}")
    return PackedRegion(geometry.spec, ordered, first_head=geometry.first_head(rank, ranks))


def _only_full_attention(kv_cache_config: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
        raise LayoutError(
            f"this model keeps KV in {len(groups)} group(s) of kind {', '.join(kinds)}; only one group of plain full "
            "attention can be restored exactly (no sliding windows, Mamba, MLA or cross attention)"
        )
    cache = groups[0].kv_cache_spec
    assert isinstance(cache, FullAttentionSpec)
    window = cache.sliding_window or cache.attention_chunk_size
    if window is not None:
        raise LayoutError(
            f"this model mixes full attention with windows of {window} tokens, whose KV is not known to be restored "
            "exactly; run it without this connector"
        )
    plain = (cache.head_size_v, cache.num_head_slots or cache.num_kv_heads, cache.tokens_per_state)
    if plain != (cache.head_size, cache.num_kv_heads, 1) or cache.state_content_bytes is not None:
        raise LayoutError(f"the KV of this model is packed in a way without a name ({cache}); it cannot be restored")
    if cache.non_causal:
        raise LayoutError("this model attends to later tokens, so that its KV depends on more than the prefix")
    return cache


def _packing(vllm_config: Any, cache: Any, engine_tokens: int) -> Layout:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise LayoutError(f"no packing has a name yet for vLLM on {current_platform.device_type}; only its CPU backend")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    isa = _get_attn_isa(vllm_config.model_config.dtype, engine_tokens, int(cache.head_size), cache_dtype)
    tag = Layout.vllm_cpu(engine_tokens)
    if isa not in VERIFIED_ISAS or tag is None:
        raise LayoutError(
            f"vLLM's CPU kernels pack KV for {isa!r} in blocks of {engine_tokens} tokens here, an order that has no "
            f"name yet; only that of {' and '.join(map(repr, VERIFIED_ISAS))} in blocks of 32, 64, 128 or 256 tokens "
            "has (for 'amx', --dtype float32 gives 'vec')"
        )
    return tag


def _dtype(dtype: object, cache_config: Any) -> KVDtype:
    if not str(cache_config.cache_dtype).startswith("fp8"):
        return KVDtype.of(dtype)
    if getattr(cache_config, "calculate_kv_scales", False):
        raise LayoutError("fp8 KV with scales that are computed at run time cannot be restored; use fixed scales")
    return KVDtype.FP8_E5M2 if "e5m2" in str(cache_config.cache_dtype) else KVDtype.FP8_E4M3


def _check_parallel(parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"{name}={getattr(parallel, name)} is not served by this connector; use 1")


def _check_decoding(speculative: Any) -> None:
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        raise ConfigError(
            f"speculative decoding by {speculative.method!r} keeps KV of a draft model, which this connector does not "
            "save; use 'ngram', or run without the connector"
        )
