"""Queries of attention layers, seen from outside: hooks of one request that no other request notices.

Whatever attention function is in use (SDPA returns no weights), a layer's queries are made again from what it was
given, and their attention to the cached keys is summed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .calls import Bypass, NotServed
from .layout import base_model
from .pruning import ALL_QUERIES

_CHUNK_BYTES = 64 << 20  # attention weights held at a time


def attention_modules(model: Any, layers: int) -> list[Any]:
    """The module of each layer that calls ``cache.update``, in order; NotServed where they cannot be told."""
    found = [module for module in base_model(model).modules() if isinstance(getattr(module, "layer_idx", None), int)]
    inner = [m for m in found if not any(isinstance(getattr(c, "layer_idx", None), int) for c in _below(m))]
    if sorted(module.layer_idx for module in inner) != list(range(layers)):
        raise NotServed(Bypass.MODULES)
    return sorted(inner, key=lambda module: int(module.layer_idx))


def _below(module: Any) -> list[Any]:
    return [child for child in module.modules() if child is not module]


def check_queries(module: Any) -> None:
    """NotServed where :func:`queries_of` cannot read the queries of *module*."""
    if not hasattr(module, "q_proj") or not hasattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb"):
        raise NotServed(Bypass.MODULES)


def queries_of(module: Any, hidden: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotated queries ``[batch, heads, tokens, head_dim]`` of *module* for *hidden* ``[batch, tokens, width]``."""
    dim = int(module.head_dim)
    flat = module.q_proj(hidden)
    norm = getattr(module, "q_norm", None)
    whole = norm is not None and norm.weight.shape[-1] != dim  # OLMo 2 normalises all heads at once
    flat = norm(flat) if norm is not None and whole else flat
    queries = flat.view(*hidden.shape[:-1], -1, dim)
    queries = (norm(queries) if norm is not None and not whole else queries).transpose(1, 2)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    rotated: torch.Tensor = rotate(queries, queries, *positions)[0]
    return rotated


def received(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention that each key gets from *queries*, which are those of the last tokens of *keys*, causally.

    ``[batch, heads, queries, head_dim]`` and ``[batch, KV heads, tokens, head_dim]`` to ``float32 [batch, KV heads,
    tokens]``: the sum over queries of the mean over the query heads of a KV head.
    """
    batch, heads, count, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    grouped = queries.view(batch, kv_heads, heads // kv_heads, count, dim).float()
    mass = torch.zeros(batch, kv_heads, tokens, device=keys.device)
    columns = torch.arange(tokens, device=keys.device)
    step = max(1, _CHUNK_BYTES // (4 * batch * heads * tokens))
    wide = keys.float().unsqueeze(2).transpose(-1, -2)
    for start in range(0, count, step):
        part = grouped[..., start : start + step, :]
        rows = torch.arange(start, start + part.shape[-2], device=keys.device) + tokens - count
        weights = (part @ wide * scaling).masked_fill(columns > rows[:, None], -torch.inf).softmax(dim=-1)
        mass += weights.mean(dim=2).sum(dim=-2)
    return mass


class Observer:
    """Hooks on the attention layers of *model* for one cache; inside the context, its subclass sees every layer run.

    Calls with another cache, of other threads, are left alone.
    """

    def __init__(self, model: Any, cache: Any, queries: int) -> None:
        self.cache = cache
        self.queries = queries
        self.modules = attention_modules(model, len(cache.layers))
        for module in self.modules if queries else ():
            check_queries(module)
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for module in self.modules:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def before(self, layer: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """What *layer* is called with instead of *arguments*."""
        return arguments

    def after(self, layer: int, mass: torch.Tensor | None) -> None:
        """*layer* has run; *mass* is the attention that the last queries gave to the layer's keys."""

    def _ours(self, kwargs: Any) -> bool:
        return isinstance(kwargs, dict) and any(value is self.cache for value in kwargs.values())

    # To a pass of another thread torch may give no keywords: it looks up who wants them while this one leaves.

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        return (args, self.before(module.layer_idx, kwargs)) if self._ours(kwargs) else None

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any = None) -> None:
        if self._ours(kwargs):
            with torch.no_grad():
                self.after(module.layer_idx, self._mass(module, args, kwargs) if self.queries else None)

    def _mass(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        positions = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]
        if self.queries != ALL_QUERIES:
            hidden = hidden[:, -self.queries :]
            positions = tuple(part[:, -self.queries :] for part in positions)
        keys = self.cache.layers[module.layer_idx].keys
        queries = queries_of(module, hidden, positions)
        return received(queries, keys, float(getattr(module, "scaling", None) or queries.shape[-1] ** -0.5))


class AttentionMass(Observer):
    """Sums, over all layers and heads, what each position of the prompt got from its last queries.

    After the context, ``mass`` is ``float32 [batch, tokens]``, or None where nothing ran.
    """

    def __init__(self, model: Any, cache: Any, queries: int, prompt_tokens: int) -> None:
        super().__init__(model, cache, queries)
        self._prompt_tokens = prompt_tokens
        self.mass: torch.Tensor | None = None

    def after(self, layer: int, mass: torch.Tensor | None) -> None:
        if mass is not None and mass.shape[-1] == self._prompt_tokens:
            summed = mass.sum(dim=1)
            self.mass = summed if self.mass is None else self.mass + summed
