"""The cache of a pruned sequence: it says how long the sequence is, and how much of it is left."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .observing import Observer
from .pruning import ALL_QUERIES, PruningMethod, Seen


class PrunedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that holds some of its tokens, each head its own; ``keys`` and ``values`` ``[B, H, stored, D]``.

    Its length is that of the sequence, because positions of new tokens are counted by it; the mask is told what is
    stored, with an offset that puts the newest keys where they belong, as sliding layers do.
    """

    is_croppable = False

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.true_length = 0
        self.budget = 0
        self.mass: torch.Tensor | None = None

    @property
    def stored(self) -> int:
        """Tokens that are held for each head."""
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys is not None and self.keys.numel() else 0

    @property
    def is_pruned(self) -> bool:
        """Whether tokens are gone."""
        return self.stored < self.true_length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.true_length += int(key_states.shape[-2])
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.true_length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """*query*: the number of queries (Transformers 5), or their positions (4)."""
        count = query if isinstance(query, int) else int(query.shape[0])
        return self.stored + count, self.true_length - self.stored

    def keep(self, kept: torch.Tensor) -> None:
        """Let all tokens go but those of the numbers *kept* ``[B, H, n]``."""
        index = kept.unsqueeze(-1).expand(-1, -1, -1, self.keys.shape[-1])
        self.keys, self.values = self.keys.gather(2, index), self.values.gather(2, index)
        if self.mass is not None:
            self.mass = self.mass.gather(2, kept)

    def crop(self, tokens: int) -> None:
        """Refused with ValueError: what lies before the end may be gone."""
        raise ValueError("a pruned cache cannot be cropped: tokens before its end are gone")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows change places while beams are searched, what they were looked at with them."""
        super().reorder_cache(beam_idx)
        if self.mass is not None:
            self.mass = self.mass.index_select(0, beam_idx.to(self.mass.device))

    def reset(self) -> None:
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        self.true_length, self.budget, self.mass = 0, 0, None


class PrunedCache(Cache):  # type: ignore[misc]
    """A cache of :class:`PrunedLayer`.  It is this sequence's only: the adapter never stores it, under any key."""

    shareable = False

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[PrunedLayer() for _ in range(layers)])

    @classmethod
    def over(cls, cache: Any) -> PrunedCache:
        """The tokens of a plain *cache*, all of them so far; no copy is made."""
        made = cls(len(cache.layers))
        for own, layer in zip(made.layers, cache.layers, strict=True):
            if layer.get_seq_length():
                own.update(layer.keys, layer.values)
        return made

    def get_mask_sizes(self, query: Any, layer_idx: int) -> tuple[int, int]:
        """Wide enough for the layer that holds most; narrower ones have it cut for them (see :class:`MaskCut`)."""
        widest = max(self.layers, key=lambda layer: int(layer.stored))
        sizes: tuple[int, int] = widest.get_mask_sizes(query)
        return sizes

    @property
    def is_pruned(self) -> bool:
        """Whether tokens are gone from any layer."""
        return any(layer.is_pruned for layer in self.layers)

    @property
    def stored_tokens(self) -> list[int]:
        """Tokens that each layer holds for each head."""
        return [layer.stored for layer in self.layers]

    @property
    def bytes_held(self) -> int:
        """Bytes of keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.stored)


class MaskCut(Observer):
    """Inside the context, each layer of a :class:`PrunedCache` gets the part of the mask that is about its own keys.

    Needed where layers hold different numbers of tokens and a pass has a mask: several queries, or eager attention.
    """

    def __init__(self, model: Any, cache: PrunedCache, queries: int = 0) -> None:
        super().__init__(model, cache, queries)

    def before(self, layer: int, arguments: dict[str, Any]) -> dict[str, Any]:
        mask = arguments.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
            return arguments
        width = self.cache.layers[layer].stored + mask.shape[2]
        return arguments if mask.shape[-1] <= width else {**arguments, "attention_mask": mask[..., -width:]}


class Pruner(MaskCut):
    """Prunes each layer of a cache as soon as it has attended over the last token of the prompt.

    Layer by layer, so that there is never more than one layer's full attention input beside the pruned cache.
    """

    def __init__(self, model: Any, cache: PrunedCache, method: PruningMethod, prompt_tokens: int) -> None:
        super().__init__(model, cache, method.queries)
        self._method = method
        self._prompt_tokens = prompt_tokens

    def after(self, layer: int, mass: torch.Tensor | None) -> None:
        held = self.cache.layers[layer]
        if mass is not None:
            self._add(held, mass)
        if held.true_length < self._prompt_tokens:
            return
        if not held.budget:
            layers = len(self.cache.layers)
            held.budget = self._method.budget(held.true_length, layer, layers)
        elif not self._method.ongoing:
            return
        if held.stored > held.budget:
            seen = Seen(held.keys, held.values, held.mass, layer, len(self.cache.layers))
            held.keep(self._method.kept(seen, held.budget))
        if not self._method.ongoing:
            held.mass = None

    def _add(self, held: PrunedLayer, mass: torch.Tensor) -> None:
        """Sum over all queries, or only those of the pass in which the prompt ends."""
        if self._method.queries == ALL_QUERIES and held.mass is not None:
            mass = mass + torch.nn.functional.pad(held.mass, (0, mass.shape[-1] - held.mass.shape[-1]))
        if self._method.queries == ALL_QUERIES or not held.budget:
            held.mass = mass
