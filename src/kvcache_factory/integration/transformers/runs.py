"""Runs of tokens that two sequences share, wherever they stand: what may be reused beyond the exact prefix.

By equality of tokens only; a run is found by its first ``at_least`` tokens and is as long as the tokens stay equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

_PLACES = 8
"""Places of one beginning that are tried; text that repeats itself more often is as well served by any of them."""


class Run(NamedTuple):
    """``length`` tokens that stand at ``old`` in source number ``source`` and at ``new`` in the prompt.

    ``exact``: behind the same tokens in both, so that their KV is the same.
    """

    source: int
    old: int
    new: int
    length: int
    exact: bool = False


def find_runs(sources: Sequence[Tokens], prompt: Tokens, at_least: int, begin: int = 0) -> list[Run]:
    """Runs of at least *at_least* tokens of *prompt* from *begin* on, in order and apart, the longest at each place."""
    places = _places(sources, at_least)
    runs: list[Run] = []
    at = begin
    starts = _windows(prompt, at_least)
    while at < len(starts):
        best = Run(0, 0, at, 0)
        for source, old in places.get(starts[at].tobytes(), ()):
            length = equal_tokens(sources[source][old:], prompt[at:])
            if length > best.length:
                best = Run(source, old, at, length)
        if best.length:
            runs.append(best)
        at += max(best.length, 1)
    return runs


def _places(sources: Sequence[Tokens], at_least: int) -> dict[bytes, list[tuple[int, int]]]:
    places: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for number, tokens in enumerate(sources):
        for old, window in enumerate(_windows(tokens, at_least)):
            here = places[window.tobytes()]
            if len(here) < _PLACES:
                here.append((number, old))
    return places


def _windows(tokens: Tokens, size: int) -> Tokens:
    if len(tokens) < size:
        return np.empty((0, size), np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, size)


def equal_tokens(one: Tokens, two: Tokens) -> int:
    """Leading tokens that are equal."""
    n = min(len(one), len(two))
    differ = np.flatnonzero(one[:n] != two[:n])
    return int(differ[0]) if len(differ) else n
