"""``int4g``: four bits an element in groups with a lowest value and a step each, as in KIVI (arXiv 2402.02750).

Keys are grouped along the tokens of a channel, values along the channels of a token.  Deviations from the paper: four
bits instead of two, smaller groups for the keys, no part kept in full (the policy keeps whole blocks), and bfloat16
for lowest value and step.  Groups of keys want many tokens, so blocks of fewer than 64 are refused.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from ..block.spec import BlockSpec
from ..errors import ConfigError
from ..jit import late_kernel as kernel
from .base import Bytes
from .lossy import WORD, LossyCodec
from .values import Floats, from_bf16, to_bf16

MIN_TOKENS = 64
_LEVELS = 15
_GROUP = 32
_OWN = struct.Struct("<H")  # elements of a group at most


class Int4g(LossyCodec):
    """See the module.

    Encoded, for keys and then for values: the lowest values and the steps of all groups, uint16 each, and the codes
    of two groups' elements in each byte.

    Parameters
    ----------
    group:
        Elements of a group: tokens for keys, channels for values.  It must divide both, and is refused at
        :meth:`open` where it does not.  None: 32, or the largest power of two below that divides, for each.
    """

    name = "int4g"
    largest_ratio = 4.0
    default_max_rel_error = 0.08

    def __init__(self, *, group: int | None = None, max_rel_error: float | None = None) -> None:
        super().__init__(max_rel_error=max_rel_error)
        if group is not None and (isinstance(group, bool) or not isinstance(group, int) or not 2 <= group <= 1024):
            raise ConfigError(f"codec int4g: group={group!r} must be a whole number from 2 to 1024")
        self.group = _GROUP if group is None else group
        self._wanted = group

    def options(self) -> dict[str, Any]:
        return {**super().options(), **({} if self._wanted is None else {"group": self._wanted})}

    def open(self, spec: BlockSpec) -> None:
        super().open(spec)
        if spec.block_tokens < MIN_TOKENS:
            raise ConfigError(
                f"codec int4g needs storage blocks of at least {MIN_TOKENS} tokens, not {spec.block_tokens}: its "
                "groups would cost more than they save; use larger blocks, or 'int8'"
            )
        self._groups = (math.gcd(spec.block_tokens, self.group), math.gcd(spec.head_dim, self.group))
        if self._wanted is not None and (self._groups != (self.group, self.group) or self.group % 2):
            both = math.gcd(spec.block_tokens, spec.head_dim)
            allowed = ", ".join(str(n) for n in range(2, min(both, 1024) + 1, 2) if both % n == 0) or "none"
            raise ConfigError(
                f"codec int4g: group={self.group} must be even and divide blocks of {spec.block_tokens} tokens and "
                f"heads of {spec.head_dim} channels; use one of {allowed}"
            )
        half = spec.num_layers * spec.num_kv_heads * spec.block_tokens * spec.head_dim
        self._halves = [(half // g, half // 2) for g in self._groups]
        if half % 2 or min(self._groups) < 2:
            raise ConfigError(f"codec int4g: blocks of {spec.block_tokens} x {spec.head_dim} do not divide into groups")

    @property
    def _size(self) -> int:
        return sum(4 * groups + codes for groups, codes in self._halves)

    def _parts(self, data: Bytes) -> list[tuple[Any, Any]]:
        """For keys and values: lowest values and steps ``uint16 [2, groups]``, codes ``uint8 [groups, group / 2]``."""
        parts, at = [], 0
        for (groups, codes), group in zip(self._halves, self._groups, strict=True):
            sides = data[at : at + 4 * groups].view(np.uint16).reshape(2, groups)
            at += 4 * groups
            parts.append((sides, data[at : at + codes].reshape(groups, group // 2)))
            at += codes
        return parts

    def _encode(self, values: Floats, position: int) -> tuple[Bytes, bytes]:
        data = np.empty(self._size, np.uint8)
        for c, (sides, codes) in enumerate(self._parts(data)):
            _pack(self._grouped(values, c), sides, codes)
        return data, _OWN.pack(self.group)

    def _decode(self, data: Bytes, own: bytes) -> Floats | str:
        if len(own) < _OWN.size or len(data) != self._size or _OWN.unpack_from(own)[0] != self.group:
            return WORD
        spec = self.spec
        out = np.empty((spec.num_layers, 2, spec.num_kv_heads, spec.block_tokens, spec.head_dim), np.float32)
        for c, (sides, codes) in enumerate(self._parts(data)):
            groups = np.empty((len(codes), self._groups[c]), np.float32)
            _unpack(sides, codes, groups)
            view = out[:, c] if c else out[:, c].swapaxes(2, 3)
            view[...] = groups.reshape(view.shape)
        return out

    def _grouped(self, values: Floats, c: int) -> Floats:
        """Keys (0) or values (1) as ``float32 [groups, group]``."""
        half = values[:, c] if c else values[:, c].swapaxes(2, 3)
        return np.ascontiguousarray(half).reshape(-1, self._groups[c])

    @classmethod
    def that_reads(cls, own: bytes) -> Int4g:
        """An unopened codec that reads what one with these parameters of its own has written.

        Their group is the largest, which need not divide: a writer that chose it itself has made it smaller.
        """
        made = cls(group=_OWN.unpack_from(own)[0])
        made._wanted = None
        return made


def _pack_numpy(groups: Any, sides: Any, codes: Any) -> None:
    half = groups.shape[1] // 2
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        sides[0] = to_bf16(groups.min(axis=1))
        low = from_bf16(sides[0])
        spread = np.maximum(groups.max(axis=1) - low, np.float32(1e-30)) * np.float32(1 / _LEVELS)
        sides[1] = to_bf16(spread)
        inverse = np.float32(1) / from_bf16(sides[1])
        scaled = np.rint((groups - low[:, None]) * inverse[:, None])
        found = np.clip(scaled, 0, _LEVELS).astype(np.uint8)
    codes[:] = found[:, :half] | (found[:, half:] << np.uint8(4))


@kernel("void(f4[:,::1], u2[:,::1], u1[:,::1])", fallback=_pack_numpy)
def _pack(groups: Any, sides: Any, codes: Any) -> None:
    count, size = groups.shape
    half = size // 2
    pair = np.empty(2, np.float32)
    bits = pair.view(np.uint32)
    levels = np.empty(size, np.uint8)
    for g in range(count):
        row, packed = groups[g], codes[g]
        low = high = row[0]
        for i in range(size):
            low, high = min(low, row[i]), max(high, row[i])
        pair[0] = low
        odd = np.uint32(np.uint32(bits[0] >> np.uint32(16)) & np.uint32(1))
        bits[0] = np.uint32(np.uint32(bits[0] + np.uint32(np.uint32(0x7FFF) + odd)) & np.uint32(0xFFFF0000))
        low = pair[0]
        pair[1] = max(np.float32(high - low), np.float32(1e-30)) * np.float32(1 / 15)
        odd = np.uint32(np.uint32(bits[1] >> np.uint32(16)) & np.uint32(1))
        bits[1] = np.uint32(np.uint32(bits[1] + np.uint32(np.uint32(0x7FFF) + odd)) & np.uint32(0xFFFF0000))
        sides[0, g] = np.uint16(np.uint32(bits[0] >> np.uint32(16)))
        sides[1, g] = np.uint16(np.uint32(bits[1] >> np.uint32(16)))
        inverse = np.float32(1) / pair[1]
        for i in range(size):
            scaled = np.rint((row[i] - low) * inverse)
            levels[i] = np.uint8(min(max(scaled, np.float32(0)), np.float32(15)))
        for i in range(half):
            packed[i] = np.uint8(levels[i] | np.uint8(levels[half + i] << np.uint8(4)))


def _unpack_numpy(sides: Any, codes: Any, groups: Any) -> None:
    half = groups.shape[1] // 2
    low, step = from_bf16(sides[0])[:, None], from_bf16(sides[1])[:, None]
    groups[:, :half] = (codes & np.uint8(15)).astype(np.float32) * step + low
    groups[:, half:] = (codes >> np.uint8(4)).astype(np.float32) * step + low


@kernel("void(u2[:,::1], u1[:,::1], f4[:,::1])", fallback=_unpack_numpy)
def _unpack(sides: Any, codes: Any, groups: Any) -> None:
    count, size = groups.shape
    half = size // 2
    pair = np.empty(2, np.float32)
    bits = pair.view(np.uint32)
    for g in range(count):
        row, packed = groups[g], codes[g]
        bits[0] = np.uint32(np.uint32(sides[0, g]) << np.uint32(16))
        bits[1] = np.uint32(np.uint32(sides[1, g]) << np.uint32(16))
        low, step = pair[0], pair[1]
        for i in range(half):
            row[i] = np.float32(packed[i] & np.uint8(15)) * step + low
        upper = row[half:]
        for i in range(half):
            upper[i] = np.float32(packed[i] >> np.uint8(4)) * step + low
