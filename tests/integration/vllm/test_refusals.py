"""Engines whose KV cannot be restored exactly do not start with this connector, and say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import fails, needs_vllm

pytestmark = needs_vllm

NO_WEIGHTS = {"load_format": "dummy", "skip_tokenizer_init": True}


def tiny(folder: Path, kind: str, **options: Any) -> str:
    """A directory with nothing but the configuration of a small model."""
    import transformers

    common = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 2048}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**common, **options})
    config.architectures = [f"{kind.removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def test_a_mix_of_full_attention_and_windows(tmp_path: Path) -> None:
    """Gemma 3's pattern: five layers with a window for each one without."""
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    model = tiny(tmp_path, "Gemma3Text", num_hidden_layers=6, layer_types=layers, sliding_window=512)
    said = fails({"model_id": "tiny"}, {"model": model}, **NO_WEIGHTS)
    assert "LayoutError" in said
    assert "SlidingWindowSpec" in said or "windows of 512 tokens" in said  # groups apart, or one for all layers
    assert "restored exactly" in said


@pytest.mark.soak
def test_windows_in_every_layer(tmp_path: Path) -> None:
    """Mistral's first model: what has slid out of the window is not kept."""
    model = tiny(tmp_path, "Mistral", num_hidden_layers=2, sliding_window=128)
    said = fails({"model_id": "tiny"}, {"model": model}, **NO_WEIGHTS)
    assert "LayoutError" in said
    assert "window" in said


@pytest.mark.soak
def test_a_model_without_a_fingerprint(tmp_path: Path) -> None:
    """Dummy weights have no content to fingerprint: the model needs a name."""
    model = tiny(tmp_path, "Llama", num_hidden_layers=2)
    said = fails({}, {"model": model}, **NO_WEIGHTS)
    assert "ConfigError" in said
    assert "model_id" in said


@pytest.mark.soak
@pytest.mark.parametrize(
    ("connector", "word"),
    [({"memroy_gb": 1}, "memroy_gb"), ({"block_tokens": 96}, "block_tokens=96"), ({"memory_gb": 0.00001}, "GiB")],
)
def test_settings_that_cannot_work(tmp_path: Path, connector: dict[str, Any], word: str) -> None:
    """A wrong name, storage blocks that engine blocks do not divide, and memory for not one block."""
    model = tiny(tmp_path, "Llama", num_hidden_layers=2)
    said = fails({"model_id": "tiny", **connector}, {"model": model}, **NO_WEIGHTS)
    assert word in said
