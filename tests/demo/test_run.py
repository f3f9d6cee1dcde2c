"""The demo's conversation, its comparison and its picture; on a model of two layers where the model does not matter."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvcache_factory.demo import run
from kvcache_factory.demo.plot import draw
from kvcache_factory.demo.text import QUESTIONS, question, reference_text
from kvcache_factory.errors import ConfigError, MissingDependencyError

KEYS = {"phase", "turn", "prompt_tokens", "reused_tokens", "ttft_s", "identical", "diverges_at"}


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<|end|>")
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model and a short text in place of the real ones."""
    tokenizer = bytes_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(run, "load_model", lambda dtype, progress: (model, tokenizer))
    monkeypatch.setattr(run, "reference_text", lambda: reference_text(600))


def test_the_conversation_is_held_twice_with_the_same_answers(small: None) -> None:
    """A row for each phase and turn; later warm turns reuse what earlier ones computed."""
    rows = run.run_demo(turns=3, max_new_tokens=20)
    assert [(row["phase"], row["turn"]) for row in rows] == [(p, t) for p in ("cold", "warm") for t in (1, 2, 3)]
    assert all(set(row) == KEYS for row in rows)
    assert all(row["identical"] and row["diverges_at"] is None and row["ttft_s"] > 0 for row in rows)
    cold, warm = rows[:3], rows[3:]
    assert [row["prompt_tokens"] for row in cold] == [row["prompt_tokens"] for row in warm]
    assert [row["reused_tokens"] for row in cold] == [0, 0, 0]
    assert warm[0]["reused_tokens"] == 0
    assert all(now["reused_tokens"] >= before["prompt_tokens"] - 64 for before, now in pairwise(warm))


def test_the_summary_puts_both_phases_beside_each_other(small: None) -> None:
    """One row a turn, with the speed-up and a word on the output."""
    rows = run.summarise(run.run_demo(turns=2, max_new_tokens=4))
    assert [row["turn"] for row in rows] == [1, 2]
    assert all(row["output"] == "identical" for row in rows)
    assert all(math.isclose(r["speed_up"], r["ttft_without_s"] / r["ttft_with_s"]) for r in rows)


def test_progress_grows_to_the_end(small: None) -> None:
    """The bar moves forward through both phases and ends full."""
    seen: list[tuple[float, float]] = []
    run.run_demo(turns=2, max_new_tokens=2, progress=lambda done, total, text="": seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (4, 4)


@pytest.mark.parametrize(
    ("cold", "warm", "at"), [([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2, 3], None)]
)
def test_where_answers_part(cold: list[int], warm: list[int], at: int | None) -> None:
    """The first token that differs is named; an answer that only stops earlier parts at its end."""
    rows: list[dict[str, Any]] = [{"phase": "cold", "turn": 1}, {"phase": "warm", "turn": 1}]
    run._compare(rows, {"cold": [cold], "warm": [warm]})
    assert all(row["diverges_at"] == at and row["identical"] == (at is None) for row in rows)


def test_numbers_that_cannot_work(small: None) -> None:
    """No turns, no tokens, or a conversation longer than the model's positions."""
    with pytest.raises(ConfigError, match="at least 1"):
        run.run_demo(turns=0)
    with pytest.raises(ConfigError, match="lower --turns"):
        run.run_demo(turns=100)


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_the_picture_is_written(small: None, tmp_path: Path, name: str) -> None:
    """As the kind of file that its name says."""
    run.run_demo(turns=2, max_new_tokens=2, plot=tmp_path / name)
    start = (tmp_path / name).read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    """A missing folder or an unknown kind of file says so."""
    rows = [{"phase": phase, "turn": 1, "ttft_s": 1.0} for phase in ("cold", "warm")]
    for path in (tmp_path / "missing" / "plot.png", tmp_path / "plot.unknown"):
        with pytest.raises(ConfigError, match="cannot be written"):
            draw(rows, path)


def test_without_matplotlib_nothing_is_run_in_vain(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The missing package is named before the conversation, not after it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "load_model", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(MissingDependencyError, match="pip install"):
        run.run_demo(plot=tmp_path / "plot.png")


def test_the_text_is_long_real_and_ends_with_a_paragraph() -> None:
    """About nine thousand characters of this Python's own reference."""
    text = reference_text()
    assert 8000 < len(text) <= 9000
    assert "statement" in text
    assert "  " not in text.replace("\n ", "")
    assert text == text.strip()


def test_questions_come_round_again() -> None:
    """Any number of turns has a question."""
    assert [question(turn) for turn in (1, len(QUESTIONS), len(QUESTIONS) + 1)] == [
        QUESTIONS[0],
        QUESTIONS[-1],
        QUESTIONS[0],
    ]
