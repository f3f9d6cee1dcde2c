"""What ``quality`` can measure, by name: codecs of stored blocks, and pruning of live caches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from ..codec.base import BlockCodec
from ..codec.names import codec_names, parse_codec
from ..errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from ..integration.transformers.pruning import PruningMethod
    from .placed import Placing


def parse_method(text: str) -> BlockCodec | PruningMethod | Placing:
    """The unopened codec, the pruning method or the placing of blocks that ``name`` or ``name:parameter=value,…`` says.

    ConfigError for none of them.
    """
    name = text.partition(":")[0].strip()
    if name in codec_names():
        return parse_codec(text)
    try:
        from ..integration.transformers.pruning import parse_pruning, pruning_names
        from .placed import DEMOTE, DROP, Placing
    except ImportError as error:
        raise MissingDependencyError.of(error.name or "transformers", "transformers", "measuring quality") from error
    if name in (DROP, DEMOTE):
        return Placing.parse(text)
    if name not in pruning_names():
        names = ", ".join([*codec_names(), *pruning_names(), DROP, DEMOTE])
        raise ConfigError(f"there is no codec and no pruning method {name!r}; use one of {names}")
    return parse_pruning(text)


def turned(method: PruningMethod, ratio: float | None) -> PruningMethod:
    """*method*, keeping one token of *ratio*."""
    return method if ratio is None else dataclasses.replace(method, keep=1 / ratio)


def placed(method: Placing, ratio: float | None) -> Placing:
    """*method*, keeping one block of *ratio*."""
    return method if ratio is None else msgspec.structs.replace(method, keep=1 / ratio)
