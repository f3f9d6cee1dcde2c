"""``bf16x``: lossless.  The exponents are split off, put relative to their channel's centre, and Huffman coded.

Sign and mantissa of a trained model's KV look random, exponents hardly vary within a channel: of 16 bits of bfloat16,
about 5.4 are redundant.  zstd does the Huffman coding, told to look for no matches: there are none, and searching costs
two thirds of the speed and makes the result larger.  float16 and float32 are split the same way, with less to gain.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np

from ..block.spec import BlockSpec, KVDtype, Layout
from ..errors import ConfigError, MissingDependencyError
from ..jit import late_kernel as kernel
from .base import DOES_NOT_PAY, BlockCodec, Bytes, Encoded
from .values import geometry

_PARAMS = struct.Struct("<H 2x I I")  # version, bytes of the coded centres, bytes of the coded plane
_VERSION = 1
WORD = "codec_params"
PAYS = 0.95
"""Stored raw above this share of the payload."""


class Bf16x(BlockCodec):
    """See the module.  Encoded: the centres ``[layers, 2, heads, head_dim]`` and the plane of exponents ``[layers, 2,
    heads, tokens, head_dim]``, a zstd frame each, and the other bytes of all elements in the same order.
    """

    name = "bf16x"
    lossy = False

    def __init__(self) -> None:
        self._spec: BlockSpec | None = None
        self._local = threading.local()

    def options(self) -> dict[str, Any]:
        return {}

    def open(self, spec: BlockSpec) -> None:
        if spec.dtype in (KVDtype.FP8_E4M3, KVDtype.FP8_E5M2):
            raise ConfigError(f"codec bf16x: KV of {spec.dtype.value} has no exponent to split off; use 'raw'")
        try:
            import zstandard  # noqa: F401
        except ImportError:
            raise MissingDependencyError.of("zstandard", "compression", "the codec bf16x") from None
        self._spec = spec

    @property
    def spec(self) -> BlockSpec:
        """The geometry it is open for."""
        assert self._spec is not None, "codec bf16x is not open"
        return self._spec

    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        spec, where = self.spec, geometry(self.spec, layout)
        rest_bytes = spec.dtype.itemsize - 1
        elements = spec.payload_bytes // spec.dtype.itemsize
        high, rest = np.empty(elements, np.uint8), np.empty(rest_bytes * elements, np.uint8)
        centres = np.empty(elements // spec.block_tokens, np.uint8)
        source = payload[: spec.payload_bytes]
        if rest_bytes == 1:
            _split16(source.view(np.uint16), where.numbers, high, rest)
        else:
            _split32(source.view(np.uint32), where.numbers, high, rest)
        _centre(high, centres, spec.block_tokens, spec.head_dim)
        compressor, _ = self._coders()
        middle, plane = compressor.compress(centres.data), compressor.compress(high.data)
        if len(middle) + len(plane) + len(rest) > PAYS * spec.payload_bytes:
            return DOES_NOT_PAY
        data = np.concatenate((np.frombuffer(middle, np.uint8), np.frombuffer(plane, np.uint8), rest))
        return Encoded(data, _PARAMS.pack(_VERSION, len(middle), len(plane)))

    def decode(self, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        spec, where = self.spec, geometry(self.spec, layout)
        if len(params) < _PARAMS.size:
            return WORD
        version, middle_bytes, plane_bytes = _PARAMS.unpack_from(params)
        elements = spec.payload_bytes // spec.dtype.itemsize
        rest_bytes = (spec.dtype.itemsize - 1) * elements
        if version != _VERSION or middle_bytes + plane_bytes + rest_bytes != len(data):
            return WORD
        found = self._inflate(data, middle_bytes, plane_bytes, elements)
        if found is None:
            return "codec_data"
        centres, high = found
        rest, target = data[middle_bytes + plane_bytes :], out[: spec.payload_bytes]
        if spec.dtype.itemsize == 2:
            _merge16(high, centres, rest, where.numbers, target.view(np.uint16))
        else:
            _merge32(high, centres, rest, where.numbers, target.view(np.uint32))
        return None

    def _inflate(self, data: Bytes, middle: int, plane: int, elements: int) -> tuple[Bytes, Bytes] | None:
        """Centres and exponents, where the frames hold exactly as many as there must be."""
        import zstandard

        _, decompressor = self._coders()
        parts = []
        for part, size in ((data[:middle], elements // self.spec.block_tokens), (data[middle:][:plane], elements)):
            try:
                if zstandard.frame_content_size(part.data) != size:  # before anything is allocated
                    return None
                parts.append(np.frombuffer(decompressor.decompress(part.data), np.uint8))
            except zstandard.ZstdError:
                return None
            if len(parts[-1]) != size:
                return None
        return parts[0], parts[1]

    def _coders(self) -> tuple[Any, Any]:
        """A compressor and a decompressor of this thread: they are not safe across threads."""
        found = getattr(self._local, "coders", None)
        if found is None:
            import zstandard

            huffman_only = zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17, search_log=1
            )
            compressor = zstandard.ZstdCompressor(compression_params=huffman_only)
            found = self._local.coders = (compressor, zstandard.ZstdDecompressor())
        return found


def _strided(cells: Any, where: Any) -> Any:
    layers, heads, tokens, dim, *strides = where.tolist()
    size = cells.itemsize
    return np.lib.stride_tricks.as_strided(cells, (layers, 2, heads, tokens, dim), [*(s * size for s in strides), size])


def _split16_numpy(source: Any, where: Any, high: Any, rest: Any) -> None:
    turned = _strided(source, where)
    turned = (turned << np.uint16(1)) | (turned >> np.uint16(15))
    high[:] = (turned >> np.uint16(8)).reshape(-1)
    rest[:] = turned.astype(np.uint8).reshape(-1)


@kernel("void(u2[::1], i8[::1], u1[::1], u1[::1])", fallback=_split16_numpy)
def _split16(source: Any, where: Any, high: Any, rest: Any) -> None:
    layers, heads, tokens, dim = where[0], where[1], where[2], where[3]
    to = 0
    for layer in range(layers):
        for c in range(2):
            for head in range(heads):
                for token in range(tokens):
                    at = layer * where[4] + c * where[5] + head * where[6] + token * where[7]
                    here, up, down = source[at : at + dim], high[to : to + dim], rest[to : to + dim]
                    for d in range(dim):
                        up[d] = np.uint8(here[d] >> np.uint16(7))
                        down[d] = np.uint8(np.uint16(here[d] << np.uint16(1)) | np.uint16(here[d] >> np.uint16(15)))
                    to += dim


def _split32_numpy(source: Any, where: Any, high: Any, rest: Any) -> None:
    turned = _strided(source, where)
    turned = (turned << np.uint32(1)) | (turned >> np.uint32(31))
    high[:] = (turned >> np.uint32(24)).reshape(-1)
    planes = rest.reshape(3, -1)
    for i in range(3):
        planes[i] = (turned >> np.uint32(8 * i)).astype(np.uint8).reshape(-1)


@kernel("void(u4[::1], i8[::1], u1[::1], u1[::1])", fallback=_split32_numpy)
def _split32(source: Any, where: Any, high: Any, rest: Any) -> None:
    layers, heads, tokens, dim = where[0], where[1], where[2], where[3]
    n, to = len(high), 0
    for layer in range(layers):
        for c in range(2):
            for head in range(heads):
                for token in range(tokens):
                    at = layer * where[4] + c * where[5] + head * where[6] + token * where[7]
                    here, up = source[at : at + dim], high[to : to + dim]
                    for d in range(dim):
                        up[d] = np.uint8(here[d] >> np.uint32(23))
                    for i in range(3):
                        down = rest[i * n + to :][:dim]
                        for d in range(dim):
                            turned = np.uint32(here[d] << np.uint32(1)) | np.uint32(here[d] >> np.uint32(31))
                            down[d] = np.uint8(turned >> np.uint32(8 * i))
                    to += dim


def _centre_numpy(high: Any, centres: Any, tokens: int, dim: int) -> None:
    tiles = high.reshape(-1, tokens, dim)
    middle = ((tiles.sum(axis=1, dtype=np.int64) + tokens // 2) // tokens).astype(np.uint8)
    centres[:] = middle.reshape(-1)
    tiles -= middle[:, None, :]


@kernel("void(u1[::1], u1[::1], i8, i8)", fallback=_centre_numpy)
def _centre(high: Any, centres: Any, tokens: Any, dim: Any) -> None:
    """The rounded mean of each channel over the tokens of a tile, which is taken from its elements."""
    sums = np.empty(dim, np.int64)
    for tile in range(len(high) // (tokens * dim)):
        sums[:] = tokens // 2
        middle = centres[tile * dim :][:dim]
        for token in range(tokens):
            row = high[(tile * tokens + token) * dim :][:dim]
            for d in range(dim):
                sums[d] += row[d]
        for d in range(dim):
            middle[d] = np.uint8(sums[d] // tokens)
        for token in range(tokens):
            row = high[(tile * tokens + token) * dim :][:dim]
            for d in range(dim):
                row[d] = np.uint8(row[d] - middle[d])


def _whole(high: Any, centres: Any, where: Any) -> Any:
    layers, heads, tokens, dim = where[:4].tolist()
    return high.reshape(layers, 2, heads, tokens, dim) + centres.reshape(layers, 2, heads, 1, dim)


def _merge16_numpy(high: Any, centres: Any, rest: Any, where: Any, out: Any) -> None:
    upper = _whole(high, centres, where).astype(np.uint16)
    lower = rest.reshape(upper.shape).astype(np.uint16)
    _strided(out, where)[...] = (upper << np.uint16(7)) | (lower >> np.uint16(1)) | (lower << np.uint16(15))


@kernel("void(Array(u1, 1, 'C', True), Array(u1, 1, 'C', True), u1[::1], i8[::1], u2[::1])", fallback=_merge16_numpy)
def _merge16(high: Any, centres: Any, rest: Any, where: Any, out: Any) -> None:
    layers, heads, tokens, dim = where[0], where[1], where[2], where[3]
    come = 0
    for layer in range(layers):
        for c in range(2):
            for head in range(heads):
                middle = centres[((layer * 2 + c) * heads + head) * dim :][:dim]
                for token in range(tokens):
                    at = layer * where[4] + c * where[5] + head * where[6] + token * where[7]
                    there, up, down = out[at : at + dim], high[come : come + dim], rest[come : come + dim]
                    for d in range(dim):
                        upper = np.uint16(np.uint8(up[d] + middle[d]))
                        lower = np.uint16(down[d])
                        there[d] = np.uint16(upper << np.uint16(7)) | np.uint16(
                            np.uint16(lower >> np.uint16(1)) | np.uint16(lower << np.uint16(15))
                        )
                    come += dim


def _merge32_numpy(high: Any, centres: Any, rest: Any, where: Any, out: Any) -> None:
    turned = _whole(high, centres, where).astype(np.uint32) << np.uint32(24)
    planes = rest.reshape(3, *turned.shape)
    for i in range(3):
        turned |= planes[i].astype(np.uint32) << np.uint32(8 * i)
    _strided(out, where)[...] = (turned >> np.uint32(1)) | (turned << np.uint32(31))


@kernel("void(Array(u1, 1, 'C', True), Array(u1, 1, 'C', True), u1[::1], i8[::1], u4[::1])", fallback=_merge32_numpy)
def _merge32(high: Any, centres: Any, rest: Any, where: Any, out: Any) -> None:
    layers, heads, tokens, dim = where[0], where[1], where[2], where[3]
    n, come = len(high), 0
    for layer in range(layers):
        for c in range(2):
            for head in range(heads):
                middle = centres[((layer * 2 + c) * heads + head) * dim :][:dim]
                for token in range(tokens):
                    at = layer * where[4] + c * where[5] + head * where[6] + token * where[7]
                    there, up = out[at : at + dim], high[come : come + dim]
                    low, mid, top = rest[come:][:dim], rest[n + come :][:dim], rest[2 * n + come :][:dim]
                    for d in range(dim):
                        turned = np.uint32(np.uint32(np.uint8(up[d] + middle[d])) << np.uint32(24))
                        turned = np.uint32(turned | np.uint32(np.uint32(top[d]) << np.uint32(16)))
                        turned = np.uint32(turned | np.uint32(np.uint32(mid[d]) << np.uint32(8)))
                        turned = np.uint32(turned | np.uint32(low[d]))
                        there[d] = np.uint32(turned >> np.uint32(1)) | np.uint32(turned << np.uint32(31))
                    come += dim
