"""The main job: one conversation over a long text, held without the cache and then with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .model import Progress, load_model, silent
from .text import question, reference_text

_TOKENS_PER_QUESTION = 48  # a question and what the template writes around it, generously
_CACHE_GB = 1.0

Row = dict[str, Any]


class FirstToken:
    """A streamer that notes when the first generated token arrives; the prompt is put before it."""

    def __init__(self) -> None:
        self._puts = 0
        self._started_s = time.perf_counter()
        self.seconds = float("nan")

    def put(self, value: Any) -> None:
        """Called by Transformers with the prompt, and then with each token."""
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter() - self._started_s

    def end(self) -> None:
        """Called by Transformers when the sequence is complete."""


def run_demo(
    *,
    dtype: str = "float32",
    turns: int = 4,
    max_new_tokens: int = 32,
    plot: Path | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """Hold the conversation twice, greedily, and return a row for each phase and turn.

    Rows: ``phase`` (cold: without the cache, warm: with it), ``turn``, ``prompt_tokens``, ``reused_tokens``, ``ttft_s``
    (seconds from the call to the first token), ``identical`` (the answers of both phases are the same tokens) and
    ``diverges_at`` (the first token that differs, counted from 0, or None).

    Raises MissingDependencyError without the packages or the model, ConfigError for numbers that cannot work.
    """
    if turns < 1 or max_new_tokens < 1:
        raise ConfigError(f"turns={turns} and max_new_tokens={max_new_tokens} must be at least 1")
    if plot is not None:
        from .plot import require_matplotlib

        require_matplotlib()
    model, tokenizer = load_model(dtype, progress)
    text = reference_text()
    _check_room(model, tokenizer, text, turns, max_new_tokens)
    rows, answers = _both_phases(model, tokenizer, text, turns, max_new_tokens, progress)
    _compare(rows, answers)
    if plot is not None:
        from .plot import draw

        draw(rows, plot)
    return rows


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row for each turn, both phases beside each other: what the table shows."""
    warm = {row["turn"]: row for row in rows if row["phase"] == "warm"}
    return [
        {
            "turn": row["turn"],
            "prompt_tokens": row["prompt_tokens"],
            "reused_tokens": warm[row["turn"]]["reused_tokens"],
            "ttft_without_s": row["ttft_s"],
            "ttft_with_s": warm[row["turn"]]["ttft_s"],
            "speed_up": row["ttft_s"] / warm[row["turn"]]["ttft_s"],
            "output": "identical" if row["identical"] else f"differs from token {row['diverges_at']}",
        }
        for row in rows
        if row["phase"] == "cold"
    ]


def _both_phases(
    model: Any, tokenizer: Any, text: str, turns: int, max_new_tokens: int, progress: Progress
) -> tuple[list[Row], dict[str, list[list[int]]]]:
    from ..backend import CPUBackend
    from ..integration.transformers import TransformersCacheAdapter
    from ..manager import CacheManager

    rows: list[Row] = []
    answers: dict[str, list[list[int]]] = {}
    with CacheManager(backend=CPUBackend(size_gb=_CACHE_GB)) as manager:
        for phase in ("cold", "warm"):
            adapter = TransformersCacheAdapter.attach(model, manager, tokenizer=tokenizer)
            if phase == "cold":
                adapter.detach()  # the same conversation, through the same code, without the cache
            try:
                _warm_up(model, tokenizer)
                answers[phase] = _converse(adapter, phase, text, turns, max_new_tokens, rows, progress)
            finally:
                adapter.detach()
    return rows, answers


def _converse(
    adapter: Any, phase: str, text: str, turns: int, max_new_tokens: int, rows: list[Row], progress: Progress
) -> list[list[int]]:
    """Hold the conversation once, add its rows, and return the tokens of each answer."""
    session = adapter.manager.create_session(f"demo-{phase}")
    messages: list[dict[str, str]] = []
    answers = []
    for turn in range(1, turns + 1):
        what = "without" if phase == "cold" else "with"
        progress((phase == "warm") * turns + turn - 1, 2 * turns, f"{what} the cache: turn {turn} of {turns}")
        content = question(turn) if messages else f"{text}\n\n{question(turn)}"
        messages.append({"role": "user", "content": content})
        clock = FirstToken()
        reply = adapter.chat(session, messages, max_new_tokens=max_new_tokens, do_sample=False, streamer=clock)
        messages.append({"role": "assistant", "content": reply.text})
        answers.append(reply.token_ids)
        rows.append(
            {
                "phase": phase,
                "turn": turn,
                "prompt_tokens": reply.prompt_tokens,
                "reused_tokens": reply.reused_tokens,
                "ttft_s": clock.seconds,
            }
        )
    progress((1 + (phase == "warm")) * turns, 2 * turns)
    return answers


def _compare(rows: Sequence[Row], answers: dict[str, list[list[int]]]) -> None:
    """Add to each row whether both phases answered its turn alike, and where they part."""
    for row in rows:
        cold, warm = (answers[phase][row["turn"] - 1] for phase in ("cold", "warm"))
        row["identical"] = cold == warm
        parted = (i for i, (a, b) in enumerate(zip(cold, warm, strict=False)) if a != b)
        row["diverges_at"] = None if cold == warm else next(parted, min(len(cold), len(warm)))


def _warm_up(model: Any, tokenizer: Any) -> None:
    """Let the first call's own costs (allocations, lazy imports) fall outside of what is measured."""
    model.generate(tokenizer("Hello", return_tensors="pt")["input_ids"], max_new_tokens=2, do_sample=False)


def _check_room(model: Any, tokenizer: Any, text: str, turns: int, max_new_tokens: int) -> None:
    room = int(model.config.max_position_embeddings)
    needed = len(tokenizer(text)["input_ids"]) + turns * (max_new_tokens + _TOKENS_PER_QUESTION)
    if needed > room:
        raise ConfigError(
            f"{turns} turns of up to {max_new_tokens} new tokens need about {needed} positions, the model has {room}; "
            "lower --turns or --max-new-tokens"
        )
