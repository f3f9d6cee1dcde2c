"""The main job: one conversation over a long text, without the cache, with it, and again after a restart."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .conversation import Row, backend_on, converse, warm_up
from .model import Progress, load_model, silent
from .restart import Options, converse_afresh
from .text import reference_text

PHASES = {"cold": "without the cache", "warm": "with the cache", "restart": "after a restart"}
_TOKENS_PER_QUESTION = 48  # a question and what the template writes around it, generously

Answers = dict[str, list[list[int]]]


def run_demo(
    *,
    dtype: str = "float32",
    turns: int = 4,
    max_new_tokens: int = 32,
    plot: Path | None = None,
    disk: Path | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """Hold the conversation three times, greedily, and return a row for each phase and turn.

    Rows: ``phase`` (cold: without the cache, warm: with it, restart: with what it left on the disk, in a new process),
    ``turn``, ``prompt_tokens``, ``reused_tokens``, ``ttft_s`` (seconds from the call to the first token), ``identical``
    (the answer is the cold one, and the cold one that of all phases) and ``diverges_at`` (the first token that differs,
    counted from 0, or None).

    *disk* is the directory of the disk tier, which stays; without, a temporary one goes with the call.

    Raises MissingDependencyError without the packages or the model, ConfigError for numbers that cannot work,
    StoreError when the new process fails.
    """
    if turns < 1 or max_new_tokens < 1:
        raise ConfigError(f"turns={turns} and max_new_tokens={max_new_tokens} must be at least 1")
    if plot is not None:
        from ..plotting import require_matplotlib

        require_matplotlib()
    model, tokenizer = load_model(dtype, progress)
    text = reference_text()
    check_room(model, tokenizer, text, turns, max_new_tokens)
    with tempfile.TemporaryDirectory(prefix="kvcache-factory-demo-") as temporary:
        options = Options(str(disk or Path(temporary) / "cache"), dtype, turns, max_new_tokens)
        rows, answers = _all_phases(model, tokenizer, text, options, progress)
    compare(rows, answers)
    if plot is not None:
        from .plot import draw

        draw(rows, plot)
    return rows


class Told:
    """What the phases of a demonstration have said so far; *phases*: their names as people read them."""

    def __init__(self, phases: Mapping[str, str], turns: int, progress: Progress) -> None:
        self.rows: list[Row] = []
        self.answers: Answers = defaultdict(list)
        self._phases, self._turns, self._progress = phases, turns, progress

    def said(self, row: Row, answer: list[int]) -> None:
        """A turn has ended with this *answer*."""
        self.rows.append(row)
        self.answers[row["phase"]].append(answer)
        self.tell(row["phase"])

    def tell(self, phase: str) -> None:
        """Show how far *phase* is."""
        turn = min(len(self.answers[phase]) + 1, self._turns)
        done, total = len(self.rows), len(self._phases) * self._turns
        self._progress(done, total, f"{self._phases[phase]}: turn {turn} of {self._turns}")


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row for each turn, its phases beside each other: what the table shows."""
    return [_summary(phases) for phases in by_turn(rows).values()]


def by_turn(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    """The rows of each turn by phase."""
    turns: dict[int, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        turns[row["turn"]][row["phase"]] = row
    return turns


def _summary(phases: dict[str, Row]) -> Row:
    cold, warm, restart = (phases.get(phase) for phase in PHASES)
    assert cold is not None
    assert warm is not None
    summary = {
        "turn": cold["turn"],
        "prompt_tokens": cold["prompt_tokens"],
        "reused_tokens": warm["reused_tokens"],
        "ttft_without_s": cold["ttft_s"],
        "ttft_with_s": warm["ttft_s"],
        "speed_up": cold["ttft_s"] / warm["ttft_s"],
    }
    if restart is not None:
        summary["reused_after_restart"] = restart["reused_tokens"]
        summary["ttft_after_restart_s"] = restart["ttft_s"]
    summary["output"] = "identical" if cold["identical"] else f"differs from token {cold['diverges_at']}"
    return summary


def _all_phases(
    model: Any, tokenizer: Any, text: str, options: Options, progress: Progress
) -> tuple[list[Row], Answers]:
    from ..integration.transformers import TransformersCacheAdapter
    from ..manager import CacheManager

    told = Told(PHASES, options.turns, progress)
    with CacheManager(backend=backend_on(Path(options.directory))) as manager:
        for phase in ("cold", "warm"):
            adapter = TransformersCacheAdapter.attach(model, manager, tokenizer=tokenizer)
            if phase == "cold":
                adapter.detach()  # the same conversation, through the same code, without the cache
            try:
                told.tell(phase)
                warm_up(model, tokenizer)
                converse(adapter, phase, text, options.turns, options.max_new_tokens, told.said)
            finally:
                adapter.detach()
        manager.wait()  # until all is on the disk
    told.tell("restart")
    converse_afresh(options, told.said)
    return told.rows, told.answers


def compare(rows: Sequence[Row], answers: Answers) -> None:
    """Add to each row whether its turn was answered as without the cache, and where not; to a cold row, of all."""
    for row in rows:
        cold = answers["cold"][row["turn"] - 1]
        phases = answers if row["phase"] == "cold" else [row["phase"]]
        parted = [at for phase in phases if (at := _parts_at(cold, answers[phase][row["turn"] - 1])) is not None]
        row["identical"] = not parted
        row["diverges_at"] = min(parted, default=None)


def _parts_at(one: list[int], other: list[int]) -> int | None:
    """The first place where two answers differ; the end of the shorter one where it is the beginning of the other."""
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def check_room(model: Any, tokenizer: Any, text: str, turns: int, max_new_tokens: int) -> None:
    room = int(model.config.max_position_embeddings)
    needed = len(tokenizer(text)["input_ids"]) + turns * (max_new_tokens + _TOKENS_PER_QUESTION)
    if needed > room:
        raise ConfigError(
            f"{turns} turns of up to {max_new_tokens} new tokens need about {needed} positions, the model has {room}; "
            "lower --turns or --max-new-tokens"
        )
