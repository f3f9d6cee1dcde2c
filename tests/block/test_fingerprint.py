"""A live model and its directory have one fingerprint; two models that would compute different KV have two."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen3Config

from kvcache_factory.block import config_fingerprint, fingerprint_directory, model_fingerprint, weights_fingerprint
from kvcache_factory.block import fingerprint as module
from kvcache_factory.errors import ConfigError, FormatError

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, list[int], Any]]:
    """What an adapter passes: name, dtype, shape and the bytes of each tensor."""
    for name, tensor in state.items():
        flat = tensor.detach().contiguous().reshape(-1)
        yield name, str(tensor.dtype), list(tensor.shape), flat.view(torch.uint8).numpy()


def live(model: Any) -> str:
    return model_fingerprint(model.config.to_dict(), weights_fingerprint(entries(model.state_dict())))


def saved(path: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}), encoding="utf-8")
    return path


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_live_model_and_its_directory_agree(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    """Engines that load a model and tools that read its files share blocks, also where files store a tied head once."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied)).to(dtype)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert fingerprint_directory(tmp_path / "one") == fingerprint_directory(tmp_path / "many") == live(model)


def test_one_changed_weight_is_another_model(tmp_path: Path) -> None:
    """A fine-tune, another dtype, another shape of the same bytes, or a renamed tensor: no sharing."""
    a = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    b = a.clone()
    b[2, 3] += 1
    states = [{"w": a}, {"w": b}, {"w": a.reshape(4, 3)}, {"w": a.view(torch.int32)}, {"v": a}, {"w": a, "v": b}]
    assert len({weights_fingerprint(entries(state)) for state in states}) == len(states)


def test_order_does_not_matter_and_equal_tensors_do() -> None:
    """Tensors are sorted by name, and two layers with equal weights are still two."""
    ones, twos = torch.ones(4), torch.full((4,), 2.0)
    state = {"a": ones, "b": ones, "c": twos, "d": ones}
    other = {"a": ones, "b": ones, "c": twos, "d": twos}
    assert weights_fingerprint(entries(state)) == weights_fingerprint(reversed(list(entries(state))))
    assert weights_fingerprint(entries(state)) != weights_fingerprint(entries(other))
    assert weights_fingerprint(entries(state)) != weights_fingerprint(entries({"a": ones, "c": twos}))


def test_only_a_head_that_is_tied_is_left_out() -> None:
    """A head of its own counts: what is skipped must be known to be there under another name."""
    table, head = torch.ones(4, 2), torch.zeros(4, 2)
    body = {"model.embed_tokens.weight": table}
    tied, own = {**body, "lm_head.weight": table}, {**body, "lm_head.weight": head}
    assert weights_fingerprint(entries(body)) == weights_fingerprint(entries(tied))
    assert weights_fingerprint(entries(body)) != weights_fingerprint(entries(own))
    assert weights_fingerprint(entries({"lm_head.weight": table})) != weights_fingerprint(
        entries({"lm_head.weight": head})
    )


CONFIGS = [LlamaConfig(**SMALL), Qwen3Config(**SMALL), LlamaConfig(**SMALL, rope_theta=5e5)]
CONFIGS.append(LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))


