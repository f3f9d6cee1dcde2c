"""Geometries of models by name, or from a model's own ``config.json``: what a block weighs and what prefill costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ..block.spec import BlockSpec, KVDtype
from ..errors import ConfigError, instead_of


class Model(msgspec.Struct, frozen=True):
    """A dense transformer: *width* is its attention heads times their dimension, *parameters* all of its weights."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    width: int
    parameters: float

    def spec(self, block_tokens: int, dtype: str = "bfloat16") -> BlockSpec:
        """Its blocks of *block_tokens* tokens."""
        return BlockSpec(KVDtype.of(dtype), self.layers, self.kv_heads, self.head_dim, block_tokens)


MODELS = {
    model.name: model
    for model in (
        Model("llama-3-8b", 32, 8, 128, 4096, 8.03e9),
        Model("llama-3-70b", 80, 8, 128, 8192, 70.6e9),
        Model("llama-3.1-405b", 126, 8, 128, 16384, 405.9e9),
        Model("llama-3.2-1b", 16, 8, 64, 2048, 1.24e9),
        Model("llama-3.2-3b", 28, 8, 128, 3072, 3.21e9),
        Model("mistral-7b", 32, 8, 128, 4096, 7.25e9),
        Model("qwen2.5-7b", 28, 4, 128, 3584, 7.62e9),
        Model("qwen2.5-32b", 64, 8, 128, 5120, 32.8e9),
        Model("qwen2.5-72b", 80, 8, 128, 8192, 72.7e9),
        Model("qwen3-8b", 36, 8, 128, 4096, 8.19e9),
        Model("qwen3-32b", 64, 8, 128, 8192, 32.8e9),
        Model("smollm2-135m", 30, 3, 64, 576, 0.135e9),
    )
}


def find_model(name: str) -> Model:
    """A model by name, or by a directory or file with its configuration; ConfigError with the nearest names if none."""
    known = MODELS.get(name.lower())
    if known is not None:
        return known
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _from_config(path)
    raise ConfigError(
        f"there is no model {name!r} and no directory with a config.json there; {instead_of(name, MODELS)}"
    )


def _from_config(path: Path) -> Model:
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        inner, words = int(config["intermediate_size"]), int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no configuration of a dense transformer: {error!r}") from error
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    tables = words * hidden * (1 if config.get("tie_word_embeddings") else 2)
    weights = float(layers * (attention + 3 * hidden * inner) + tables)
    return Model(path.parent.name, layers, kv_heads, head_dim, heads * head_dim, weights)
