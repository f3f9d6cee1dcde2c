"""What the calibrated codecs share: from tiles to principal components of groups of layers and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..block.spec import BlockSpec
from ..errors import ConfigError
from . import calibration
from .calibration import Calibration, Part, as_rows, from_rows, rotate, rotation
from .lossy import LossyCodec
from .values import Floats


class SpectralCodec(LossyCodec):
    """A codec over principal components.

    Parameters
    ----------
    table:
        File that ``kvcache-factory calibrate`` has made.
    """

    def __init__(self, *, table: str | os.PathLike[str] | None = None, max_rel_error: float | None = None) -> None:
        super().__init__(max_rel_error=max_rel_error)
        if table is not None and not isinstance(table, (str, os.PathLike)):
            raise ConfigError(f"codec {self.name}: table={table!r} must be the path of a calibration")
        self.table = os.fspath(table) if table is not None else None
        self._calibration: Calibration | None = None

    def options(self) -> dict[str, Any]:
        return {**super().options(), **({} if self.table is None else {"table": self.table})}

    def open(self, spec: BlockSpec) -> None:
        super().open(spec)
        if self.table is None:
            raise ConfigError(
                f"codec {self.name} needs a calibration of the model: make one with `kvcache-factory calibrate`, and "
                f"give its path as table="
            )
        found = calibration.load(Path(self.table))
        found.check(spec, self.table)
        self._calibration = found

    def close(self) -> None:
        self._calibration = None

    @property
    def calibration(self) -> Calibration:
        """The table; the codec must be open."""
        assert self._calibration is not None, f"codec {self.name} is not open"
        return self._calibration

    def _rows(self, values: Floats, position: int) -> list[tuple[int, Part, Floats]]:
        """For each group of keys (0) and values (1): its components' part, and its elements, centred, by token."""
        cosines, sines = rotation(self.calibration.turns, position, values.shape[3])
        keys = rotate(values[:, 0], cosines, -sines)
        sides = ((0, keys, self.calibration.keys), (1, values[:, 1], self.calibration.values))
        return [(c, part, as_rows(side[part.layers]) - part.mean) for c, side, parts in sides for part in parts]

    def _tiles(self, rows: list[Floats], position: int) -> Floats:
        """The inverse of :meth:`_rows`, from centred elements in the same order."""
        spec = self.spec
        out = np.empty((spec.num_layers, 2, spec.num_kv_heads, spec.block_tokens, spec.head_dim), np.float32)
        parts = [(0, p) for p in self.calibration.keys] + [(1, p) for p in self.calibration.values]
        for (c, part), row in zip(parts, rows, strict=True):
            out[part.layers, c] = from_rows(row + part.mean, spec.num_kv_heads, spec.head_dim)
        cosines, sines = rotation(self.calibration.turns, position, spec.block_tokens)
        out[:, 0] = rotate(out[:, 0], cosines, sines)
        return out
