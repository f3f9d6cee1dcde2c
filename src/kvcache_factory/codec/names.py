"""Codecs by name, with their parameters: what configurations, headers and commands say."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, TypeVar

from ..block.spec import BlockSpec, Layout
from ..errors import ConfigError
from .base import DOES_NOT_PAY, RAW, BlockCodec, Bytes, Encoded
from .bf16x import Bf16x
from .chain import BYTE_CODECS, SEPARATOR, ByteCodec, Chain
from .fp8 import Fp8
from .int4g import Int4g
from .int8 import Int8
from .layers import Layers
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


_CODECS: dict[str, type[BlockCodec]] = {c.name: c for c in (Raw, Bf16x, Int8, Fp8, Int4g, Rot4, Pca, LowRank, Layers)}
Made = TypeVar("Made", BlockCodec, ByteCodec)


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
    """The unopened codec of this *name*, or the chain ``name|name``, whose first codec the *options* are for.

    ConfigError for an unknown one and for a wrong parameter.
    """
    head, *others = name.split(SEPARATOR)
    return _chained(_make(_CODECS, head, options), [_make_bytes(other, {}) for other in others])


def _make(known: dict[str, type[Made]], name: str, options: dict[str, Any]) -> Made:
    codec = known.get(name)
    if codec is None:
        if name in BYTE_CODECS:
            raise ConfigError(f"codec {name} takes bytes, not blocks: put it behind another, as in bf16x|{name}")
        raise ConfigError(f"there is no codec {name!r}; use one of {', '.join(known)}")
    parameters = [p for p in inspect.signature(codec).parameters if p != "self"]
    wrong = sorted(set(options) - set(parameters))
    if wrong:
        has = ", ".join(parameters) or "none"
        raise ConfigError(f"codec {name}: there is no parameter {wrong[0]!r}; it has {has}")
    return codec(**options)


def _make_bytes(name: str, options: dict[str, Any]) -> ByteCodec:
    if name in _CODECS:
        raise ConfigError(f"codec {name} takes blocks, not the bytes of another codec: it can only be the first")
    return _make(BYTE_CODECS, name, options)


def _chained(first: BlockCodec, others: list[ByteCodec]) -> BlockCodec:
    return Chain(first, others) if others else first


def behind(first: BlockCodec, name: str) -> BlockCodec:
    """*first*, with the codecs of bytes behind it that the chain of this *name* has; ConfigError for unknown ones."""
    return _chained(first, [_make_bytes(other, {}) for other in name.split(SEPARATOR)[1:]])


def is_lossy(name: str) -> bool:
    """Whether what the codec of this name gives back may differ."""
    head = name.partition(SEPARATOR)[0]
    return head in _CODECS and _CODECS[head].lossy


def parse_codec(text: str) -> BlockCodec:
    """The codec of ``name``, ``name:parameter=value,parameter=value`` or a chain of such, as commands take it."""
    (head, options), *others = [_parsed(part) for part in text.split(SEPARATOR)]
    return _chained(_make(_CODECS, head, options), [_make_bytes(name, more) for name, more in others])


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"codec {text!r}: write parameters as name:parameter=value,parameter=value")
        options[key.strip()] = _number(value.strip())
    return name.strip(), options


LOSSLESS = "bf16x"
"""What general compressors are asked for: as small as KV gets without loss.  Alone, they gain next to nothing on it."""
_GENERAL = {"zstd", "zstandard", "zlib", "gzip", "deflate", "lz4", "snappy", "lzma", "brotli", "zipnn", "bf16x"}
_NONE = {"", "none", "off", "raw"}


def named_codec(text: str) -> str | None:
    """What *text*, in any case, asks for, as :func:`parse_codec` takes it; None for no codec.

    The name of a general compressor means :data:`LOSSLESS`.  Raises ConfigError for what is no codec.
    """
    word = text.strip().lower()
    if word in _NONE:
        return None
    if word in _GENERAL:
        return LOSSLESS
    parts = [part.strip().partition(":") for part in text.split(SEPARATOR)]
    found = SEPARATOR.join((name if name in _CODECS else name.lower()) + colon + rest for name, colon, rest in parts)
    parse_codec(found)
    return found


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
