"""What ``quality`` can measure, by name: codecs of stored blocks, and pruning of live caches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..codec.base import BlockCodec
from ..codec.names import codec_names, parse_codec
from ..errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from ..integration.transformers.pruning import PruningMethod


def parse_method(text: str) -> BlockCodec | PruningMethod:
    """The unopened codec or the pruning method of ``name`` or ``name:parameter=value,…``; ConfigError for neither."""
    name = text.partition(":")[0].strip()
    if name in codec_names():
        return parse_codec(text)
    try:
        from ..integration.transformers.pruning import parse_pruning, pruning_names
    except ImportError as error:
        raise MissingDependencyError.of(error.name or "transformers", "transformers", "measuring quality") from error
    if name not in pruning_names():
        names = ", ".join([*codec_names(), *pruning_names()])
        raise ConfigError(f"there is no codec and no pruning method {name!r}; use one of {names}")
    return parse_pruning(text)


def turned(method: PruningMethod, ratio: float | None) -> PruningMethod:
    """*method*, keeping one token of *ratio*."""
    return method if ratio is None else dataclasses.replace(method, keep=1 / ratio)
