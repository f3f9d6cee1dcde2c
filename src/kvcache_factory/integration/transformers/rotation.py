"""Keys at other positions: RoPE turns a key by an angle that grows with its position, so a turn moves it.

R(p + d) = R(d) R(p): the model's own functions rotate cached keys once more, by the distance.  Which channels form
pairs and how far they turn is thereby the model's business, and a proof says whether it worked.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from .calls import Bypass, NotServed
from .layout import base_model, cache_argument, new_cache

_DISTANCE = 97
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the proof, in units of the largest key; what the dtype rounds off twice."""

_PROVED: weakref.WeakKeyDictionary[Any, Rotation] = weakref.WeakKeyDictionary()


class Rotation:
    """Moves cached keys of *model*.

    Accepted by proof: a token that stands alone attends only to itself, so its keys at two positions must be each
    other's turn, in every layer.  Raises NotServed for a model where they are not.
    """

    def __init__(self, model: Any) -> None:
        decoder = base_model(model).get_decoder()
        self._rotary = getattr(decoder, "rotary_emb", None)
        self._apply = getattr(sys.modules[type(decoder).__module__], "apply_rotary_pos_emb", None)
        if self._rotary is None or self._apply is None or not self._holds(model, decoder):
            raise NotServed(Bypass.ROTATION)

    @classmethod
    def of(cls, model: Any) -> Rotation:
        """That of *model*, proved once."""
        found = _PROVED.get(model)
        if found is None:
            found = _PROVED[model] = cls(model)
        return found

    def move(self, keys: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """*keys* ``[batch, heads, tokens, head_dim]``, each *by* so many positions ``int [tokens]``; float32 inside."""
        return self.turn(keys, self.turns(keys, by))

    def turns(self, keys: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of *by* so many positions ``int [tokens]``, for keys like *keys* of any layer."""
        assert self._rotary is not None
        turns = self._rotary(keys.float(), position_ids=by[None].to(keys.device))
        scale = float(getattr(self._rotary, "attention_scaling", 1.0))  # is in the keys already
        cos, sin = (turn.float() / scale for turn in turns)
        return cos, sin

    def turn(self, keys: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """*keys* ``[batch, heads, tokens, head_dim]``, turned; float32 inside."""
        assert self._apply is not None
        wide = keys.float()
        moved: torch.Tensor = self._apply(wide[:, :1], wide, *turns)[1]  # queries are turned too: as few as may be
        return moved.to(keys.dtype)

    def _holds(self, model: Any, decoder: Any) -> bool:
        try:
            first, second = (_keys_at(model, decoder, position) for position in (1, 1 + _DISTANCE))
            for one, two in zip(first, second, strict=True):
                by = torch.tensor([_DISTANCE], device=one.device)
                error = (self.move(one, by) - two).abs().max()
                if not error <= _TOLERANCE.get(one.dtype, 0.0) * two.abs().max():
                    return False
                if not (self.move(two, -by) - one).abs().max() <= _TOLERANCE[one.dtype] * one.abs().max():
                    return False
        except (TypeError, ValueError, RuntimeError, KeyError, IndexError):
            return False
        return True


def _keys_at(model: Any, decoder: Any, position: int) -> list[torch.Tensor]:
    """Keys of one token at *position*, of all layers."""
    device = base_model(model).get_input_embeddings().weight.device
    cache, at = new_cache(model), torch.tensor([[position]], device=device)
    arguments = {"input_ids": torch.ones_like(at), "position_ids": at, cache_argument(model): cache, "use_cache": True}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        decoder(**arguments)
    return [layer.keys for layer in cache.layers]
