"""Payloads as float32 tiles ``[layers, 2, heads, tokens, head_dim]`` and back, and how far two of them are apart.

Compiled and numpy paths give the same bits: no sum depends on an order, and products are rounded one by one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec, KVDtype, Layout
from ..jit import late_kernel as kernel
from .base import Bytes

Floats = npt.NDArray[np.float32]
NOT_FINITE_BITS = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


class Geometry:
    """Where the rows (one head of one token) of a payload are, in elements.

    ``numbers`` ``int64 [8]``: layers, heads, tokens, head_dim, and the strides of layer, K or V, head and token.
    """

    def __init__(self, spec: BlockSpec, layout: Layout) -> None:
        assert layout.packed_tokens == 0, "payloads of a packing are put into a plain order first"
        layers, heads, tokens, dim = spec.num_layers, spec.num_kv_heads, spec.block_tokens, spec.head_dim
        plane = heads * tokens * dim
        head, token = (dim, heads * dim) if layout == Layout.LCND else (tokens * dim, dim)
        self.numbers = np.array([layers, heads, tokens, dim, 2 * plane, plane, head, token], np.int64)
        self.shape = (layers, 2, heads, tokens, dim)
        inner = (tokens, heads) if layout == Layout.LCND else (heads, tokens)
        self._stored = (layers, 2, *inner, dim)
        self._swapped = layout == Layout.LCND

    def tiles(self, cells: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Elements of a payload ``[n]`` as a view ``[layers, 2, heads, tokens, head_dim]``."""
        view = cells.reshape(self._stored)
        return view.swapaxes(2, 3) if self._swapped else view


@cache
def geometry(spec: BlockSpec, layout: Layout) -> Geometry:
    """The geometry of payloads of *spec* in a plain order."""
    return Geometry(spec, layout)


def cells(payload: Bytes, spec: BlockSpec) -> npt.NDArray[Any]:
    """The elements of a payload as they are stored: float32, float16, or the bits of what numpy has no type for."""
    kinds = {KVDtype.F32: np.float32, KVDtype.F16: np.float16, KVDtype.BF16: np.uint16}
    return payload[: spec.payload_bytes].view(kinds.get(spec.dtype, np.uint8))


def widen(payload: Bytes, spec: BlockSpec, layout: Layout) -> Floats:
    """A payload as float32 ``[layers, 2, heads, tokens, head_dim]``, contiguous."""
    where, stored = geometry(spec, layout), cells(payload, spec)
    out = np.empty(where.shape, np.float32)
    if spec.dtype == KVDtype.BF16:
        _widen16(stored, where.numbers, out.reshape(-1))
    elif stored.dtype == np.uint8:
        out[...] = fp8_values(spec.dtype)[where.tiles(stored)]
    else:
        out[...] = where.tiles(stored)
    return out


def narrow(values: Floats, spec: BlockSpec, layout: Layout, out: Bytes) -> None:
    """Round float32 tiles to the elements of a payload (to nearest, ties to even) and write them to *out*."""
    where, stored = geometry(spec, layout), cells(out, spec)
    if spec.dtype == KVDtype.BF16:
        _narrow16(values.reshape(-1), where.numbers, stored)
    elif stored.dtype == np.uint8:
        where.tiles(stored)[...] = _to_fp8(values, spec.dtype)
    else:
        with np.errstate(over="ignore"):
            where.tiles(stored)[...] = values


def rounded(values: Floats, spec: BlockSpec) -> Floats:
    """Float32 tiles as they will be after :func:`narrow`."""
    if spec.dtype == KVDtype.F32:
        return values
    out = np.empty(spec.payload_bytes, np.uint8)
    narrow(values, spec, Layout.LCHND, out)
    return widen(out, spec, Layout.LCHND)


def is_finite(values: Floats) -> bool:
    """Whether no element is NaN or infinite."""
    return bool(_largest(values.reshape(-1).view(np.uint32)) < NOT_FINITE_BITS)


def max_rel_error(values: Floats, found: Floats) -> float:
    """The largest difference of two elements, in units of the largest magnitude in its plane (layer, K or V)."""
    planes = values.shape[0] * values.shape[1]
    return float(_worst(values.reshape(planes, -1), found.reshape(planes, -1)))


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


def _widen16_numpy(source: Any, where: Any, out: Any) -> None:
    tiles = _strided(source, where)
    np.left_shift(tiles, np.uint32(16), out=out.view(np.uint32).reshape(tiles.shape), dtype=np.uint32)


@kernel("void(u2[::1], i8[::1], f4[::1])", fallback=_widen16_numpy)
def _widen16(source: Any, where: Any, out: Any) -> None:
    layers, heads, tokens, dim = where[0], where[1], where[2], where[3]
    bits = out.view(np.uint32)
    to = 0
    for layer in range(layers):
        for c in range(2):
            for head in range(heads):
                for token in range(tokens):
                    at = layer * where[4] + c * where[5] + head * where[6] + token * where[7]
                    here, there = source[at : at + dim], bits[to : to + dim]
                    for d in range(dim):
                        there[d] = np.uint32(np.uint32(here[d]) << np.uint32(16))
                    to += dim


