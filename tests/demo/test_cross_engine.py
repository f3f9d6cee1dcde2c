"""Two engines read each other's blocks through one directory: the demo of it, on a model of two layers."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcache_factory.demo import cross_engine
from kvcache_factory.demo.text import reference_text
from kvcache_factory.errors import ConfigError, MissingDependencyError

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 512


class Words:
    """A tokenizer of words: enough to make two prompts that differ from their first token on."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[0]["content"]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + sum(word.encode()) % (VOCABULARY - 3) for word in text.split()]}


def engine_python() -> Path:
    """A Python with vLLM, or the reason why there is none."""
    try:
        return cross_engine.find_vllm_python()
    except ConfigError as error:
        note = ROOT / ".venv-vllm" / "unavailable"
        pytest.skip(note.read_text().strip() if note.exists() else str(error))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model in place of the real one, with heads of a size that vLLM's CPU kernels have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    monkeypatch.setattr(cross_engine, "load_model", lambda dtype, progress: (model, Words()))
    monkeypatch.setattr(cross_engine, "ensure_model", lambda dtype: tmp_path / "model")
    monkeypatch.setattr(cross_engine, "reference_text", lambda: reference_text(1500))


def test_each_engine_loads_what_the_other_has_computed(tiny: None) -> None:
    """All full blocks are loaded, both ways, and nobody's tokens change."""
    rows = cross_engine.run_cross_engine(max_new_tokens=12, vllm_python=engine_python())
    assert [(row["writer"], row["reader"]) for row in rows] == [("transformers", "vllm"), ("vllm", "transformers")]
    for row in rows:
        assert row["reused_tokens"] == (row["prompt_tokens"] - 1) // 64 * 64 >= 192
        assert row["identical"]
        assert row["same_as_writer"]
        assert row["diverges_at"] is None
        assert row["ttft_with_s"] > 0 < row["ttft_without_s"]


def program(folder: Path, body: str) -> Path:
    """A program that stands in for the Python of vLLM."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def answers(python: Path) -> list[dict[str, Any]]:
    return cross_engine._run_vllm(python, {"requests": []}, lambda text: None)


def test_answers_are_found_among_what_the_engine_prints(tmp_path: Path) -> None:
    """Only marked lines count; steps are told, and the last line says that all went well."""
    told: list[str] = []
    mark = cross_engine.MARK
    body = f"""print('loading...')
print('{mark}{{"step": "one"}}')
print('{mark}{{"name": "A", "token_ids": [1]}}')
print('{mark}{{"done": true}}')"""
    found = cross_engine._run_vllm(program(tmp_path, body), {"requests": []}, told.append)
    assert found == [{"name": "A", "token_ids": [1]}]
    assert told == ["one"]


def test_a_python_without_vllm_is_named(tmp_path: Path) -> None:
    """The error says which Python it was and what it said."""
    body = f"""print('{cross_engine.MARK}{{"missing": "No module named vllm"}}')"""
    with pytest.raises(MissingDependencyError, match=r"python has no vLLM .* No module named vllm"):
        answers(program(tmp_path, body))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; print('no room', file=sys.stderr); sys.exit(3)", "ended with status 3: no room"),
        ("pass", "ended with status 0: it said nothing"),
    ],
)
def test_an_engine_that_dies_says_its_last_words(tmp_path: Path, body: str, words: str) -> None:
    """Half of the answers is no answer."""
    with pytest.raises(ConfigError, match=words):
        answers(program(tmp_path, body))


def test_where_vllm_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The given Python, this one, .venv-vllm here, .venv-vllm beside this environment; then an error."""
    monkeypatch.setattr(cross_engine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--vllm-python"):
        cross_engine.find_vllm_python()
    with pytest.raises(ConfigError, match="is no program"):
        cross_engine.find_vllm_python(tmp_path)
    for folder in (tmp_path / "elsewhere", tmp_path):
        (folder / ".venv-vllm" / "bin").mkdir(parents=True)
        found = program(folder / ".venv-vllm" / "bin", "pass")
        assert cross_engine.find_vllm_python() == found
    monkeypatch.setattr(cross_engine.importlib.util, "find_spec", lambda name: object())
    assert cross_engine.find_vllm_python() == Path(sys.executable)
    assert cross_engine.find_vllm_python(found) == found
    assert os.access(found, os.X_OK)
