"""Pruning methods over a prefix: what stays, in a cache that the reader goes on from."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..integration.transformers.layout import cache_argument
from ..integration.transformers.pruned import PrunedCache, Pruner
from ..integration.transformers.pruning import ALL_QUERIES, PruningMethod
from .blocks import Coded
from .reader import KV, PrunedKV, cache_of


class _Replayed(Pruner):
    """Prunes what was read before: the pass over the last tokens is for their queries only."""

    def __init__(self, model: Any, cache: PrunedCache, method: PruningMethod, kv: KV) -> None:
        super().__init__(model, cache, method, kv.shape[3])
        self._read = cache_of(kv).layers

    def after(self, layer: int, mass: torch.Tensor | None) -> None:
        held, read = self.cache.layers[layer], self._read[layer]
        held.keys, held.values = read.keys, read.values
        super().after(layer, mass)


def prune(model: Any, kv: KV, ids: list[int], method: PruningMethod) -> Coded:
    """The prefix *ids* with the keys and values *kv*, pruned: the queries that *method* looks at are computed again.

    Sizes are those of bfloat16, as codecs' are.
    """
    observed = len(ids) if method.queries == ALL_QUERIES else min(max(method.queries, 1), len(ids))
    head = len(ids) - observed
    cache = PrunedCache(len(kv)) if not head else PrunedCache.over(cache_of(kv[:, :, :, :head]))
    arguments: dict[str, Any] = {"input_ids": torch.tensor([ids[head:]]), cache_argument(model): cache}
    with torch.inference_mode(), _Replayed(model, cache, method, kv):
        model(use_cache=True, **arguments)
    stored = 2 * sum(int(layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    return Coded(PrunedKV(lambda: copy.deepcopy(cache)), 0, 0, kv.nbytes, stored, 0.0, 0.0)
