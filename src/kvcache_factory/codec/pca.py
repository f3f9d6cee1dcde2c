"""``pca``: transform coding.  Keys are un-rotated, groups of layers turned into principal components, and these rounded
to multiples of one step and range coded.

The method that NVIDIA published as KVTC (arXiv 2511.01815).  Deviations: one uniform step instead of bits assigned to
components by dynamic programming, which is what that assignment tends to; range coding by the calibrated distribution
of each component instead of DEFLATE; which tokens stay exact is the policy's to say, by whole blocks.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from ..block.spec import BlockSpec
from ..errors import ConfigError
from . import rans
from .base import DOES_NOT_PAY, NO_TABLE, Bytes
from .calibration import ESCAPE
from .lossy import WORD
from .spectral import SpectralCodec
from .values import Floats

_OWN = struct.Struct("<16s f I I I I")  # table, step, position, words, escapes, bytes of low bits
_NEGLIGIBLE = 0.15
"""Components that deviate by less than this many steps are taken to be zero."""


class Pca(SpectralCodec):
    """See the module.

    Encoded: states ``uint32 [tokens]``, words ``uint16``, numbers beyond a table ``int32``, and the low bits of
    components that vary by many steps.

    Parameters
    ----------
    step:
        The one knob: the step in units of a typical element; 0.25 is good, 0.5 is small.
    """

    name = "pca"
    largest_ratio = 16.0
    default_max_rel_error = 0.8

    def __init__(
        self,
        *,
        step: float = 0.25,
        table: str | os.PathLike[str] | None = None,
        max_rel_error: float | None = None,
    ) -> None:
        super().__init__(table=table, max_rel_error=max_rel_error)
        if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0.01 <= step <= 4:
            raise ConfigError(f"codec pca: step={step!r} must be from 0.01 to 4")
        self.step = float(step)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "step": self.step}

    def open(self, spec: BlockSpec) -> None:
        super().open(spec)
        self._starts = rans.cumulate(self.calibration.frequencies)
        self._symbols = rans.invert(self._starts)
        self._plans: dict[float, _Plan] = {}

    def _plan(self, step: float) -> _Plan:
        """How each component is coded with this step, which both sides work out alike."""
        if step not in self._plans:
            self._plans[step] = _Plan(self, np.float32(step))
        return self._plans[step]

    def _encode(self, values: Floats, position: int) -> tuple[Bytes, bytes] | str:
        step = float(np.float32(self.step))
        plan = self._plan(step)
        numbers = np.concatenate(
            [
                np.rint((rows @ basis) * (np.float32(1) / unit))
                for (_, _, rows), basis, unit in zip(self._rows(values, position), plan.bases, plan.units, strict=True)
            ],
            axis=1,
        ).T
        if np.abs(numbers).max(initial=0) >= 2**30:
            return DOES_NOT_PAY
        whole = np.ascontiguousarray(numbers).astype(np.int32)
        high = whole >> plan.shifts[:, None]
        beyond = (np.abs(high) > plan.reach[:, None]).nonzero()
        symbols = (np.clip(high, -127, 127) + 127).astype(np.uint8)
        symbols[beyond] = ESCAPE
        states, words = rans.encode(symbols, plan.tables, self._starts)
        escapes, low = high[beyond], plan.pack_low(whole)
        data = np.concatenate([a.view(np.uint8) for a in (states, escapes, words, low)])
        own = _OWN.pack(self.calibration.digest, step, position, len(words), len(escapes), len(low))
        return data, own

    def _decode(self, data: Bytes, own: bytes) -> Floats | str:
        if len(own) < _OWN.size:
            return WORD
        digest, step, position, words, escapes, low = _OWN.unpack_from(own)
        lanes = self.spec.block_tokens
        cuts = np.cumsum([4 * lanes, 4 * escapes, 2 * words, low])
        if cuts[-1] != len(data) or not 0.001 <= step <= 100:
            return WORD
        if digest != self.calibration.digest:
            return NO_TABLE
        plan = self._plan(step)
        states, beyond, stream, rest = (p.copy() for p in np.split(data, cuts[:-1]))
        symbols = rans.decode(
            states.view(np.uint32), stream.view(np.uint16), plan.tables, self._starts, self._symbols, lanes
        )
        if symbols is None or low != plan.low_bytes(lanes):
            return "codec_data"
        whole = symbols.astype(np.int32) - 127
        holes = symbols == ESCAPE
        if int(holes.sum()) != escapes:
            return "codec_data"
        whole[holes] = beyond.view(np.int32)
        whole <<= plan.shifts[:, None]
        plan.add_low(whole, rest)
        return self._tiles(self._rows_of(whole, plan), position)

    def _rows_of(self, whole: Any, plan: _Plan) -> list[Floats]:
        rows: list[Floats] = []
        at = 0
        for basis, unit in zip(plan.bases, plan.units, strict=True):
            kept = basis.shape[1]
            numbers: Floats = np.ascontiguousarray(whole[at : at + kept].T).astype(np.float32) * unit
            rows.append(numbers @ basis.T)
            at += kept
        return rows


class _Plan:
    """For one step: how many components of each part are kept, and the table and shift of each of them."""

    def __init__(self, codec: Pca, step: np.float32) -> None:
        table = codec.calibration
        sides = [
            (part, unit) for unit, parts in zip(table.units, (table.keys, table.values), strict=True) for part in parts
        ]
        self.units = [np.float32(step * np.float32(unit)) for _, unit in sides]
        spread = [part.deviation / unit for (part, _), unit in zip(sides, self.units, strict=True)]
        kept = [max(int((s > np.float32(_NEGLIGIBLE)).sum()), 1) for s in spread]
        self.bases = [np.ascontiguousarray(part.basis[:, :k]) for (part, _), k in zip(sides, kept, strict=True)]
        sizes = np.concatenate([s[:k] for s, k in zip(spread, kept, strict=True)])
        self.shifts = np.zeros(len(sizes), np.int32)
        while (large := sizes > table.sizes[-1]).any():  # halving is exact, so both sides agree
            sizes = np.where(large, sizes * np.float32(0.5), sizes)
            self.shifts += large
        middles = (table.sizes[1:] + table.sizes[:-1]) * np.float32(0.5)
        self.tables = np.searchsorted(middles, sizes).astype(np.int64)
        self.reach = np.array([int((row[127:ESCAPE] > 0).sum()) - 1 for row in table.frequencies])[self.tables]
        self._shifted = np.flatnonzero(self.shifts)

    def low_bytes(self, lanes: int) -> int:
        """Bytes of the low bits of all components."""
        return -(-int(self.shifts.sum()) * lanes // 8)

    def pack_low(self, whole: Any) -> Bytes:
        """The low bits of *whole* ``int32 [components, lanes]``, component by component."""
        bits = [((whole[i] >> b) & 1).astype(np.uint8) for i in self._shifted for b in range(self.shifts[i])]
        return np.packbits(np.concatenate(bits)) if bits else np.empty(0, np.uint8)

    def add_low(self, whole: Any, packed: Bytes) -> None:
        """Put the bits that :meth:`pack_low` gave back."""
        lanes = whole.shape[1]
        bits = np.unpackbits(packed)[: int(self.shifts.sum()) * lanes].reshape(-1, lanes)
        at = 0
        for i in self._shifted.tolist():
            for b in range(int(self.shifts[i])):
                whole[i] |= bits[at].astype(np.int32) << b
                at += 1
