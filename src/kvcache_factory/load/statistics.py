"""How people ask: lengths, pauses and changes of topic, built in or measured from a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from ..simulate.workload import Workload, read_trace

POINTS = 21
"""Quantiles that a distribution is kept as: 0 %, 5 %, ... 100 %."""

LONGEST_PAUSE = 20.0
"""Longer ones, in means, are nights between the days of a trace."""

Quantiles = tuple[float, ...]


class Statistics(msgspec.Struct, frozen=True):
    """Distributions of a workload, each as the values at 0, 5, ... 100 %.

    Attributes
    ----------
    source:
        Where they come from.
    first_tokens:
        Tokens of a prompt that begins a topic: system prompt, document, question.
    more_tokens:
        Tokens that a later prompt of the topic adds to what was there before, the last answer included.
    output_tokens:
        Tokens of an answer.
    pauses:
        Time between arrivals, as parts of its mean.
    new_topic:
        Part of the requests that begin a topic.
    """

    source: str
    first_tokens: Quantiles
    more_tokens: Quantiles
    output_tokens: Quantiles
    pauses: Quantiles
    new_topic: float

    @property
    def context_tokens(self) -> float:
        """Tokens of a long context: what nine of ten topics begin with, and as many turns as a topic usually has."""
        turns = min(1 / max(self.new_topic, 0.01), 20.0)
        return self.first_tokens[18] + turns * (self.more_tokens[10] + self.output_tokens[10])


def _points(text: str) -> Quantiles:
    return tuple(float(value) for value in text.split())


BUILT_IN = Statistics(
    source="the conversation trace of Mooncake (FAST'25)",
    first_tokens=_points(
        "1025 1225 1494 2054 3075 4028 4641 5217 6003 6993 8108 9322 10846 12318 14097 16250 18717 22663 28633 41474 "
        "126195"
    ),
    more_tokens=_points("1 180 326 382 385 390 398 420 453 497 544 609 668 727 806 885 975 1147 2089 4651 25448"),
    output_tokens=_points("1 10 24 46 100 156 213 256 291 322 350 375 399 423 447 472 504 543 597 698 2000"),
    pauses=_points("0 .05 .11 .16 .22 .29 .36 .43 .51 .6 .69 .8 .92 1.05 1.2 1.39 1.61 1.9 2.3 3 6"),
    new_topic=0.5753,
)
"""Its arrivals come in bursts of its clock, so that pauses are those of independent arrivals instead."""


def measure(path: Path, progress: Callable[[float, float], None] = lambda done, total: None) -> Statistics:
    """The statistics of a trace in any format that ``replay`` reads; raises TraceError."""
    with read_trace(path, progress=progress) as workload:
        return _of(workload)


def _of(workload: Workload) -> Statistics:
    shared = _shared_blocks(workload) * workload.block_tokens
    inputs = np.asarray(workload.inputs, np.float64)
    begins = shared < inputs / 2
    if begins.all() or not begins.any():
        raise TraceError(f"{workload.name}: its requests have no beginnings and continuations to measure")
    gaps = np.diff(np.asarray(workload.at_s, np.float64))
    gaps = gaps[gaps >= 0]
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return Statistics(
        source=workload.name,
        first_tokens=_quantiles(inputs[begins]),
        more_tokens=_quantiles(np.maximum(inputs - shared, 1)[~begins]),
        output_tokens=_quantiles(np.maximum(np.asarray(workload.outputs, np.float64), 1)),
        pauses=_quantiles(np.minimum(gaps / mean, LONGEST_PAUSE)) if mean else (1.0,) * POINTS,
        new_topic=round(float(begins.mean()), 4),
    )


def _shared_blocks(workload: Workload) -> npt.NDArray[np.int64]:
    """Leading blocks of each request that an earlier one had: blocks are numbered in the order of their coming."""
    shared, known = np.zeros(len(workload), np.int64), -1
    for number in range(len(workload)):
        nodes = workload.request(number)
        old = nodes <= known
        shared[number] = len(nodes) if old.all() else int(old.argmin())
        known = max(known, int(nodes.max(initial=-1)))
    return shared


def _quantiles(values: npt.NDArray[Any]) -> Quantiles:
    return tuple(round(float(q), 3) for q in np.quantile(values, np.linspace(0, 1, POINTS)))


def draw(quantiles: Quantiles, random: np.random.Generator) -> float:
    """A value of this distribution."""
    return float(np.interp(random.random(), np.linspace(0, 1, len(quantiles)), quantiles))
