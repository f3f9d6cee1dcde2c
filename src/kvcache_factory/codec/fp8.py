"""``fp8``: each element as float8 e4m3, in units of a scale for each head of each layer.

Offered because other systems store it; at the same size, ``int8`` is about twenty times closer to the original.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..block.spec import BlockSpec, KVDtype
from ..jit import late_kernel as kernel
from .base import Bytes
from .int8 import scale_up
from .lossy import WORD, LossyCodec
from .values import Floats, fp8_values, from_bf16

_LARGEST = 448.0
_MAGIC = 12582912.0


class Fp8(LossyCodec):
    """See the module.  Encoded: scales ``uint16 [layers, 2, heads]``, then ``[layers, 2, heads, tokens, head_dim]``."""

    name = "fp8"
    default_max_rel_error = 0.07

    def open(self, spec: BlockSpec) -> None:
        super().open(spec)
        self._tiles = 2 * spec.num_layers * spec.num_kv_heads
        self._each = spec.block_tokens * spec.head_dim

    def _encode(self, values: Floats, position: int) -> tuple[Bytes, bytes]:
        tiles = values.reshape(self._tiles, self._each)
        data = np.empty(self._tiles * (2 + self._each), np.uint8)
        most = np.abs(tiles).max(axis=1)
        scales = scale_up(most, _LARGEST)
        data[: 2 * self._tiles].view(np.uint16)[:] = scales
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(1) / from_bf16(scales)
        _to_codes(tiles, inverse, data[2 * self._tiles :].reshape(tiles.shape))
        return data, b""

    def _decode(self, data: Bytes, own: bytes) -> Floats | str:
        spec = self.spec
        if len(data) != self._tiles * (2 + self._each):
            return WORD
        out = np.empty((self._tiles, self._each), np.float32)
        scales = from_bf16(data[: 2 * self._tiles].view(np.uint16))
        _from_codes(data[2 * self._tiles :].reshape(out.shape), scales, fp8_values(KVDtype.FP8_E4M3), out)
        return out.reshape(spec.num_layers, 2, spec.num_kv_heads, spec.block_tokens, spec.head_dim)


def _to_codes_numpy(tiles: Any, inverse: Any, codes: Any) -> None:
    bits = (tiles * inverse[:, None]).view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    normal = (size + np.uint32(0x7FFFF) + ((size >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    small = ((size.view(np.float32) * np.float32(512) + np.float32(_MAGIC)).view(np.uint32)) & np.uint32(15)
    code = np.where(size < np.uint32(0x3C800000), small, normal - np.uint32(960))
    codes[:] = np.minimum(code, np.uint32(0x7E)) | ((bits >> np.uint32(24)) & np.uint32(0x80))


@kernel("void(f4[:,::1], f4[::1], u1[:,::1])", fallback=_to_codes_numpy)
def _to_codes(tiles: Any, inverse: Any, codes: Any) -> None:
    count, n = tiles.shape
    scaled, tiny = np.empty(n, np.float32), np.empty(n, np.float32)
    bits, small = scaled.view(np.uint32), tiny.view(np.uint32)
    for t in range(count):
        row, out, unit = tiles[t], codes[t], inverse[t]
        for i in range(n):
            scaled[i] = row[i] * unit
        for i in range(n):
            tiny[i] = abs(scaled[i]) * np.float32(512) + np.float32(12582912.0)
        for i in range(n):
            size = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
            odd = np.uint32(np.uint32(size >> np.uint32(20)) & np.uint32(1))
            code = np.uint32(np.uint32(size + np.uint32(np.uint32(0x7FFFF) + odd)) >> np.uint32(20))
            code = np.uint32(code - np.uint32(960))
            if size < np.uint32(0x3C800000):
                code = np.uint32(small[i] & np.uint32(15))
            code = min(code, np.uint32(0x7E))
            out[i] = np.uint8(code | np.uint32(np.uint32(bits[i] >> np.uint32(24)) & np.uint32(0x80)))


def _from_codes_numpy(codes: Any, scales: Any, values: Any, out: Any) -> None:
    np.multiply(values[codes], scales[:, None], out=out)


@kernel("void(u1[:,::1], f4[::1], f4[::1], f4[:,::1])", fallback=_from_codes_numpy)
def _from_codes(codes: Any, scales: Any, values: Any, out: Any) -> None:
    count, n = codes.shape
    for t in range(count):
        row, to, scale = codes[t], out[t], scales[t]
        for i in range(n):
            to[i] = values[row[i]] * scale
