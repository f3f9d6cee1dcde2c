"""What prefill costs and what a hit saves: seconds from tokens and positions, measured or derived from a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .models import Model

Tokens = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

ASSUMED_TFLOPS = 300.0
"""Useful TFLOP/s of an accelerator in prefill, where nothing is measured or given."""


class CostModel(msgspec.Struct, frozen=True):
    """Seconds of prefill: a token at position p costs ``token_s + position_s * p``.

    Attributes
    ----------
    token_s:
        Seconds a token without attention to what is before it.
    position_s:
        Seconds a token and position before it.
    source:
        Where the figures come from, for people.
    """

    token_s: float
    position_s: float = 0.0
    source: str = "given"

    def prefill_s(self, first: Tokens | int, last: Tokens | int) -> Any:
        """Seconds to compute the tokens from position *first* to *last* - 1."""
        first, last = np.asarray(first, np.float64), np.asarray(last, np.float64)
        return self.token_s * (last - first) + self.position_s * (last**2 - first**2) / 2

    @classmethod
    def from_rate(cls, tokens_per_s: float) -> CostModel:
        """A constant rate."""
        if not 0 < tokens_per_s < float("inf"):
            raise ConfigError(f"a prefill rate of {tokens_per_s} tokens a second cannot be; give one above 0")
        return cls(1 / tokens_per_s, source=f"{tokens_per_s:g} tokens/s")

    @classmethod
    def of_model(cls, model: Model, tflops: float = ASSUMED_TFLOPS) -> CostModel:
        """From the operations of a dense transformer: two for each weight, four for each layer, width and position."""
        if not tflops > 0:
            raise ConfigError(f"{tflops} TFLOP/s cannot be; give a number above 0")
        per_s = tflops * 1e12
        return cls(2 * model.parameters / per_s, 4 * model.layers * model.width / per_s, f"{tflops:g} TFLOP/s")

    @classmethod
    def fit(cls, points: Iterable[tuple[float, float]]) -> CostModel:
        """From measured (prompt tokens, seconds to first token without the cache)."""
        table = np.array(sorted(points), np.float64).reshape(-1, 2)
        if len(np.unique(table[:, 0])) < 2 or not (table > 0).all():
            raise ConfigError("a cost model needs positive times of at least two prompt lengths")
        tokens, seconds = table.T
        terms = np.stack((np.ones_like(tokens), tokens, tokens**2 / 2), axis=1)
        # A negative part has no meaning: leave it out and fit what remains.
        for used in ([0, 1, 2], [0, 1], [1, 2], [1]):
            found, *_ = np.linalg.lstsq(terms[:, used] / seconds[:, None], np.ones_like(seconds), rcond=None)
            parts = dict(zip(used, found.tolist(), strict=True))
            if all(value >= 0 for value in parts.values()) and len(used) <= len(seconds):
                return cls(parts.get(1, 0.0), parts.get(2, 0.0), f"measured at {len(table)} lengths")
        raise ConfigError("the measured times do not grow with the length of the prompt")

    @classmethod
    def from_file(cls, path: Path) -> CostModel:
        """Fit to what ``demo --json`` printed: its cold rows, with ``prompt_tokens`` and ``ttft_s``."""
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            points = [
                (float(row["prompt_tokens"]), float(row["ttft_s"]))
                for row in rows
                if row.get("phase", "cold") == "cold" and not row.get("reused_tokens")
            ]
        except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} holds no measured prefill times ({type(error).__name__}: {error}); give the output of "
                "`kvcache-factory demo --json`, or rows with prompt_tokens and ttft_s"
            ) from error
        return cls.fit(points)


def saved_s(
    cost: CostModel, hits: list[Tokens], block_tokens: int, inputs: Tokens, block_bytes: int, rates: list[float]
) -> float:
    """Seconds of prefill that hits have saved, less those that loading took.

    *hits* are blocks by tier and request, *rates* bytes a second by tier; a request has at most *inputs* tokens.
    """
    tokens = np.minimum(np.sum(hits, axis=0) * block_tokens, inputs)
    saved = float(cost.prefill_s(0, tokens).sum())
    return saved - sum(float(blocks.sum()) * block_bytes / rate for blocks, rate in zip(hits, rates, strict=True))
