"""Pruning: which tokens of a live sequence a layer keeps, by one small contract, and the published methods.

A method is a description (its numbers, and what it has to see); given keys, values and attention it scores tokens, and
the contract keeps as many as the layer's budget says.  What was pruned is gone for this sequence only: see
:mod:`.pruned` for the cache that holds it, and why it is nobody else's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from ...errors import ConfigError

ALL_QUERIES = -1
"""A method's ``window`` that stands for every query of the sequence."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a method may look at, of one layer.

    ``keys``, ``values``: ``[batch, KV heads, tokens, head_dim]``, keys as they are cached (rotated).  ``mass``:
    attention that each token received, ``float32 [batch, KV heads, tokens]``, summed over the observed queries and
    averaged over the query heads of a KV head; None for methods that do not ask for queries.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mass: torch.Tensor | None = None
    layer: int = 0
    layers: int = 1


@dataclass(frozen=True, kw_only=True)
class PruningMethod(ABC):
    """Chooses the tokens that stay.

    Parameters
    ----------
    keep:
        Share of the prompt's tokens that stays, over all layers; above 0 and at most 1.
    sinks:
        First tokens that always stay.
    recent:
        Last tokens that always stay.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    ongoing: ClassVar[bool] = False
    """Whether tokens go on leaving while the sequence grows, so that its memory stays as it is."""

    keep: float = 0.5
    sinks: int = 4
    recent: int = 32

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise ConfigError(f"pruning {self.name}: keep={self.keep!r} must be above 0 and at most 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "keep" and (type(value) is not int or value < self.least(field.name)):
                least = self.least(field.name)
                raise ConfigError(f"pruning {self.name}: {field.name}={value!r} must be an integer of at least {least}")

    @classmethod
    def least(cls, parameter: str) -> int:
        """The smallest value of an integer parameter."""
        return 0 if parameter in ("sinks", "recent") else 1

    @property
    def queries(self) -> int:
        """How many of the last queries it has to see: 0 for none, :data:`ALL_QUERIES` for all."""
        return 0

    @abstractmethod
    def scores(self, seen: Seen) -> torch.Tensor:
        """How much each token is worth keeping, ``[batch, KV heads, tokens]``; higher stays."""

    def budget(self, tokens: int, layer: int, layers: int) -> int:
        """Tokens that *layer* keeps of *tokens*; at least those that always stay."""
        return min(tokens, max(round(self.keep * tokens), self.sinks + self.recent, 1))

    def kept(self, seen: Seen, budget: int) -> torch.Tensor:
        """Numbers of the *budget* tokens that stay, ascending, ``int64 [batch, KV heads, budget]``."""
        scores = self.scores(seen).float().clone()
        scores[..., : self.sinks] = torch.inf
        if self.recent:
            scores[..., -self.recent :] = torch.inf
        return scores.topk(budget, dim=-1).indices.sort(dim=-1).values

    def __str__(self) -> str:
        """As commands and reports write it: ``snapkv:keep=0.5,window=64``; defaults are left out."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (":" + ",".join(changed) if changed else "")


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(PruningMethod):
    """Keeps the first tokens and the last (Xiao et al., ICLR 2024, arXiv 2309.17453).

    Deviation: keys keep the rotation of their true positions; the paper counts positions inside the cache, which lets
    a model go on past the length that it was trained for.  Here positions are true, so that length stays the limit.
    """

    name = "streaming"
    source = "arXiv 2309.17453"
    ongoing = True
    recent: int = 0

    def scores(self, seen: Seen) -> torch.Tensor:
        order = torch.arange(seen.keys.shape[2], device=seen.keys.device, dtype=torch.float32)
        return order.expand(seen.keys.shape[:3])


