"""What belongs to a prompt beside its tokens: adapters, embeddings, media."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import needs_vllm, play

from kvcache_factory.demo.model import ensure_model
from kvcache_factory.integration.vllm.requests import TrackedRequest, cacheable, session_of
from kvcache_factory.testing import Opener


def adapter(folder: Path, model: Path, seed: int) -> str:
    """A LoRA adapter of rank 4 on keys and values, in the format of PEFT."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    width, heads = config["hidden_size"], config["num_attention_heads"]
    outputs = width // heads * config["num_key_value_heads"]
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in ("k_proj", "v_proj"):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(4, width, generator=random) / 10
            tensors[f"{base}.lora_B.weight"] = torch.randn(outputs, 4, generator=random) / 10
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "bias": "none",
             "target_modules": ["k_proj", "v_proj"], "base_model_name_or_path": str(model)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return str(folder)


@needs_vllm
def test_adapters_are_told_apart_by_their_content_and_embeddings_are_not_cached(tmp_path: Path) -> None:
    """A real engine with LoRA: neither name nor path counts.  Prompts of embeddings are answered, and never stored."""
    model = ensure_model("float32")
    one, two = (adapter(tmp_path / name, model, seed) for seed, name in enumerate(("one", "two")))
    copy = str(shutil.copytree(one, tmp_path / "elsewhere"))
    played = play(
        "adapters", "embeddings", "figures",
        more={"adapters": {"one": one, "two": two, "copy": copy}},
        enable_lora=True, max_lora_rank=8, enable_prompt_embeds=True,
    )  # fmt: skip
    scene = played["adapters"]
    steps = ("plain", "one", "one again", "two", "copy")
    assert [scene[step]["cached"] for step in steps] == [[0], [0], [256], [0], [256]]
    assert scene["one"]["ids"] == scene["one again"]["ids"] == scene["copy"]["ids"] == scene["expected one"]
    assert (scene["plain"]["ids"], scene["two"]["ids"]) == (scene["expected plain"], scene["expected two"])
    assert scene["expected one"] != scene["expected two"]
    embedded = played["embeddings"]
    assert [run["cached"] for run in embedded["runs"]] == [[0], [0]]
    assert embedded["runs"][0]["ids"] == embedded["runs"][1]["ids"] == embedded["tokens"]["ids"]
    assert embedded["tokens"]["cached"] == [0]
    assert played["figures"]["metrics"]["vllm:kvcache_factory_requests_not_cacheable"] == 2
    assert (played["figures"]["check"], played["figures"]["leases"]) == ([], 0)


def request(**more: Any) -> Any:
    """As much of a vLLM request as the connector reads."""
    tokens = list(range(16))
    usual = {"request_id": "r", "session_id": None, "kv_transfer_params": None, "mm_features": [], "resumable": False,
             "prompt_token_ids": tokens, "all_token_ids": tokens, "prompt_embeds": None}  # fmt: skip
    return SimpleNamespace(**{**usual, **more})


def picture(identifier: str, offset: int, length: int) -> Any:
    """What vLLM says of a picture whose placeholder tokens are *length* tokens from *offset* on."""
    try:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    except ImportError:  # vLLM's own class where it is there, its attributes elsewhere
        return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=offset, length=length)
    )


def keys(cache: Any, *pictures: Any) -> list[bytes]:
    tracked = TrackedRequest(request(mm_features=list(pictures)), cache.space)
    tracked.grow()
    return [tracked.chain.key_bytes(block) for block in range(4)]


def test_media_are_part_of_the_key_from_the_block_on_that_they_touch(open_cache: Opener) -> None:
    """The same placeholder tokens with another picture, or the same one elsewhere, are another prefix."""
    cache = open_cache(4)
    plain, cat, dog = keys(cache), keys(cache, picture("cat", 5, 2)), keys(cache, picture("dog", 5, 2))
    assert plain[0] == cat[0] == dog[0]
    assert all(len({plain[n], cat[n], dog[n]}) == 3 for n in (1, 2, 3))
    assert keys(cache, picture("cat", 5, 2)) == cat
    assert keys(cache, picture("cat", 6, 2))[1] != cat[1]
    two = keys(cache, picture("cat", 5, 2), picture("dog", 9, 4))
    assert two[:2] == cat[:2]
    assert two[2] != cat[2]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, True),
        ({"prompt_embeds": object()}, False),
        ({"prompt_token_ids": None}, False),
        ({"resumable": True}, False),
    ],
)
def test_what_has_no_token_ids_of_its_own_is_not_cached(more: dict[str, Any], wanted: bool) -> None:
    """Embeddings and streamed input have no key."""
    assert cacheable(request(**more)) is wanted


def test_a_session_is_named_by_either_field_and_never_by_the_salt() -> None:
    """``session_id`` first, then ``kv_transfer_params``."""
    params = {"session_id": "params"}
    assert session_of(request(session_id="own", kv_transfer_params=params, cache_salt="salt")) == "own"
    assert session_of(request(kv_transfer_params=params, cache_salt="salt")) == "params"
    assert session_of(request(cache_salt="salt")) is None
