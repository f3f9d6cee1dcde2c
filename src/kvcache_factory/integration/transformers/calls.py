"""Reading a call of ``generate``: what it asks for, and whether a cache may take part in it.

Everything here only looks: whatever cannot be understood completely is handed to Transformers untouched, with a reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .hook import plain_generate
from .layout import base_model


class Bypass(StrEnum):
    """Why a request went to Transformers untouched."""

    ASSISTED = "assisted decoding"
    USER_CACHE = "a cache of the caller's own"
    CACHE_KIND = "cache_implementation"
    NO_CACHE = "use_cache=False"
    INPUTS = "inputs other than token ids"
    MASK = "attention mask other than left padding"
    MODE = "decoding mode"
    CUSTOM = "custom_generate"
    HEALING = "token healing"
    CHUNKED = "chunked prefill of Transformers 4"
    DROPOUT = "dropout"
    AUTOCAST = "autocast"
    UNREADABLE = "arguments that generate would not take"
    CLOSED = "the manager is closed"
    LAYOUT = "the model can no longer be cached"
    MODULES = "attention modules of a kind that cannot be observed"
    PADDED = "padding, which what was asked for cannot take"
    SEVERAL = "several sequences, where what was asked for is for one"
    STATES = "states of the whole prompt, which only a full pass shows"
    ROTATION = "keys that cannot be moved to other positions"
    MASKED = "an attention implementation without free masks"
    FAILED = "a failure of the cache"


class NotServed(Exception):
    """Raised inside the adapter for a request that is handed on; carries the reason."""

    def __init__(self, reason: Bypass) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``generate`` that the cache takes part in."""

    ids: npt.NDArray[np.int64]  # [batch, length]
    pads: list[int]  # tokens of padding on the left of each row
    expand: int  # sequences that Transformers makes of each row
    beams: bool  # rows of the cache change places while decoding
    may_load: bool  # False where the caller wants to see the prompt's own states
    stops: frozenset[int]  # tokens that end a sequence
    overrides: dict[str, Any]  # arguments that must change for a cache to be accepted


_OLD_NAMES = ("past_key_values", "cache_params", "cache")
_TEXT_INPUTS = {"input_ids", "attention_mask", "logits_to_keep", "num_logits_to_keep"}
_STATES = {"output_attentions", "output_hidden_states"}
_MODES = {"greedy_search", "sample", "beam_search", "beam_sample"}
_BEAM_MODES = {"beam_search", "beam_sample"}


def read_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Understand ``model.generate(*args, **kwargs)``.  Raises NotServed for what must be left alone."""
    inner = base_model(model)
    given = _bind(inner, args, kwargs)
    config, inputs = _generation_config(inner, given)
    _check_mode(inner, config, given)
    _check_state(inner)
    ids, mask = _check_inputs(config, given, inputs)
    pads = _left_padding(inner, ids, mask)
    expand = max(int(config.num_beams or 1), int(config.num_return_sequences or 1))
    explicit_dynamic = config.cache_implementation is not None
    return Call(
        ids=ids,
        pads=pads,
        expand=expand,
        beams=str(config.get_generation_mode().value) in _BEAM_MODES,
        may_load=not any(inputs.get(name) for name in _STATES),
        stops=_stops(config),
        overrides={"cache_implementation": None} if explicit_dynamic else {},
    )


def _bind(inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, those in ``**kwargs`` among them; None counts as absent."""
    signature = inspect.signature(plain_generate(inner))
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        raise NotServed(Bypass.UNREADABLE) from None
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        flat.update(value if rest else {name: value})
    return {name: value for name, value in flat.items() if value is not None}


