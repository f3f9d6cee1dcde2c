"""A model that reads a prefix once, and then answers from whatever cache it is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from ..block.spec import BlockSpec, KVDtype, RopeParameters
from ..errors import LayoutError
from ..integration.transformers.layout import cache_argument
from ..integration.transformers.pruned import MaskCut, PrunedCache

KV = npt.NDArray[np.uint16]
"""Keys and values of a prefix, bfloat16 bits ``[layers, 2, heads, tokens, head_dim]``."""


class PrunedKV(msgspec.Struct, frozen=True):
    """A prefix of which tokens are gone; ``fresh`` gives a cache of what is left."""

    fresh: Callable[[], PrunedCache]


class Reader:
    """A float32 model, so that differences are those of the cache; the cache itself is bfloat16, as engines keep it."""

    def __init__(self, model: Any, block_tokens: int) -> None:
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = config.num_hidden_layers
        rope = RopeParameters.from_config(config.to_dict())
        self.model = model
        self.spec = BlockSpec(KVDtype.BF16, layers, heads, dim, block_tokens, rope)
        self._cache_name = cache_argument(model)
        self.read_bytes = 0
        self.read_seconds = 0.0

    def read(self, ids: list[int]) -> KV:
        """Compute the KV of *ids*; LayoutError for a model that has no plain keys and values in every layer."""
        begun = time.process_time()
        with torch.inference_mode():
            cache = DynamicCache()
            self._forward(ids, cache, logits_to_keep=1)
        self.read_seconds += time.process_time() - begun
        spec = self.spec
        parts = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
        shape = (2, spec.num_kv_heads, len(ids), spec.head_dim)
        if len(parts) != spec.num_layers or any(tuple(part.shape) != shape for part in parts):
            raise LayoutError("quality measures models with plain keys and values in every layer, and this is none")
        found = torch.stack(parts).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        self.read_bytes += found.nbytes
        return found

    @property
    def read_gbps(self) -> float:
        """Bytes of KV (1e9) that a second of CPU time computes."""
        return self.read_bytes / self.read_seconds / 1e9 if self.read_seconds else 0.0

    def log_probabilities(self, kv: KV | PrunedKV, ids: list[int]) -> Any:
        """Of all tokens, after each of *ids* behind the prefix of *kv*: ``float32 [len(ids), vocabulary]``."""
        with torch.inference_mode():
            return torch.log_softmax(self._forward(ids, cache_of(kv)).logits[0].float(), dim=-1)

    def greedy(self, kv: KV | PrunedKV, first: int, count: int) -> list[int]:
        """The *count* tokens that follow *first* behind the prefix of *kv*."""
        cache, token, found = cache_of(kv), first, []
        with torch.inference_mode():
            for _ in range(count):
                token = int(self._forward([token], cache).logits[0, -1].argmax())
                found.append(token)
        return found

    def _forward(self, ids: list[int], cache: Any, **options: Any) -> Any:
        with MaskCut(self.model, cache) if isinstance(cache, PrunedCache) else nullcontext():
            return self.model(input_ids=torch.tensor([ids]), use_cache=True, **{self._cache_name: cache}, **options)


def cache_of(kv: KV | PrunedKV) -> Any:
    """A cache of one's own that holds *kv*."""
    if isinstance(kv, PrunedKV):
        return kv.fresh()
    cache = DynamicCache()
    tensors = torch.from_numpy(kv.view(np.int16)).view(torch.bfloat16).to(torch.float32)
    for layer in range(len(kv)):
        cache.update(tensors[layer, 0][None].clone(), tensors[layer, 1][None].clone(), layer)
    return cache


def divergence(reference: Any, other: Any) -> float:
    """Mean Kullback-Leibler divergence of *other* from *reference*, log probabilities ``[tokens, words]``, in nats."""
    return float((reference.exp() * (reference - other)).sum(-1).mean())


def surprise(log: Any, ids: list[int]) -> float:
    """Mean negative log likelihood, by *log* ``[tokens, words]``, of each token of *ids* after the one before."""
    return -float(log[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean())
