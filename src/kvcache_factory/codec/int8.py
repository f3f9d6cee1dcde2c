"""``int8``: eight bits an element; a scale for each channel of the keys and for each token of the values.

Keys have channels that are large in every token, so that a scale a channel fits them; values have tokens that are.
Scales are bfloat16, rounded up, so that nothing is clipped and no range of magnitudes is lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..block.spec import BlockSpec, KVDtype, Layout
from ..jit import helper
from ..jit import late_kernel as kernel
from .base import NOT_FINITE, Bytes, Encoded
from .lossy import WORD, LossyCodec
from .values import NOT_FINITE_BITS, Floats, cells, from_bf16, geometry, to_bf16

_MAGIC = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_LEVELS = 127.0
SMALLEST = 0x80
"""Bits of the smallest bfloat16 whose inverse is a number."""


class Int8(LossyCodec):
    """See the module.  Encoded: scales of the keys ``[layers, heads, head_dim]`` and of the values ``[layers, heads,
    tokens]``, uint16 each, then ``int8 [layers, 2, heads, tokens, head_dim]``.
    """

    name = "int8"
    default_max_rel_error = 0.01

    def open(self, spec: BlockSpec) -> None:
        super().open(spec)
        rows = spec.num_layers * spec.num_kv_heads
        self._keys, self._values = rows * spec.head_dim, rows * spec.block_tokens
        self._elements = 2 * self._values * spec.head_dim

    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        if self.spec.dtype != KVDtype.BF16:
            return super().encode(payload, layout, position)
        where = geometry(self.spec, layout)
        data, scales, quants = self._parts()
        error = _encode16(cells(payload, self.spec), where.numbers, scales, quants)
        return NOT_FINITE if error < 0 else self._bounded(data, b"", error)

    def decode(self, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        if self.spec.dtype != KVDtype.BF16:
            return super().decode(data, params, layout, out)
        if self._own_params(params) is None or len(data) != self._size:
            return WORD
        _, scales, quants = self._parts(data)
        _decode16(scales, quants, geometry(self.spec, layout).numbers, cells(out, self.spec))
        return None

    @property
    def _size(self) -> int:
        return 2 * (self._keys + self._values) + self._elements

    def _parts(self, data: Bytes | None = None) -> tuple[Bytes, Any, Any]:
        data = np.empty(self._size, np.uint8) if data is None else data
        scales = 2 * (self._keys + self._values)
        return data, data[:scales].view(np.uint16), data[scales:]

    def _encode(self, values: Floats, position: int) -> tuple[Bytes, bytes]:
        data, scales, quants = self._parts()
        found, quantised = _quantise(values)
        scales[:] = found
        quants[:] = quantised
        return data, b""

    def _decode(self, data: Bytes, own: bytes) -> Floats | str:
        if len(data) != self._size:
            return WORD
        _, scales, quants = self._parts(data)
        spec = self.spec
        shape = (spec.num_layers, 2, spec.num_kv_heads, spec.block_tokens, spec.head_dim)
        return _dequantise(scales, quants, shape)


def scale_up(most: Any, levels: float = _LEVELS) -> Any:
    """Bfloat16 bits of scales that are at least *most* / *levels*, and never too small to divide by."""
    wanted = (most * np.float32(1 / levels)).view(np.uint32)
    return np.maximum((wanted + np.uint32(0x1FFFF)) >> np.uint32(16), np.uint32(SMALLEST)).astype(np.uint16)


def _quantise(values: Floats) -> tuple[Any, Any]:
    size = np.abs(values)
    keys = scale_up(size[:, 0].max(axis=2))
    tokens = scale_up(size[:, 1].max(axis=3))
    scaled = np.empty_like(values)
    with np.errstate(divide="ignore", over="ignore"):
        np.multiply(values[:, 0], (np.float32(1) / from_bf16(keys))[:, :, None, :], out=scaled[:, 0])
        np.multiply(values[:, 1], (np.float32(1) / from_bf16(tokens))[:, :, :, None], out=scaled[:, 1])
        scaled += np.float32(_MAGIC)
    scales = np.concatenate((keys.reshape(-1), tokens.reshape(-1)))
    return scales, scaled.view(np.uint32).reshape(-1).astype(np.uint8)


def _dequantise(scales: Any, quants: Any, shape: tuple[int, ...]) -> Floats:
    layers, _, heads, tokens, dim = shape
    real, cut = from_bf16(scales), layers * heads * dim
    values: Floats = quants.view(np.int8).reshape(shape).astype(np.float32)
    values[:, 0] *= real[:cut].reshape(layers, heads, 1, dim)
    values[:, 1] *= real[cut:].reshape(layers, heads, tokens, 1)
    return values


# -- bfloat16, in one pass --------------------------------------------------------------------------------------------


def _encode16_numpy(source: Any, where: Any, scales: Any, quants: Any) -> float:
    layers, heads, tokens, dim, *strides = where.tolist()
    shape = (layers, 2, heads, tokens, dim)
    tiles = np.lib.stride_tricks.as_strided(source, shape, [*(2 * s for s in strides), 2])
    values = from_bf16(np.ascontiguousarray(tiles))
    if int((values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max()) >= NOT_FINITE_BITS:
        return -1.0
    scales[:], quants[:] = _quantise(values)
    found = from_bf16(to_bf16(_dequantise(scales, quants, shape)))
    error = np.abs(values - found).max(axis=(2, 3, 4))
    size = np.abs(values).max(axis=(2, 3, 4))
    if not np.isfinite(error).all():
        return float("inf")
    return float((error / np.where(size > 0, size, np.float32(1))).max())


@helper
def _largest_in_channels(source: Any, at: Any, step: Any, tokens: Any, dim: Any, most: Any) -> None:
    """Bits of the largest magnitude in each channel; four tokens at once, because *most* is loaded and stored."""
    most[:] = 0
    whole = tokens // 4 * 4
    for token in range(0, whole, 4):  # slices, because an index that may be negative keeps a loop from being vectorised
        a, b = source[at + token * step :][:dim], source[at + (token + 1) * step :][:dim]
        c, d = source[at + (token + 2) * step :][:dim], source[at + (token + 3) * step :][:dim]
        for i in range(dim):
            ab = max(np.uint16(a[i] & np.uint16(0x7FFF)), np.uint16(b[i] & np.uint16(0x7FFF)))
            cd = max(np.uint16(c[i] & np.uint16(0x7FFF)), np.uint16(d[i] & np.uint16(0x7FFF)))
            most[i] = max(most[i], max(ab, cd))
    for token in range(whole, tokens):
        these = source[at + token * step :][:dim]
        for i in range(dim):
            most[i] = max(most[i], np.uint16(these[i] & np.uint16(0x7FFF)))


@helper
def _largest_of_tokens(source: Any, at: Any, step: Any, tokens: Any, dim: Any, most: Any) -> None:
    """Bits of the largest magnitude of each token."""
    for token in range(tokens):
        these, largest = source[at + token * step :][:dim], np.uint16(0)
        for i in range(dim):
            largest = max(largest, np.uint16(these[i] & np.uint16(0x7FFF)))
        most[token] = largest


@helper
def _scales_of(most: Any, scales: Any, at: Any, count: Any, real: Any, inverse: Any) -> None:
    """From the bits of the largest magnitudes to scales, as bfloat16, float32, and one over it."""
    bits = real.view(np.uint32)
    for i in range(count):
        bits[i] = np.uint32(np.uint32(most[i]) << np.uint32(16))
    for i in range(count):
        real[i] = real[i] * np.float32(1 / 127.0)
    for i in range(count):
        up = np.uint32(np.uint32(bits[i] + np.uint32(0x1FFFF)) >> np.uint32(16))
        up = max(up, np.uint32(0x80))
        scales[at + i] = np.uint16(up)
        bits[i] = np.uint32(up << np.uint32(16))
    for i in range(count):
        inverse[i] = np.float32(1) / real[i]


@helper
def _quantise_keys(source: Any, at: Any, step: Any, tokens: Any, dim: Any, inverse: Any, real: Any, to: Any) -> Any:
    """Quantise one head with a scale for each channel; bits of the largest distance to what it is decoded to.

    Everything that happens to an element is in one loop: what is between stays in registers.
    """
    most = np.uint32(0)
    for token in range(tokens):
        come, there = source[at + token * step :][:dim], to[token * dim :][:dim]
        for i in range(dim):
            value = np.uint32(np.uint32(come[i]) << np.uint32(16)).view(np.float32)
            level = np.float32(np.float32(value * inverse[i]) + np.float32(12582912.0))
            there[i] = np.uint8(level.view(np.uint32))
            back = np.float32(np.float32(level - np.float32(12582912.0)) * real[i]).view(np.uint32)
            odd = np.uint32(np.uint32(back >> np.uint32(16)) & np.uint32(1))
            up = np.uint32(np.uint32(back + np.uint32(np.uint32(0x7FFF) + odd)) & np.uint32(0xFFFF0000))
            apart = np.float32(value - up.view(np.float32)).view(np.uint32)
            most = max(most, np.uint32(apart & np.uint32(0x7FFFFFFF)))
    return most


@helper
def _quantise_values(source: Any, at: Any, step: Any, tokens: Any, dim: Any, inverse: Any, real: Any, to: Any) -> Any:
    """The same with a scale for each token; in a loop of its own, so that it is vectorised."""
    most = np.uint32(0)
    for token in range(tokens):
        come, there = source[at + token * step :][:dim], to[token * dim :][:dim]
        by, back_by = inverse[token], real[token]
        for i in range(dim):
            value = np.uint32(np.uint32(come[i]) << np.uint32(16)).view(np.float32)
            level = np.float32(np.float32(value * by) + np.float32(12582912.0))
            there[i] = np.uint8(level.view(np.uint32))
            back = np.float32(np.float32(level - np.float32(12582912.0)) * back_by).view(np.uint32)
            odd = np.uint32(np.uint32(back >> np.uint32(16)) & np.uint32(1))
            up = np.uint32(np.uint32(back + np.uint32(np.uint32(0x7FFF) + odd)) & np.uint32(0xFFFF0000))
            apart = np.float32(value - up.view(np.float32)).view(np.uint32)
            most = max(most, np.uint32(apart & np.uint32(0x7FFFFFFF)))
    return most


@kernel("f8(u2[::1], i8[::1], u2[::1], u1[::1])", fallback=_encode16_numpy)
def _encode16(source: Any, where: Any, scales: Any, quants: Any) -> float:
    layers, heads, tokens, dim = where[0], where[1], where[2], where[3]
    n, step = tokens * dim, where[7]
    most = np.empty(max(tokens, dim), np.uint16)
    real, inverse = np.empty(max(tokens, dim), np.float32), np.empty(max(tokens, dim), np.float32)
    pair = np.empty(2, np.uint32)
    floats = pair.view(np.float32)
    worst = np.float32(0)
    for layer in range(layers):
        for c in range(2):
            pair[:] = 0
            for head in range(heads):
                at = layer * where[4] + c * where[5] + head * where[6]
                if c == 0:
                    _largest_in_channels(source, at, step, tokens, dim, most)
                else:
                    _largest_of_tokens(source, at, step, tokens, dim, most)
                count = dim if c == 0 else tokens
                for i in range(count):
                    pair[1] = max(pair[1], np.uint32(np.uint32(most[i]) << np.uint32(16)))
                if pair[1] >= np.uint32(0x7F800000):
                    return -1.0
                first = (layer * heads + head) * count + (layers * heads * dim if c else 0)
                _scales_of(most, scales, first, count, real, inverse)
                to = quants[((layer * 2 + c) * heads + head) * n :][:n]
                if c == 0:
                    pair[0] = max(pair[0], _quantise_keys(source, at, step, tokens, dim, inverse, real, to))
                else:
                    pair[0] = max(pair[0], _quantise_values(source, at, step, tokens, dim, inverse, real, to))
            if pair[0] >= np.uint32(0x7F800000):
                return np.inf
            unit = floats[1] if pair[1] > 0 else np.float32(1)
            worst = max(worst, np.float32(floats[0] / unit))
    return np.float64(worst)


def _decode16_numpy(scales: Any, quants: Any, where: Any, out: Any) -> None:
    layers, heads, tokens, dim, *strides = where.tolist()
    shape = (layers, 2, heads, tokens, dim)
    tiles = np.lib.stride_tricks.as_strided(out, shape, [*(2 * s for s in strides), 2])
    tiles[...] = to_bf16(_dequantise(scales, quants, shape))


@kernel("void(u2[::1], u1[::1], i8[::1], u2[::1])", fallback=_decode16_numpy)
def _decode16(scales: Any, quants: Any, where: Any, out: Any) -> None:
    layers, heads, tokens, dim = where[0], where[1], where[2], where[3]
    signed = quants.view(np.int8)
    real = np.empty(max(tokens, dim), np.float32)
    wide = real.view(np.uint32)
    row = np.empty(dim, np.float32)
    bits = row.view(np.uint32)
    come = 0
    for layer in range(layers):
        for c in range(2):
            for head in range(heads):
                count = dim if c == 0 else tokens
                first = (layer * heads + head) * count + (layers * heads * dim if c else 0)
                for i in range(count):
                    wide[i] = np.uint32(np.uint32(scales[first + i]) << np.uint32(16))
                for token in range(tokens):
                    at = layer * where[4] + c * where[5] + head * where[6] + token * where[7]
                    these, to = signed[come : come + dim], out[at : at + dim]
                    if c == 0:
                        for d in range(dim):
                            row[d] = np.float32(these[d]) * real[d]
                    else:
                        scale = real[token]
                        for d in range(dim):
                            row[d] = np.float32(these[d]) * scale
                    for d in range(dim):
                        odd = np.uint32(np.uint32(bits[d] >> np.uint32(16)) & np.uint32(1))
                        up = np.uint32(bits[d] + np.uint32(np.uint32(0x7FFF) + odd))
                        to[d] = np.uint16(np.uint32(up >> np.uint32(16)))
                    come += dim
