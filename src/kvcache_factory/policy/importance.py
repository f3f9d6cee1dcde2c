"""Scorers of importance for :class:`~kvcache_factory.policy.scored.HeuristicEvictionPolicy`.

A scorer is called as ``scorer(tokens, text)`` with the tokens ``[blocks, block_tokens]`` of a chain and its text where
the caller has it (else None), and returns 0 to 1 for each block.  A word of text is taken to lie where its share of the
characters lies in the tokens: near enough for blocks of 64 tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, instead_of

if TYPE_CHECKING:
    from .base import Importance

Tokens = npt.NDArray[np.uint32]
Scores = npt.NDArray[np.float64]

_HEADING = re.compile(
    r"^(?:#{1,6} .+|\d+(?:\.\d+)*[.)]? [A-Z].*|.+\n[=-]{3,}|\[[A-Z_ ]+\]|<\|?[\w ]+\|?>)$", re.MULTILINE
)
_BOUNDARY = re.compile(r"\n\s*\n")
_WORD = re.compile(r"[^\W\d_]{4,}")


def headings(tokens: Tokens, text: str | None) -> Scores:
    """1 for blocks in which a section begins (a heading, a role marker), 0.75 for paragraph boundaries, 0.25 else.

    Without text, blocks that hold the chain's rarest tokens stand in for them: delimiters are rare in prose.
    """
    scores = np.full(len(tokens), 0.25)
    if text is None:
        return _rare(tokens)
    for weight, pattern in ((0.75, _BOUNDARY), (1.0, _HEADING)):
        for found in pattern.finditer(text):
            block = _block_at(found.start(), text, len(tokens))
            scores[block] = max(scores[block], weight)
    if len(scores):
        scores[0] = 1.0
    return scores


def keywords(tokens: Tokens, text: str | None) -> Scores:
    """Density of words (of tokens, without text) that come back in this chain but not everywhere, scaled to 0..1."""
    if text is None:
        return _recurring(tokens)
    counts = Counter(word.lower() for word in _WORD.findall(text))
    common = max(len(tokens), 2)
    density = np.zeros(len(tokens))
    for found in _WORD.finditer(text):
        if 2 <= counts[found[0].lower()] <= common:
            density[_block_at(found.start(), text, len(tokens))] += 1
    return _scaled(density)


def attention(mass: Any, block_tokens: int) -> Scores:
    """Importance from attention mass: the share that each block of *mass* ``[tokens]`` received, scaled to 0..1.

    For adapters that can supply it: pass the result as ``importance=`` to ``KeySpace.save``.  Whole blocks only.
    """
    mass = np.asarray(mass, np.float64)
    if mass.ndim != 1 or (mass < 0).any() or not np.isfinite(mass).all():
        raise ConfigError("attention mass: give one finite number of at least 0 for each token")
    blocks = len(mass) // block_tokens
    return _scaled(mass[: blocks * block_tokens].reshape(blocks, block_tokens).sum(axis=1))


def _block_at(character: int, text: str, blocks: int) -> int:
    return min(character * blocks // max(len(text), 1), blocks - 1)


def _scaled(values: Scores) -> Scores:
    top = float(values.max()) if len(values) else 0.0
    return values / top if top else values


def _counts(tokens: Tokens) -> npt.NDArray[np.int64]:
    _, inverse, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    each: npt.NDArray[np.int64] = counts[inverse].reshape(tokens.shape)
    return each


def _rare(tokens: Tokens) -> Scores:
    if not tokens.size:
        return np.zeros(len(tokens))
    share: Scores = (_counts(tokens) == 1).mean(axis=1)
    return _scaled(share)


def _recurring(tokens: Tokens) -> Scores:
    if not tokens.size:
        return np.zeros(len(tokens))
    counts = _counts(tokens)
    share: Scores = ((counts >= 2) & (counts <= max(len(tokens), 2))).mean(axis=1)
    return _scaled(share)


_SCORERS: dict[str, Importance] = {"headings": headings, "keywords": keywords}


def register_scorer(name: str, function: Importance) -> None:
    """Make a scorer usable by *name* in configurations; a taken name is a ConfigError."""
    if _SCORERS.setdefault(name, function) is not function:
        raise ConfigError(f"the scorer name {name!r} is taken")


def scorer(name: str) -> Importance:
    """The scorer of this name; ConfigError with the nearest names when there is none."""
    found = _SCORERS.get(name)
    if found is None:
        raise ConfigError(f"there is no importance scorer {name!r}; {instead_of(name, _SCORERS)}")
    return found