def to_bf16(values: Any) -> Any:
    """The bits of float32 *values* rounded to bfloat16, ``uint16``; NaN is not expected."""
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: Any) -> Floats:
    """Bfloat16 *bits* ``uint16`` as float32."""
    values: Floats = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def _narrow16_numpy(values: Any, where: Any, out: Any) -> None:
    tiles = _strided(out, where)
    tiles[...] = to_bf16(values).reshape(tiles.shape)


@kernel("void(f4[::1], i8[::1], u2[::1])", fallback=_narrow16_numpy)
def _narrow16(values: Any, where: Any, out: Any) -> None:
    layers, heads, tokens, dim = where[0], where[1], where[2], where[3]
    bits = values.view(np.uint32)
    come = 0
    for layer in range(layers):
        for c in range(2):
            for head in range(heads):
                for token in range(tokens):
                    at = layer * where[4] + c * where[5] + head * where[6] + token * where[7]
                    here, there = bits[come : come + dim], out[at : at + dim]
                    for d in range(dim):
                        odd = np.uint32(np.uint32(here[d] >> np.uint32(16)) & np.uint32(1))
                        up = np.uint32(here[d] + np.uint32(np.uint32(0x7FFF) + odd))
                        there[d] = np.uint16(np.uint32(up >> np.uint32(16)))
                    come += dim


def _strided(cells: Any, where: Any) -> Any:
    layers, heads, tokens, dim, *strides = where.tolist()
    size = cells.itemsize
    shape = (layers, 2, heads, tokens, dim)
    return np.lib.stride_tricks.as_strided(cells, shape, [*(s * size for s in strides), size])


# -- float8 -----------------------------------------------------------------------------------------------------------


@cache
def fp8_values(dtype: KVDtype) -> Floats:
    """The value of each of the 256 bit patterns."""
    code = np.arange(256)
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == KVDtype.FP8_E4M3 else (5, 2, 15)
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    size = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    if dtype == KVDtype.FP8_E4M3:
        size[(code & 0x7F) == 0x7F] = np.nan
    else:
        size[exponent == 31] = np.where(fraction[exponent == 31] == 0, np.inf, np.nan)
    values: Floats = np.where(code >= 128, -size, size).astype(np.float32)
    return values


@cache
def _fp8_steps(dtype: KVDtype) -> Floats:
    """Midpoints between neighbouring finite magnitudes."""
    sizes = fp8_values(dtype)[:128]
    sizes = sizes[np.isfinite(sizes)]
    return ((sizes[1:].astype(np.float64) + sizes[:-1]) / 2).astype(np.float32)


def _to_fp8(values: Floats, dtype: KVDtype) -> npt.NDArray[np.uint8]:
    steps = _fp8_steps(dtype)
    size = np.abs(values)
    code = np.searchsorted(steps, size, side="left")
    tie = (code < len(steps)) & (steps[np.minimum(code, len(steps) - 1)] == size) & (code % 2 == 1)
    codes: npt.NDArray[np.uint8] = ((code + tie) | np.where(np.signbit(values), 128, 0)).astype(np.uint8)
    return codes


# -- errors -----------------------------------------------------------------------------------------------------------


def _largest_numpy(bits: Any) -> int:
    return int((bits & np.uint32(_MAGNITUDE)).max(initial=0))


@kernel("i8(u4[::1])", fallback=_largest_numpy)
def _largest(bits: Any) -> Any:
    most = np.uint32(0)
    for i in range(len(bits)):
        most = max(most, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    return np.int64(most)


def _worst_numpy(values: Any, found: Any) -> float:
    error = np.abs(values - found).max(axis=1)
    size = np.abs(values).max(axis=1)
    ratio = error / np.where(size > 0, size, np.float32(1))
    return float(ratio.max(initial=0)) if np.isfinite(error).all() else float("inf")


@kernel("f8(f4[:,::1], f4[:,::1])", fallback=_worst_numpy)
def _worst(values: Any, found: Any) -> float:
    planes, n = values.shape
    difference = np.empty(n, np.float32)
    bits, sizes = difference.view(np.uint32), values.view(np.uint32)
    worst = np.float32(0)
    for plane in range(planes):
        most = size = np.uint32(0)
        for i in range(n):
            difference[i] = values[plane, i] - found[plane, i]
        for i in range(n):
            most = max(most, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
            size = max(size, np.uint32(sizes[plane, i] & np.uint32(0x7FFFFFFF)))
        if most >= np.uint32(0x7F800000):
            return np.inf
        both = np.empty(2, np.uint32)
        both[0], both[1] = most, size
        pair = both.view(np.float32)
        unit = pair[1] if size > 0 else np.float32(1)
        worst = max(worst, np.float32(pair[0] / unit))
    return np.float64(worst)
