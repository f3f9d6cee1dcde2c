"""``low_rank``: the leading principal components of groups of layers, in bfloat16, and nothing of the others."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from ..errors import ConfigError
from .base import DOES_NOT_PAY, NO_TABLE, Bytes
from .lossy import WORD
from .spectral import SpectralCodec
from .values import Floats, from_bf16, to_bf16

_OWN = struct.Struct("<16s I H")  # table, position, number of ranks; the ranks follow, uint16 each


class LowRank(SpectralCodec):
    """See the module.  Encoded: for each group of keys and then of values, ``uint16 [tokens, rank]``.

    Parameters
    ----------
    rank:
        Share of the components that is kept, above 0 and below 1.
    error:
        Instead of *rank*: keep of each group as many components as bring the relative error (of Euclidean norms) of
        the block down to this.
    """

    name = "low_rank"
    largest_ratio = 8.0
    default_max_rel_error = 1.0

    def __init__(
        self,
        *,
        rank: float | None = None,
        error: float | None = None,
        table: str | os.PathLike[str] | None = None,
        max_rel_error: float | None = None,
    ) -> None:
        super().__init__(table=table, max_rel_error=max_rel_error)
        if rank is not None and error is not None:
            raise ConfigError("codec low_rank: give rank or error, not both")
        rank = 0.25 if rank is None and error is None else rank
        for name, value in (("rank", rank), ("error", error)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, float) or not 0 < value < 1):
                raise ConfigError(f"codec low_rank: {name}={value!r} must be above 0 and below 1")
        self.rank, self.error = rank, error

    def options(self) -> dict[str, Any]:
        mine = {"rank": self.rank, "error": self.error}
        return {**super().options(), **{name: value for name, value in mine.items() if value is not None}}

    def _encode(self, values: Floats, position: int) -> tuple[Bytes, bytes] | str:
        ranks, pieces = [], []
        for _, part, rows in self._rows(values, position):
            components = rows @ part.basis
            rank = self._rank_of(components, rows)
            ranks.append(rank)
            pieces.append(to_bf16(np.ascontiguousarray(components[:, :rank])).reshape(-1))
        data = np.concatenate(pieces).view(np.uint8)
        if len(data) > 0.95 * self.spec.payload_bytes or len(ranks) > 50:
            return DOES_NOT_PAY
        own = _OWN.pack(self.calibration.digest, position, len(ranks)) + struct.pack(f"<{len(ranks)}H", *ranks)
        return data, own

    def _rank_of(self, components: Floats, rows: Floats) -> int:
        width = len(components[0])
        if self.error is None:
            assert self.rank is not None
            return int(max(1, round(self.rank * width)))
        energy = np.cumsum(np.square(components, dtype=np.float64).sum(axis=0))
        wanted = energy[-1] - self.error**2 * float(np.square(rows, dtype=np.float64).sum())
        return min(int(np.searchsorted(energy, wanted)) + 1, width)

    def _decode(self, data: Bytes, own: bytes) -> Floats | str:
        if len(own) < _OWN.size:
            return WORD
        digest, position, count = _OWN.unpack_from(own)
        parts = [*self.calibration.keys, *self.calibration.values]
        if digest != self.calibration.digest:
            return NO_TABLE
        if count != len(parts) or len(own) < _OWN.size + 2 * count:
            return WORD
        ranks = struct.unpack_from(f"<{count}H", own, _OWN.size)
        tokens = self.spec.block_tokens
        if 2 * tokens * sum(ranks) != len(data) or any(r > len(p.mean) for r, p in zip(ranks, parts, strict=True)):
            return WORD
        rows, at = [], 0
        numbers = data.view(np.uint16)
        for part, rank in zip(parts, ranks, strict=True):
            components = from_bf16(numbers[at : at + tokens * rank]).reshape(tokens, rank)
            rows.append(components @ part.basis[:, :rank].T)
            at += tokens * rank
        return self._tiles(rows, position)
