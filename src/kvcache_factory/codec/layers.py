"""``layers``: one codec for a range of layers, another or none for the others.

First and last layers often bear less than those between, and a payload is layer by layer in every plain order, so that
each range is a payload of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..block.spec import BlockSpec, Layout
from ..errors import ConfigError
from .base import DOES_NOT_PAY, RAW, BlockCodec, Bytes, Encoded, PayloadCoder
from .lossy import LOSSY_PARAMS, WORD

_PART = struct.Struct("<H I B B")  # layers, bytes of data, of the codec's name, and of its parameters
_VERSION = 1
_CALIBRATED = ("pca", "low_rank")


class Layers(BlockCodec):
    """See the module.

    Encoded: the parts behind one another.  Parameters: those of lossy codecs, the number of parts, and for each what it
    has, its codec and that codec's parameters.

    Parameters
    ----------
    first, end:
        The range, from *first* up to but not including *end*; None: to the last.
    inside, outside:
        Codecs, or what :func:`kvcache_factory.codec.names.parse_codec` takes.
    """

    name = "layers"

    def __init__(
        self, *, first: int = 0, end: int | None = None, inside: str | BlockCodec = "int8", outside: str = RAW
    ) -> None:
        from .names import parse_codec  # which knows this codec too

        numbers = [first] if end is None else [first, end]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers) or numbers[-1] < first:
            raise ConfigError(f"codec layers: first={first!r}, end={end!r} are no range of layers")
        if end == first:
            raise ConfigError(f"codec layers: the range from {first} up to {end} has no layer")
        self._first, self._end = first, end
        self._inside = parse_codec(inside) if isinstance(inside, str) else inside
        self._outside = outside
        others = parse_codec(outside)
        for codec in (self._inside, others):
            if codec.name.partition("|")[0] in (*_CALIBRATED, self.name):
                raise ConfigError(f"codec layers: {codec.name} is for whole models; use another for a range of layers")
        self._others = others
        self.lossy = self._inside.lossy or others.lossy
        self.largest_ratio = max(self._inside.largest_ratio, others.largest_ratio)

    def options(self) -> dict[str, Any]:
        return {"first": self._first, "end": self._end, "inside": self._inside.name, "outside": self._outside}

    def open(self, spec: BlockSpec) -> None:
        end = spec.num_layers if self._end is None else self._end
        if not self._first < end <= spec.num_layers:
            raise ConfigError(
                f"codec layers: the range from {self._first} up to {end} is not within the {spec.num_layers} layers of "
                "the model"
            )
        cuts = [(0, self._first, self._others), (self._first, end, self._inside), (end, spec.num_layers, self._others)]
        self._spec = spec
        self._parts: list[tuple[int, int, BlockCodec]] = []
        self._readers: dict[int, PayloadCoder] = {}
        for start, stop, codec in cuts:
            if stop > start:
                own = codec.again()
                own.open(part_of(spec, stop - start))
                self._parts.append((start, stop, own))

    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        each = self._spec.payload_bytes // self._spec.num_layers
        data: list[Bytes] = []
        heads: list[bytes] = []
        worst, bound = 0.0, 0.0
        for start, stop, codec in self._parts:
            piece = payload[start * each : stop * each]
            made = codec.encode(piece, layout, position)
            if isinstance(made, str) and made != DOES_NOT_PAY:
                return made
            name, found = (RAW, Encoded(piece)) if isinstance(made, str) else (codec.name, made)
            worst, bound = max(worst, found.max_rel_error), max(bound, getattr(codec, "max_rel_error", 0.0))
            shape = _PART.pack(stop - start, len(found.data), len(name), len(found.params))
            heads.append(shape + name.encode() + found.params)
            data.append(found.data)
        params = LOSSY_PARAMS.pack(_VERSION, bound, worst) + bytes([len(heads)]) + b"".join(heads)
        return Encoded(np.concatenate(data), params, worst)

    def decode(self, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        parts = _parsed(params)
        if parts is None or sum(part[0] for part in parts) != self._spec.num_layers:
            return WORD
        if sum(part[1] for part in parts) != len(data):
            return "codec_data"
        each, layer, at = self._spec.payload_bytes // self._spec.num_layers, 0, 0
        for count, size, name, own in parts:
            target = out[layer * each : (layer + count) * each]
            reason = self._reader(count).decode(name, data[at : at + size], own, layout, target)
            if reason is not None:
                return reason
            layer, at = layer + count, at + size
        return None

    def _reader(self, layers: int) -> PayloadCoder:
        from .coder import Coder  # which reads this codec too

        if layers not in self._readers:
            reader = Coder()
            reader.open(part_of(self._spec, layers))
            self._readers[layers] = reader
        return self._readers[layers]

    def close(self) -> None:
        for reader in getattr(self, "_readers", {}).values():
            reader.close()


def part_of(spec: BlockSpec, layers: int) -> BlockSpec:
    """The geometry of so many layers of a block."""
    return msgspec.structs.replace(spec, num_layers=layers)


def _parsed(params: bytes) -> Sequence[tuple[int, int, str, bytes]] | None:
    """(layers, bytes, codec, its parameters) of each part; None where the parameters are none of ours."""
    at = LOSSY_PARAMS.size + 1
    if len(params) < at or LOSSY_PARAMS.unpack_from(params)[0] != _VERSION:
        return None
    parts = []
    for _ in range(params[at - 1]):
        if len(params) < at + _PART.size:
            return None
        layers, size, name_bytes, own_bytes = _PART.unpack_from(params, at)
        at += _PART.size
        text, own = params[at : at + name_bytes], params[at + name_bytes : at + name_bytes + own_bytes]
        at += name_bytes + own_bytes
        if at > len(params) or not layers or not text.isascii():
            return None
        parts.append((layers, size, text.decode(), own))
    return parts