@pytest.mark.parametrize("config", CONFIGS, ids=["llama", "qwen3", "theta", "scaled"])
def test_a_written_configuration_means_what_the_live_one_means(config: PreTrainedConfig, tmp_path: Path) -> None:
    """config.json as Transformers writes it, and as older releases did, agree with the object in memory."""
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config_fingerprint(written) == config_fingerprint(config.to_dict())
    old = {
        k: v for k, v in written.items() if k not in ("mlp_bias", "attention_bias", "layer_types", "rope_parameters")
    }
    rope = dict(written["rope_parameters"])
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": "bfloat16", "_name_or_path": "somewhere"}
    old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope} if rope.get("factor") else None
    assert config_fingerprint(old) == config_fingerprint(config.to_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 4},
        {"rms_norm_eps": 1e-6},
        {"sliding_window": 128},
        {"model_type": "mistral"},
        {"something_new": 1},
        {"text_config": {"rope_theta": 5.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_shapes_kv_shapes_the_fingerprint(change: dict[str, Any]) -> None:
    """Also what this library has never heard of: an unknown entry costs a miss, not an answer."""
    base = {"model_type": "llama", "rope_theta": 10000.0, "num_hidden_layers": 2, "num_attention_heads": 8}
    assert config_fingerprint(base) != config_fingerprint({**base, **change})
    assert config_fingerprint(base) == config_fingerprint(dict(reversed(base.items())))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10000},
        {"rope_scaling": None},
        {"num_key_value_heads": 8},
        {"head_dim": 4},
        {"torch_dtype": "float16", "dtype": torch.bfloat16},
        {"_attn_implementation": "eager", "transformers_version": "9"},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        {"layer_types": ["full_attention"] * 2},
        {"eos_token_id": 3, "attention_dropout": 0.1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_shape_kv_does_not(change: dict[str, Any]) -> None:
    """Bookkeeping, training settings and defaults written out leave engines together."""
    base = {"model_type": "llama", "rope_theta": 10000.0, "num_attention_heads": 8, "hidden_size": 32}
    assert config_fingerprint(base) == config_fingerprint({**base, **change})


def test_a_model_id_stands_for_the_weights_but_not_for_rope() -> None:
    """The user's word replaces what cannot be hashed; RoPE that an engine overrides at run time still counts."""
    config = {"model_type": "llama", "rope_theta": 10000.0}
    named = model_fingerprint(config, "", model_id="team/model@1")
    assert named == model_fingerprint({**config, "num_hidden_layers": 9}, "00" * 16, model_id="team/model@1")
    assert named != model_fingerprint(config, "", model_id="team/model@2")
    assert named != model_fingerprint({**config, "rope_theta": 5e5}, "", model_id="team/model@1")
    assert model_fingerprint(None, "", model_id="x") == model_fingerprint({}, "", model_id="x")
    for arguments in ((config, ""), (None, "00" * 16), (config, "00" * 16, "")):
        with pytest.raises(ConfigError):
            model_fingerprint(*arguments)


def test_a_digest_is_remembered_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """The second call reads no weights; a new time, size or file is read again."""
    directory = saved(tmp_path / "m", {"w": torch.ones(8)})
    seen: list[tuple[int, int]] = []
    first = fingerprint_directory(directory, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] <= seen[-1][1]
    reads: list[Path] = []
    real = module._read_safetensors
    monkeypatch.setattr(module, "_read_safetensors", lambda path, count: reads.append(path) or real(path, count))
    assert fingerprint_directory(directory) == first
    assert not reads
    save_file({"w": torch.zeros(8)}, directory / "model.safetensors")
    os.utime(directory / "model.safetensors", ns=(1, 1))
    assert fingerprint_directory(directory) != first
    assert len(reads) == 1
    files = list((cache / "kvcache-factory" / "fingerprints").iterdir())
    assert len(files) == 2
    if os.name == "posix":
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_files_that_change_while_they_are_read_are_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """A download in progress must not leave its digest behind for the finished file."""
    directory = saved(tmp_path / "m", {"w": torch.ones(8)})
    real = module._read_safetensors

    def interrupted(path: Path, count: Any) -> Any:
        yield from real(path, count)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(module, "_read_safetensors", interrupted)
    fingerprint_directory(directory)
    assert not (cache / "kvcache-factory").exists()


@pytest.mark.parametrize("content", ["", "not hex at all" * 2 + "1234", "ab"])
def test_a_damaged_memory_is_ignored(tmp_path: Path, cache: Path, content: str) -> None:
    """What the cache directory holds is checked; nonsense costs a reading, not a wrong fingerprint."""
    directory = saved(tmp_path / "m", {"w": torch.ones(8)})
    first = fingerprint_directory(directory)
    for file in (cache / "kvcache-factory" / "fingerprints").iterdir():
        file.write_text(content, encoding="ascii")
    assert fingerprint_directory(directory) == first


def test_a_home_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only container still gets its fingerprint."""
    (tmp_path / "file").write_text("", encoding="ascii")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    directory = saved(tmp_path / "m", {"w": torch.ones(8)})
    assert fingerprint_directory(directory) == fingerprint_directory(directory)


def safetensors(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


HOSTILE = {
    "empty": b"",
    "a header larger than the file": safetensors({}, length=2**40),
    "a header without end": safetensors({}, length=2**63),
    "not JSON": safetensors(b"\x80\x04nonsense"),
    "a list": safetensors([]),
    "offsets beyond the end": safetensors({"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}),
    "offsets backwards": safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}),
    "negative offsets": safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-8, 4]}}),
    "text for offsets": safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": "04"}}),
    "deep nesting": safetensors(b"[" * 100_000),
}


@pytest.mark.parametrize("image", HOSTILE.values(), ids=HOSTILE.keys())
def test_damaged_weights_are_an_error_and_not_a_fingerprint(tmp_path: Path, image: bytes) -> None:
    """Sizes in a file are checked before they are used, and the error names the file."""
    directory = saved(tmp_path / "m", {"w": torch.ones(8)})
    (directory / "model.safetensors").write_bytes(image)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        fingerprint_directory(directory)


def test_an_incomplete_directory_says_what_it_lacks(tmp_path: Path) -> None:
    """No configuration, no weights, a missing shard, or an index that leads outside."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        fingerprint_directory(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="model_id"):
        fingerprint_directory(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "a.safetensors"}}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks a\.safetensors"):
        fingerprint_directory(tmp_path)
    for text in ('{"weight_map": {"w": "../a.safetensors"}}', "[]", '{"weight_map": {"w": 3}}', "{"):
        index.write_text(text, encoding="utf-8")
        with pytest.raises(FormatError, match="index"):
            fingerprint_directory(tmp_path)
    for text in ("[]", "{"):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(FormatError, match=r"config\.json"):
            fingerprint_directory(tmp_path)


def test_what_has_no_stable_text_is_refused() -> None:
    """An object whose text holds an address would give a new fingerprint in each process, and no hit ever."""
    with pytest.raises(ConfigError, match="object"):
        config_fingerprint({"hook": object()})
    with pytest.raises(ConfigError, match="two tensors"):
        weights_fingerprint([("w", "F32", [1], bytes(4)), ("w", "F32", [1], bytes(4))])
    with pytest.raises(ConfigError, match="no tensors"):
        weights_fingerprint([])


def test_buffers_of_any_kind_hash_alike() -> None:
    """bytes, arrays and memory views of the same content are the same weights."""
    array = np.arange(6, dtype=np.float32)
    views = (array, array.tobytes(), memoryview(array), array.view(np.uint8))
    assert len({weights_fingerprint([("w", dtype, (6,), v)]) for v in views for dtype in ("F32", "torch.float32")}) == 1