@dataclass(frozen=True, kw_only=True)
class H2O(PruningMethod):
    """Keeps heavy hitters, by attention summed over all queries, and as many recent tokens (Zhang et al., NeurIPS
    2023, arXiv 2306.14048).

    Deviations: the choice begins when the prompt has been read, not within it, and ``sinks`` stay in any case.  All
    queries must be seen, so nothing is loaded from the cache for such a request.
    """

    name = "h2o"
    source = "arXiv 2306.14048"
    ongoing = True

    @property
    def queries(self) -> int:
        return ALL_QUERIES

    def scores(self, seen: Seen) -> torch.Tensor:
        assert seen.mass is not None, "H2O needs attention"
        return seen.mass

    def kept(self, seen: Seen, budget: int) -> torch.Tensor:
        scores = self.scores(seen).float().clone()
        scores[..., : self.sinks] = torch.inf
        scores[..., -max(budget // 2, self.recent, 1) :] = torch.inf
        return scores.topk(budget, dim=-1).indices.sort(dim=-1).values


@dataclass(frozen=True, kw_only=True)
class SnapKV(PruningMethod):
    """Keeps what the last ``window`` queries of the prompt look at, smoothed over ``kernel`` tokens (Li et al., NeurIPS
    2024, arXiv 2404.14469).

    Deviations: query heads of one KV head vote together, as the cache has one copy for them; the tokens of the window
    and ``sinks`` stay in any case.
    """

    name = "snapkv"
    source = "arXiv 2404.14469"

    recent: int = 0
    window: int = 64
    kernel: int = 5

    @property
    def queries(self) -> int:
        return self.window

    def scores(self, seen: Seen) -> torch.Tensor:
        assert seen.mass is not None, f"{self.name} needs attention"
        pooled = torch.nn.functional.avg_pool1d(
            seen.mass, self.kernel, stride=1, padding=self.kernel // 2, count_include_pad=False
        )[..., : seen.mass.shape[-1]].clone()
        pooled[..., -self.window :] = torch.inf
        return pooled

    def budget(self, tokens: int, layer: int, layers: int) -> int:
        return min(tokens, max(PruningMethod.budget(self, tokens, layer, layers), self.sinks + self.window))


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall in even steps from layer to layer (Cai et al., 2024, arXiv 2406.02069).

    ``beta``: the last layer gets this part of the mean budget.  Deviation: where the first layer would get more than
    there is, the slope is flattened until it gets all, so that the sum over layers stays the same.
    """

    name = "pyramidkv"
    source = "arXiv 2406.02069"

    beta: int = 20

    def budget(self, tokens: int, layer: int, layers: int) -> int:
        mean = self.keep * tokens
        first = min(float(tokens), 2 * mean - mean / self.beta)
        share = layer / (layers - 1) if layers > 1 else 0.5
        wanted = round(first + (2 * mean - 2 * first) * share)
        return min(tokens, max(wanted, self.sinks + self.window))


@dataclass(frozen=True, kw_only=True)
class L2Norm(PruningMethod):
    """Keeps keys of small norm, which attention favours ("Knorm"; Devoto et al., EMNLP 2024, arXiv 2406.11430).

    Deviations: ``sinks`` and ``recent`` stay in any case, and no layer is spared (the paper leaves the first
    two alone).
    """

    name = "l2norm"
    source = "arXiv 2406.11430"

    def scores(self, seen: Seen) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(seen.keys.float(), dim=-1)
        return -norms


@dataclass(frozen=True, kw_only=True)
class KeyDiff(PruningMethod):
    """Keeps keys that differ from the others: least cosine similarity to the mean direction (Park et al., 2025, arXiv
    2504.15364).

    Deviations: it is applied once, when the whole prompt has been read, not block by block; ``sinks`` and ``recent``
    stay in any case.
    """

    name = "keydiff"
    source = "arXiv 2504.15364"

    def scores(self, seen: Seen) -> torch.Tensor:
        directions = torch.nn.functional.normalize(seen.keys.float(), dim=-1)
        anchor = directions.mean(dim=2, keepdim=True)
        return -torch.nn.functional.cosine_similarity(directions, anchor, dim=-1)


_METHODS: dict[str, type[PruningMethod]] = {
    method.name: method for method in (StreamingLLM, H2O, SnapKV, PyramidKV, L2Norm, KeyDiff)
}


def pruning_names() -> list[str]:
    """Names that :func:`parse_pruning` knows."""
    return list(_METHODS)


def register_pruning(method: type[PruningMethod]) -> type[PruningMethod]:
    """Make a method known by its name; a name that is taken is a ConfigError."""
    if not method.name or _METHODS.setdefault(method.name, method) is not method:
        raise ConfigError(f"the name of a pruning method, {method.name!r}, must be new and not empty")
    return method


def parse_pruning(text: str) -> PruningMethod:
    """The method of ``name`` or ``name:parameter=value,parameter=value``; ConfigError for what is none."""
    name, _, rest = text.partition(":")
    method = _METHODS.get(name.strip())
    if method is None:
        raise ConfigError(f"there is no pruning method {name!r}; use one of {', '.join(_METHODS)}")
    known = {field.name: field for field in fields(method)}
    given: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in known:
            raise ConfigError(f"pruning {text!r}: {pair!r} is none of {', '.join(f'{k}=…' for k in known)}")
        try:
            given[key] = float(value) if key == "keep" else int(value)
        except ValueError:
            raise ConfigError(f"pruning {text!r}: {key}={value!r} is not a number") from None
    return method(**given)
