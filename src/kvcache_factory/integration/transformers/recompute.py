"""Computing some tokens of a sequence whose other tokens are cached: one pass over chosen rows."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .layout import base_model, cache_argument

_ROWS = 512  # rows of one pass: the mask is [rows, tokens]


class _ScatterLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values ``[1, H, tokens, D]`` of a whole sequence; an update writes those of the current rows.

    What it writes over the rows of *reused* is compared with what was there.  The pass ends here if ``ends``.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, reused: torch.Tensor, *, ends: bool = False) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.dtype, self.device = keys.dtype, keys.device
        self.rows = torch.empty(0, dtype=torch.long)
        self.reused, self.ends = reused, ends
        self.drift: list[torch.Tensor] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mine = self.reused[self.rows]
        if mine.any():
            rows = self.rows[mine]
            keys = relative_error(self.keys[:, :, rows], key_states[:, :, mine])
            self.drift.append((keys + relative_error(self.values[:, :, rows], value_states[:, :, mine])) / 2)
        self.keys.index_copy_(2, self.rows, key_states)
        self.values.index_copy_(2, self.rows, value_states)
        if self.ends:
            raise _Enough
        end = int(self.rows[-1]) + 1
        return self.keys[:, :, :end], self.values[:, :, :end]


def relative_error(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """How far each token of ``[1, H, tokens, D]`` is off, in units of the norm of what it should be: ``[tokens]``."""
    difference = (found.float() - true.float()).square().sum(dim=(0, 1, 3))
    return (difference / true.float().square().sum(dim=(0, 1, 3)).clamp_min(1e-30)).sqrt()


def recompute(
    model: Any,
    ids: torch.Tensor,
    rows: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    reused: torch.Tensor,
) -> torch.Tensor:
    """Compute *rows* (``int64 [n]``, ascending) of the sequence *ids* ``[tokens]`` into *keys* and *values*.

    Every row attends to all tokens before it, whoever computed them.  Returns, for the rows that *reused* ``bool
    [tokens]`` marks, how far what was there had been off: ``float32 [layers, n']``.
    """
    layers = _run(model, ids, rows, [_ScatterLayer(*layer, reused) for layer in zip(keys, values, strict=True)])
    drift = [torch.cat(layer.drift) for layer in layers if layer.drift]
    return torch.stack(drift) if drift else torch.empty(0)


def judge(
    model: Any,
    ids: torch.Tensor,
    rows: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    reused: torch.Tensor,
) -> torch.Tensor:
    """As :func:`recompute`, of the first ``len(keys)`` layers only, and of the last of them only keys and values.

    They are right afterwards if *rows* are all that were not.  Returns how far those of the rows that *reused* marks
    had been off in that last layer: ``float32 [n']``.
    """
    *before, last = zip(keys, values, strict=True)
    ends = _ScatterLayer(*last, reused, ends=True)
    _run(model, ids, rows, [*(_ScatterLayer(*layer, reused) for layer in before), ends])
    return torch.cat(ends.drift)


def _run(model: Any, ids: torch.Tensor, rows: torch.Tensor, layers: list[_ScatterLayer]) -> list[_ScatterLayer]:
    cache = Cache(layers=layers)
    columns = torch.arange(len(ids), device=ids.device)
    for part in torch.split(rows, _ROWS):
        end = int(part[-1]) + 1
        mask = torch.zeros(len(part), end, dtype=layers[0].keys.dtype, device=ids.device)
        mask.masked_fill_(columns[:end] > part[:, None], torch.finfo(mask.dtype).min)
        for layer in layers:
            layer.rows = part
        with contextlib.suppress(_Enough):
            _decode(
                model, ids[part], cache, attention_mask=mask[None, None], position_ids=part[None], cache_position=part
            )
    return layers


class _Enough(Exception):
    """Ends a pass in the last layer that was wanted."""


def _decode(model: Any, ids: torch.Tensor, cache: Any, **arguments: Any) -> None:
    decoder = base_model(model).get_decoder()
    parameters = inspect.signature(type(decoder).forward).parameters
    if "cache_position" not in parameters:  # gone since Transformers 5
        arguments.pop("cache_position", None)
    with torch.no_grad():
        decoder(input_ids=ids[None], use_cache=True, **{cache_argument(model): cache}, **arguments)
