"""Requests that ask for more than exact reuse: each in a class of its own, chosen by what the caller gave."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ...block.digest import digest128
from ...codec.names import is_lossy
from ...errors import ConfigError
from ...policy.compression import CompressionPolicy
from ...policy.importance import attention
from .calls import Bypass, NotServed
from .layout import fill, new_cache
from .observing import AttentionMass
from .pruned import PrunedCache, Pruner
from .pruning import ALL_QUERIES, PruningMethod, parse_pruning
from .request import Request
from .reuse import Reuse, ReusedRequest
from .rotation import Rotation
from .tiered import TieredCache

RANKING_QUERIES = 64
"""Last queries of the prompt whose attention ranks blocks."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What ``generate`` returned, and what was done for it."""

    output: Any
    report: dict[str, Any]


class PrunedRequest(Request):
    """A request whose cache is pruned when the prompt has been read; nothing of it is stored."""

    def __init__(self, *args: Any, method: PruningMethod, **options: Any) -> None:
        super().__init__(*args, **options)
        self._method = method
        self._length = int(self.call.ids.shape[1])
        self.computed = self._length if method.queries == ALL_QUERIES else max(method.queries, 1)

    def open(self) -> None:
        """As any request; its cache counts what is stored apart from what the sequence is long."""
        if any(self.call.pads):
            raise NotServed(Bypass.PADDED)
        super().open()
        self.cache = PrunedCache.over(self.cache)
        self._pruner = Pruner(self.model, self.cache, self._method, self._length)

    def watching(self) -> AbstractContextManager[None]:
        return self._pruner

    def save(self, *_: Any, **__: Any) -> int:
        """Nothing: later layers and tokens saw what pruning left, and a shared prefix promises all of it."""
        return 0

    def report(self) -> dict[str, Any]:
        """The method, the true length, what is stored of it, and an identity that is nobody else's."""
        cache = self.cache
        whole = self.space.spec.bytes_per_token * cache.get_seq_length() * max(len(self.call.ids) * self.call.expand, 1)
        return {
            "method": str(self._method),
            "identity": self.identity,
            "true_tokens": cache.get_seq_length(),
            "stored_tokens": cache.stored_tokens,
            "bytes_held": cache.bytes_held,
            "ratio": whole / cache.bytes_held,
            **super().report(),
        }

    @property
    def identity(self) -> str:
        """Whose KV it is: the model's, by this method, of these tokens; no key of a block can be equal to it."""
        return digest128(
            b"pruned", self.space.identity.record() + str(self._method).encode() + self.call.ids.tobytes()
        ).hex()


class RankedRequest(Request):
    """An exact request that tells the cache which blocks its last queries looked at."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.computed = RANKING_QUERIES
        self._importances: list[Any] = []

    def open(self) -> None:
        super().open()
        self._observer = AttentionMass(self.model, self.cache, self.computed, int(self.call.ids.shape[1]))

    def watching(self) -> AbstractContextManager[None]:
        return self._observer

    def report(self) -> dict[str, Any]:
        """Importance, 0 to 1, of the prompt's blocks, one list a saved row."""
        return {**super().report(), "importance": self._importances}

    def _importance(self, attentions: Any, i: int, pad: int) -> Any:
        mass = self._observer.mass
        if mass is None:
            return super()._importance(attentions, i, pad)
        ranks = attention(mass[i].cpu().numpy()[pad:], self.space.block_tokens)
        self._importances.append([round(float(rank), 6) for rank in ranks])
        return ranks


class CompressedRequest(Request):
    """A request whose live cache is encoded behind its end; what a lossy codec may have touched is not stored."""

    def __init__(self, *args: Any, policy: CompressionPolicy, **options: Any) -> None:
        super().__init__(*args, **options)
        self._policy = policy

    def open(self) -> None:
        super().open()
        self.cache = TieredCache.over(self.cache, self._policy)

    def save(self, *args: Any, **options: Any) -> int:
        if is_lossy(self._policy.method):
            return 0
        plain = new_cache(self.model)
        wholes = [[tensor.clone() for tensor in layer.whole()] for layer in self.cache.layers]
        fill(plain, *zip(*wholes, strict=True))
        tiered, self.cache = self.cache, plain
        try:
            return super().save(*args, **options)
        finally:
            self.cache = tiered

    def report(self) -> dict[str, Any]:
        """The codec, and what the cache takes with it and would take without."""
        layer = self.cache.layers[0]
        whole = self.space.spec.bytes_per_token * layer.get_seq_length() * len(layer.keys)
        return {
            "method": self._policy.method,
            "true_tokens": layer.get_seq_length(),
            "encoded_tokens": layer.encoded_tokens,
            "bytes_held": self.cache.bytes_held,
            "ratio": whole / self.cache.bytes_held,
            **super().report(),
        }


def request_maker(
    model: Any,
    prune: PruningMethod | str | None,
    reuse: Reuse | None,
    compress: CompressionPolicy | None,
    rank: bool,
) -> tuple[str, Callable[..., Request]]:
    """What was asked for in words, and what makes such a request; ConfigError where two things exclude each other."""
    asked = {"prune": prune, "reuse": reuse, "compress": compress, "rank_blocks": rank or None}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"generate({', '.join(f'{name}=…' for name in given)}): give one of them")
    if prune is not None:
        method = parse_pruning(prune) if isinstance(prune, str) else prune
        if not isinstance(method, PruningMethod):
            raise ConfigError(f"generate(prune={prune!r:.60}): give a PruningMethod or its name")
        return f"prune={method}", lambda *a, **o: PrunedRequest(*a, method=method, **o)
    if reuse is not None:
        if not isinstance(reuse, Reuse):
            raise ConfigError(f"generate(reuse={reuse!r:.60}): give a Reuse")
        return "reuse", lambda *a, **o: ReusedRequest(*a, reuse=reuse, rotation=Rotation.of(model), **o)
    if compress is not None:
        if not isinstance(compress, CompressionPolicy):
            raise ConfigError(f"generate(compress={compress!r:.60}): give a CompressionPolicy")
        TieredCache(1, compress)  # says what it cannot do before anything runs
        return f"compress={compress.method}", lambda *a, **o: CompressedRequest(*a, policy=compress, **o)
    return ("rank_blocks", RankedRequest) if rank else ("", Request)
