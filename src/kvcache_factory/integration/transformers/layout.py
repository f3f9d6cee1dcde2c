"""What a model's KV cache looks like, and whether it can be restored exactly.

A model is accepted by proof: its cache consists of plain growing layers, its rotation does not depend on the length of
the prompt, and one forward pass over one token shows the shape, dtype and device of every layer.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from ...block.spec import BlockSpec, KVDtype, RopeParameters
from ...errors import LayoutError

_REASONS = {
    "DynamicSlidingWindowLayer": "a sliding window forgets the tokens before it, so a prefix cannot be put back",
    "DynamicIndexedLayer": "an indexed layer keeps indexer keys beside its keys and values",
    "LinearAttentionLayer": "linear attention keeps a running state, which no block of tokens holds",
    "DummyLayer": "the layer shares the KV of another one, or has no attention",
}
_TYPE_REASONS = {
    "sliding_attention": _REASONS["DynamicSlidingWindowLayer"],
    "chunked_attention": _REASONS["DynamicSlidingWindowLayer"],
    "indexed_attention": _REASONS["DynamicIndexedLayer"],
    "linear_attention": _REASONS["LinearAttentionLayer"],
    "conv": _REASONS["LinearAttentionLayer"],
}
_MOVING_ROPE = {
    "dynamic": "dynamic NTK rotates keys by an angle that depends on the length of the prompt",
    "longrope": "LongRoPE switches its factors with the length of the prompt",
}


def base_model(model: Any) -> Any:
    """The model inside an adapter wrapper such as PEFT's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_config(model: Any) -> Any:
    """The configuration of the part of *model* that writes text."""
    return base_model(model).config.get_text_config(decoder=True)


def cache_argument(model: Any) -> str:
    """The name under which *model* takes its KV cache: ``cache`` since Transformers 5, ``past_key_values`` before."""
    parameters = inspect.signature(type(base_model(model)).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise LayoutError(
        f"{type(base_model(model)).__name__}.forward takes neither 'cache' nor 'past_key_values', "
        "so no KV can be handed to it; this model cannot be cached"
    )


def new_cache(model: Any) -> Any:
    """An empty cache of the kind that *model* would make for itself."""
    return DynamicCache(config=text_config(model))


def fill(cache: Any, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Hand each layer its tensors [B, H, T, D] as they are, without the copy that an update would make."""
    for layer, k, v in zip(cache.layers, keys, values, strict=True):
        arguments = (k, v) if len(inspect.signature(layer.lazy_initialization).parameters) > 1 else (k,)
        layer.lazy_initialization(*arguments)
        layer.keys, layer.values = k, v


def describe(model: Any, block_tokens: int) -> tuple[BlockSpec, torch.device]:
    """Geometry of a storage block of *model*, and the device of its KV.

    Raises LayoutError, naming layers and reason, for everything that could not be restored exactly.
    """
    _check_kind(model)
    config = text_config(model)
    _check_rope(config)
    cache = new_cache(model)
    _check_layers(config, cache)
    _probe(model, cache)
    spec = _spec_of(cache, config, block_tokens)
    return spec, cache.layers[0].keys.device


def _check_kind(model: Any) -> None:
    inner = base_model(model)
    name = type(inner).__name__
    if inner.config.is_encoder_decoder:
        raise LayoutError(f"{name} is an encoder-decoder model: its cross-attention KV belongs to no token prefix")
    config = text_config(model)
    if getattr(config, "add_cross_attention", False) or getattr(config, "cross_attention_layers", None):
        raise LayoutError(f"{name} has cross-attention layers, whose KV belongs to no token prefix")
    if getattr(inner, "_is_stateful", False):
        raise LayoutError(f"{name} keeps a running state ({_REASONS['LinearAttentionLayer']})")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise LayoutError(f"{name} is tuned by virtual tokens, which shift every position; merge or remove the adapter")


def _check_rope(config: Any) -> None:
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [ropes, *(value for value in ropes.values() if isinstance(value, Mapping))]
    for rope in kinds:
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind in _MOVING_ROPE:
            raise LayoutError(f"rope type {kind!r}: {_MOVING_ROPE[kind]}, so KV of one request is wrong in another")
        if "mrope_section" in rope:
            raise LayoutError("multimodal rope: positions depend on the media in the prompt, not on its tokens alone")


def _check_layers(config: Any, cache: Any) -> None:
    refused: dict[str, list[int]] = defaultdict(list)
    types = list(getattr(config, "layer_types", None) or [])
    for i, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        stated = types[i] if i < len(types) else "full_attention"
        if kind != "DynamicLayer":
            refused[_REASONS.get(kind, f"{kind} keeps more than the keys and values of each token")].append(i)
        elif stated != "full_attention":
            refused[_TYPE_REASONS.get(stated, f"the configuration calls it {stated!r}")].append(i)
    if refused:
        found = "; ".join(f"layers {_ranges(layers)}: {reason}" for reason, layers in refused.items())
        raise LayoutError(f"this model's KV cannot be restored exactly: {found}")


def _probe(model: Any, cache: Any) -> None:
    """Run one token through *model*; the cache shows what no configuration says reliably."""
    embeddings = base_model(model).get_input_embeddings()
    ids = torch.zeros((1, 1), dtype=torch.long, device=embeddings.weight.device)
    arguments = {"input_ids": ids, cache_argument(model): cache, "use_cache": True}
    try:
        # Dropout of a model in training mode draws numbers; the user's seed must not notice.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**arguments)
    except Exception as error:
        raise LayoutError(f"a forward pass over one token failed, so the KV layout is unknown: {error}") from error


def _spec_of(cache: Any, config: Any, block_tokens: int) -> BlockSpec:
    shapes = defaultdict(list)
    for i, layer in enumerate(cache.layers):
        if not layer.is_initialized or layer.keys.dim() != 4 or layer.keys.shape[:3:2] != (1, 1):
            raise LayoutError(f"layer {i} did not keep the one token it was given; its KV lies somewhere else")
        if layer.keys.shape != layer.values.shape or layer.keys.dtype != layer.values.dtype:
            raise LayoutError(
                f"layer {i} has keys {tuple(layer.keys.shape)} and values {tuple(layer.values.shape)}; "
                "only keys and values of one shape and dtype can share a block"
            )
        shapes[(layer.keys.shape[1], layer.keys.shape[3], layer.keys.dtype, str(layer.keys.device))].append(i)
    if len(shapes) != 1:
        found = "; ".join(f"layers {_ranges(layers)}: {shape}" for shape, layers in shapes.items())
        raise LayoutError(f"only equal layers on one device can share a block: {found}")
    heads, head_dim, dtype, _ = next(iter(shapes))
    return BlockSpec(
        dtype=KVDtype.of(dtype),
        num_layers=len(cache.layers),
        num_kv_heads=heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        rope=RopeParameters.from_config(config.to_dict()),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
