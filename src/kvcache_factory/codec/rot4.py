"""``rot4``: a rotation that makes every element look Gaussian, then the best four bits for a Gaussian.

The idea of TurboQuant (arXiv 2504.19874), without its second stage of one-bit residuals: signs are flipped by a fixed
pattern, a Hadamard transform mixes the elements of each head of each token, and what comes out is quantised with the
sixteen levels of Lloyd and Max, in units of the vector's root mean square.  Nothing is calibrated.

Before that, the mean of each channel over the block is taken from the keys: channels that hardly change would otherwise
fill the vector and leave the others few levels.  It costs a 70th of the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..block.spec import BlockSpec
from ..errors import ConfigError
from ..jit import late_kernel as kernel
from .base import Bytes
from .int8 import SMALLEST, scale_up
from .lossy import WORD, LossyCodec
from .values import Floats, from_bf16, to_bf16

_HALF = np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326], np.float32)
LEVELS = np.concatenate((-_HALF[::-1], _HALF)).astype(np.float32)
"""Of the quantiser of 16 levels with the least square error for a Gaussian of variance one (Max, 1960)."""
_STEPS = ((LEVELS[1:] + LEVELS[:-1]) / np.float32(2)).astype(np.float32)


class Rot4(LossyCodec):
    """See the module.

    Encoded: units of the means ``uint16 [layers, heads]``, the means ``int8 [layers, heads, head_dim]``, the root mean
    squares ``uint16 [layers, 2, heads, tokens]``, then two codes a byte.
    """

    name = "rot4"
    largest_ratio = 4.0
    default_max_rel_error = 0.3

    def open(self, spec: BlockSpec) -> None:
        super().open(spec)
        width = spec.head_dim & -spec.head_dim
        if width < 8:
            raise ConfigError(f"codec rot4 needs a head_dim that is a multiple of 8, not {spec.head_dim}; use 'int4g'")
        self._rows = 2 * spec.num_layers * spec.num_kv_heads * spec.block_tokens
        self._width = width
        self._heads = spec.num_layers * spec.num_kv_heads
        self._means = self._heads * spec.head_dim
        # Fixed for good: blocks outlive the program.
        turns = np.arange(spec.head_dim, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._signs = np.where((turns >> np.uint64(63)) == 0, 1, -1).astype(np.float32)

    @property
    def _size(self) -> int:
        return 2 * self._heads + self._means + self._rows * (2 + self.spec.head_dim // 2)

    def _parts(self, data: Bytes) -> tuple[Any, Any, Any, Any]:
        """Units of the means, means of the keys' channels, scales of all rows, codes ``[rows, head_dim / 2]``."""
        units, means, scales, codes = np.split(
            data, np.cumsum([2 * self._heads, self._means, 2 * self._rows], dtype=np.int64)
        )
        by_head = means.view(np.int8).reshape(self._heads, -1)
        return units.view(np.uint16), by_head, scales.view(np.uint16), codes.reshape(self._rows, -1)

    def _encode(self, values: Floats, position: int) -> tuple[Bytes, bytes]:
        data = np.empty(self._size, np.uint8)
        units, means, scales, codes = self._parts(data)
        total = values[:, 0, :, 0].copy()
        for token in range(1, values.shape[3]):  # in this order, so that every machine gets the same sum
            total += values[:, 0, :, token]
        mean = (total * np.float32(1 / values.shape[3])).reshape(means.shape)
        units[:] = scale_up(np.abs(mean).max(axis=1))
        means[:] = np.rint(mean * (np.float32(1) / from_bf16(units))[:, None])
        centred = values.copy()
        centred[:, 0] -= self._means_of(units, means)
        _rotate_and_pack(centred.reshape(self._rows, -1), self._signs, self._width, _STEPS, scales, codes)
        return data, b""

    def _decode(self, data: Bytes, own: bytes) -> Floats | str:
        if len(data) != self._size:
            return WORD
        spec = self.spec
        units, means, scales, codes = self._parts(data)
        out = np.empty((self._rows, spec.head_dim), np.float32)
        _unpack_and_rotate(scales, codes, LEVELS, self._signs, self._width, out)
        values = out.reshape(spec.num_layers, 2, spec.num_kv_heads, spec.block_tokens, spec.head_dim)
        values[:, 0] += self._means_of(units, means)
        return values

    def _means_of(self, units: Any, means: Any) -> Floats:
        """``float32 [layers, heads, 1, head_dim]``"""
        real: Floats = means.astype(np.float32) * from_bf16(units)[:, None]
        return real.reshape(self.spec.num_layers, self.spec.num_kv_heads, 1, self.spec.head_dim)


