"""What all lossy codecs share: a declared bound that every block is held to, and parameters that say so."""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import Any

from ..block.spec import BlockSpec, KVDtype, Layout
from ..errors import ConfigError
from .base import BOUND_EXCEEDED, NOT_FINITE, BlockCodec, Bytes, Encoded
from .values import Floats, is_finite, max_rel_error, narrow, rounded, widen

LOSSY_PARAMS = struct.Struct("<H 2x f f")  # version of the encoding, declared bound, measured error
WORD = "codec_params"


class LossyCodec(BlockCodec):
    """A codec over float32 tiles.

    Parameters
    ----------
    max_rel_error:
        Declared bound: the largest error of an element, in units of the largest magnitude in its plane (layer, K or
        V).  Each block is decoded again when it is encoded; one that exceeds the bound stays as it is.
    """

    version = 1
    default_max_rel_error = 0.1

    def __init__(self, *, max_rel_error: float | None = None) -> None:
        bound = self.default_max_rel_error if max_rel_error is None else max_rel_error
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not 0 < bound <= 1:
            raise ConfigError(f"codec {self.name}: max_rel_error={bound!r} must be above 0 and at most 1")
        self.max_rel_error = float(bound)
        self._spec: BlockSpec | None = None

    def options(self) -> dict[str, Any]:
        return {} if self.max_rel_error == self.default_max_rel_error else {"max_rel_error": self.max_rel_error}

    def open(self, spec: BlockSpec) -> None:
        if spec.dtype in (KVDtype.FP8_E4M3, KVDtype.FP8_E5M2):
            raise ConfigError(f"codec {self.name}: KV of {spec.dtype.value} is small already; use 'raw'")
        self._spec = spec

    @property
    def spec(self) -> BlockSpec:
        """The geometry it is open for."""
        assert self._spec is not None, f"codec {self.name} is not open"
        return self._spec

    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        values = widen(payload, self.spec, layout)
        if not is_finite(values):
            return NOT_FINITE
        made = self._encode(values, position)
        if isinstance(made, str):
            return made
        data, own = made
        found = self._decode(data, own)
        assert not isinstance(found, str), f"codec {self.name} cannot read what it has written: {found}"
        return self._bounded(data, own, max_rel_error(values, rounded(found, self.spec)))

    def _bounded(self, data: Bytes, own: bytes, error: float) -> Encoded | str:
        """The result, where its *error* is within the declared bound (NaN is not)."""
        if not error <= self.max_rel_error:
            return BOUND_EXCEEDED
        return Encoded(data, LOSSY_PARAMS.pack(self.version, self.max_rel_error, error) + own, error)

    def decode(self, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        own = self._own_params(params)
        if own is None:
            return WORD
        found = self._decode(data, own)
        if isinstance(found, str):
            return found
        narrow(found, self.spec, layout, out)
        return None

    def _own_params(self, params: bytes) -> bytes | None:
        """Parameters of the method itself; None where they are of another version."""
        if len(params) < LOSSY_PARAMS.size or LOSSY_PARAMS.unpack_from(params)[0] != self.version:
            return None
        return params[LOSSY_PARAMS.size :]

    @abstractmethod
    def _encode(self, values: Floats, position: int) -> tuple[Bytes, bytes] | str:
        """Bytes and parameters of the method for finite tiles ``[layers, 2, heads, tokens, head_dim]``."""

    @abstractmethod
    def _decode(self, data: Bytes, own: bytes) -> Floats | str:
        """The tiles again; one word where the bytes cannot be such."""


def own_params(params: bytes) -> bytes:
    """The parameters of the method itself, behind those that all lossy codecs have."""
    return params[LOSSY_PARAMS.size :]


def measured_error(params: bytes) -> tuple[float, float] | None:
    """Declared bound and measured error of a block that a lossy codec has encoded, from its parameters."""
    return LOSSY_PARAMS.unpack_from(params)[1:3] if len(params) >= LOSSY_PARAMS.size else None