def _generation_config(inner: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What Transformers itself makes of the arguments: the settings, and what is left for the model's forward pass."""
    if any(name in given for name in _OLD_NAMES):
        raise NotServed(Bypass.USER_CACHE)
    if "custom_generate" in given:
        raise NotServed(Bypass.CUSTOM)
    own = {*inspect.signature(plain_generate(inner)).parameters, "tokenizer", "assistant_tokenizer"}
    rest = {name: value for name, value in given.items() if name not in own}
    if rest.get("cache_implementation") == "paged":
        raise NotServed(Bypass.CACHE_KIND)
    if "use_model_defaults" in given:
        rest["use_model_defaults"] = given["use_model_defaults"]
    try:
        config, inputs = inner._prepare_generation_config(given.get("generation_config"), **rest)
    except Exception:  # generate will say it better
        raise NotServed(Bypass.UNREADABLE) from None
    return config, {name: value for name, value in inputs.items() if value is not None}


def _check_mode(inner: Any, config: Any, given: Mapping[str, Any]) -> None:
    assistant = given.get("assistant_model")
    mode = str(config.get_generation_mode(assistant).value)
    if assistant is not None or mode == "assisted_generation" or getattr(config, "is_assistant", False):
        raise NotServed(Bypass.ASSISTED)
    if mode not in _MODES:
        raise NotServed(Bypass.MODE)
    if config.use_cache is False:
        raise NotServed(Bypass.NO_CACHE)
    if config.cache_implementation not in (None, "dynamic"):
        raise NotServed(Bypass.CACHE_KIND)
    if getattr(config, "token_healing", False):
        raise NotServed(Bypass.HEALING)
    # Transformers 4 feeds all chunks from position 0 whatever the cache holds, and ignores padding while it does.
    if config.prefill_chunk_size is not None and hasattr(inner, "_prefill_chunking"):
        raise NotServed(Bypass.CHUNKED)


def _check_state(inner: Any) -> None:
    if inner.training and _has_dropout(inner):
        raise NotServed(Bypass.DROPOUT)
    if torch.is_autocast_enabled(inner.device.type):
        raise NotServed(Bypass.AUTOCAST)


def _has_dropout(inner: Any) -> bool:
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in inner.modules()):
        return True
    return bool(getattr(inner.config.get_text_config(decoder=True), "attention_dropout", 0))


def _check_inputs(
    config: Any, given: Mapping[str, Any], inputs: Mapping[str, Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any] | None]:
    """The ids [batch, length] and the attention mask as arrays, if these are all that the model is given."""
    ids = given.get("inputs", inputs.get("input_ids"))
    both = "inputs" in given and "input_ids" in inputs
    if both or set(inputs) - _TEXT_INPUTS - _STATES or not isinstance(ids, torch.Tensor):
        raise NotServed(Bypass.INPUTS)
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.shape[0] or not ids.shape[1]:
        raise NotServed(Bypass.INPUTS)
    array = ids.detach().cpu().numpy().astype(np.int64)
    mask = inputs.get("attention_mask")
    if mask is None:
        return array, _inferred_mask(config, array)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise NotServed(Bypass.MASK)
    return array, mask.detach().cpu().numpy()


def _inferred_mask(config: Any, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any] | None:
    """The mask that Transformers infers from the padding token when it is given none."""
    pad = config.pad_token_id
    if pad is None or isinstance(pad, list) or int(pad) in _stops(config):
        return None
    mask: npt.NDArray[Any] = ids != int(pad)
    return mask


def _left_padding(inner: Any, ids: npt.NDArray[np.int64], mask: npt.NDArray[Any] | None) -> list[int]:
    """Tokens of padding on the left of each row."""
    if mask is None or bool((mask == 1).all()):
        return [0] * len(ids)
    pads = (mask != 0).argmax(axis=1)
    expected = np.arange(ids.shape[1]) >= pads[:, None]
    if not bool((mask == expected).all()):
        raise NotServed(Bypass.MASK)
    # Without position_ids the padding would count as positions, and KV of padded rows would fit nowhere else.
    if "position_ids" not in inspect.signature(type(inner).forward).parameters:
        raise NotServed(Bypass.MASK)
    return [int(pad) for pad in pads]


def _stops(config: Any) -> frozenset[int]:
    eos = config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(int(token) for token in (eos if isinstance(eos, list | tuple) else [eos]))