def _hadamard_numpy(rows: Any, width: int) -> None:
    """The transform of each *width* neighbours, without its factor, in place."""
    stride = 1
    while stride < width:
        pairs = rows.reshape(-1, 2, stride)
        a, b = pairs[:, 0].copy(), pairs[:, 1]
        pairs[:, 0] += b
        np.subtract(a, b, out=pairs[:, 1])
        stride *= 2


def _rotate_and_pack_numpy(rows: Any, signs: Any, width: int, steps: Any, scales: Any, codes: Any) -> None:
    work = rows * signs
    _hadamard_numpy(work, width)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = work * work
        while squares.shape[1] > 1 and squares.shape[1] % 2 == 0:
            half = squares.shape[1] // 2
            squares = squares[:, :half] + squares[:, half:]
        total = squares[:, 0].copy()
        for i in range(1, squares.shape[1]):
            total += squares[:, i]
        mean = np.sqrt(total * np.float32(1 / rows.shape[1]))
        scales[:] = np.maximum(to_bf16(mean), np.uint16(SMALLEST))
        scaled = work * (np.float32(1) / from_bf16(scales))[:, None]
    found = np.searchsorted(steps, scaled, side="left").astype(np.uint8)
    half = rows.shape[1] // 2
    codes[:] = found[:, :half] | (found[:, half:] << np.uint8(4))


@kernel("void(f4[:,::1], f4[::1], i8, f4[::1], u2[::1], u1[:,::1])", fallback=_rotate_and_pack_numpy)
def _rotate_and_pack(rows: Any, signs: Any, width: Any, steps: Any, scales: Any, codes: Any) -> None:
    count, dim = rows.shape
    half = dim // 2
    work, other = np.empty(dim, np.float32), np.empty(dim, np.float32)
    found = np.empty(dim, np.uint8)
    one = np.empty(1, np.float32)
    bits = one.view(np.uint32)
    for r in range(count):
        row, packed = rows[r], codes[r]
        for i in range(dim):
            work[i] = row[i] * signs[i]
        stride = 1
        while stride < width:
            for start in range(0, dim, 2 * stride):
                a, b = work[start:][:stride], work[start + stride :][:stride]
                for i in range(stride):
                    x, y = a[i], b[i]
                    a[i], b[i] = x + y, x - y
            stride *= 2
        for i in range(dim):
            other[i] = work[i] * work[i]
        size = dim
        while size > 1 and size % 2 == 0:
            size //= 2
            upper = other[size:]
            for i in range(size):
                other[i] += upper[i]
        total = other[0]
        for i in range(1, size):
            total += other[i]
        one[0] = np.sqrt(np.float32(total * np.float32(1 / dim)))
        odd = np.uint32(np.uint32(bits[0] >> np.uint32(16)) & np.uint32(1))
        up = np.uint32(np.uint32(bits[0] + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))
        up = max(up, np.uint32(0x80))
        scales[r] = np.uint16(up)
        bits[0] = np.uint32(up << np.uint32(16))
        inverse = np.float32(1) / one[0]
        for i in range(dim):
            scaled = work[i] * inverse
            code = 0
            for k in range(15):
                code += scaled > steps[k]
            found[i] = np.uint8(code)
        for i in range(half):
            packed[i] = np.uint8(found[i] | np.uint8(found[half + i] << np.uint8(4)))


def _unpack_and_rotate_numpy(scales: Any, codes: Any, levels: Any, signs: Any, width: int, out: Any) -> None:
    half = out.shape[1] // 2
    scale = from_bf16(scales)[:, None] * np.float32(1 / width)
    out[:, :half] = levels[codes & np.uint8(15)] * scale
    out[:, half:] = levels[codes >> np.uint8(4)] * scale
    _hadamard_numpy(out, width)
    out *= signs


@kernel("void(u2[::1], u1[:,::1], f4[::1], f4[::1], i8, f4[:,::1])", fallback=_unpack_and_rotate_numpy)
def _unpack_and_rotate(scales: Any, codes: Any, levels: Any, signs: Any, width: Any, out: Any) -> None:
    count, dim = out.shape
    half = dim // 2
    one = np.empty(1, np.float32)
    bits = one.view(np.uint32)
    for r in range(count):
        row, packed = out[r], codes[r]
        bits[0] = np.uint32(np.uint32(scales[r]) << np.uint32(16))
        scale = np.float32(one[0] * np.float32(1 / width))
        upper = row[half:]
        for i in range(half):
            row[i] = levels[packed[i] & np.uint8(15)] * scale
        for i in range(half):
            upper[i] = levels[packed[i] >> np.uint8(4)] * scale
        stride = 1
        while stride < width:
            for start in range(0, dim, 2 * stride):
                a, b = row[start:][:stride], row[start + stride :][:stride]
                for i in range(stride):
                    x, y = a[i], b[i]
                    a[i], b[i] = x + y, x - y
            stride *= 2
        for i in range(dim):
            row[i] *= signs[i]
