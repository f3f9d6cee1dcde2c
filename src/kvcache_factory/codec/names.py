"""Codecs by name, with their parameters: what configurations, headers and commands say."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from ..block.spec import BlockSpec, Layout
from ..errors import ConfigError
from .base import DOES_NOT_PAY, RAW, BlockCodec, Bytes, Encoded
from .bf16x import Bf16x
from .fp8 import Fp8
from .int4g import Int4g
from .int8 import Int8
from .low_rank import LowRank
from .pca import Pca
from .rot4 import Rot4


class Raw(BlockCodec):
    """``raw``: the payload as it is."""

    name = RAW
    lossy = False

    def options(self) -> dict[str, Any]:
        return {}

    def open(self, spec: BlockSpec) -> None:
        """There is nothing to get ready."""

    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        return DOES_NOT_PAY

    def decode(self, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        if len(data) != len(out):
            return "codec_data"
        out[:] = data
        return None


_CODECS: dict[str, type[BlockCodec]] = {c.name: c for c in (Raw, Bf16x, Int8, Fp8, Int4g, Rot4, Pca, LowRank)}


def codec_names() -> list[str]:
    """Names that :func:`make_codec` knows, the built-in ones first."""
    return list(_CODECS)


def register_codec(codec: type[BlockCodec]) -> type[BlockCodec]:
    """Make a codec known by its name, in this process; a name that is taken is a ConfigError.

    A process that reads what it has encoded must do the same; where it has not, such blocks are misses.
    """
    if not codec.name or not codec.name.isascii() or len(codec.name) > 31:
        raise ConfigError(f"the name of a codec, {codec.name!r}, must have 1 to 31 characters of ASCII")
    if _CODECS.setdefault(codec.name, codec) is not codec:
        raise ConfigError(f"there is a codec {codec.name!r} already")
    return codec


def make_codec(name: str, **options: Any) -> BlockCodec:
    """The unopened codec of this *name*; ConfigError for an unknown one and for a wrong parameter."""
    codec = _CODECS.get(name)
    if codec is None:
        raise ConfigError(f"there is no codec {name!r}; use one of {', '.join(_CODECS)}")
    known = [p for p in inspect.signature(codec).parameters if p != "self"]
    wrong = sorted(set(options) - set(known))
    if wrong:
        raise ConfigError(f"codec {name}: there is no parameter {wrong[0]!r}; it has {', '.join(known) or 'none'}")
    return codec(**options)


def is_lossy(name: str) -> bool:
    """Whether what the codec of this name gives back may differ."""
    return name in _CODECS and _CODECS[name].lossy


def parse_codec(text: str) -> BlockCodec:
    """The codec of ``name`` or ``name:parameter=value,parameter=value``, as commands take it."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"codec {text!r}: write parameters as name:parameter=value,parameter=value")
        options[key.strip()] = _number(value.strip())
    return make_codec(name.strip(), **options)


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
