"""When blocks are encoded, and by which codec."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ConfigError

METHODS = {"raw", "layers", "bf16x", "int8", "fp8", "int4g", "rot4", "pca", "low_rank"}
"""Names of codecs; :func:`kvcache_factory.registry.register_codec` adds to them."""

_LEVELS = ("gpu", "cpu", "disk", "remote")


class CompressionPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Encodes blocks by *method* once enough tokens follow them.

    In memory, a block is encoded where it is, in the background, and takes as much less room as its codec saves; for a
    disk or a remote level it is encoded on its way there.  What a lossy method has touched is served to this manager's
    own requests, and marked for everybody else.
    """

    method: str = "int8"
    """Name of a codec: bf16x (lossless), int8, fp8, int4g, rot4, pca, low_rank, raw for none, or a chain: int8|zstd."""
    threshold_step: int = 50
    """Tokens that must have been appended after a block."""
    options: dict[str, Any] = {}
    """Parameters of the codec, or of the first of a chain."""
    tiers: tuple[str, ...] | None = None
    """Kinds of levels that it is about ("gpu", "cpu", "disk", "remote"); None: all but a remote one."""
    keep_first: int = 1
    """Blocks at the beginning of a chain that stay exact: the first tokens are attention sinks."""
    keep_recent: int = 64
    """Tokens at the end of a chain that stay exact."""
    min_age_s: float = 0.0
    """Seconds since a block was stored or last used; for levels in memory."""
    max_hits: int | None = None
    """Blocks that were hit more often stay exact; None: however hot.  For levels in memory."""

    layers: tuple[int, int] | None = None
    """Layers that are encoded, from the first up to but not including the second; the others stay exact.  None: all."""

    def __post_init__(self) -> None:
        if self.method.partition("|")[0] not in METHODS:
            raise ConfigError(f"CompressionPolicy(method={self.method!r}): use one of {', '.join(sorted(METHODS))}")
        _check("threshold_step", self.threshold_step, int, "steps")
        _check("keep_first", self.keep_first, int, "blocks")
        _check("keep_recent", self.keep_recent, int, "tokens")
        _check("min_age_s", self.min_age_s, (int, float), "seconds")
        if self.max_hits is not None:
            _check("max_hits", self.max_hits, int, "hits")
        if self.layers is not None:
            self._check_layers()
        if self.tiers is not None:
            msgspec.structs.force_setattr(self, "tiers", tuple(self.tiers))
            wrong = [name for name in self.tiers or () if name not in _LEVELS]
            if wrong:
                raise ConfigError(f"CompressionPolicy(tiers={self.tiers!r}): use {', '.join(_LEVELS)}")

    def _check_layers(self) -> None:
        layers = tuple(self.layers or ())
        if len(layers) != 2 or any(type(n) is not int for n in layers) or not 0 <= layers[0] < layers[1]:
            raise ConfigError(f"CompressionPolicy(layers={self.layers!r}): give two numbers, first and behind the last")
        msgspec.structs.force_setattr(self, "layers", layers)

    def applies_to(self, kind: str) -> bool:
        """Whether it is about levels of *kind*."""
        return self.method != "raw" and (kind != "remote" if self.tiers is None else kind in self.tiers)


def _check(name: str, value: object, kind: type | tuple[type, ...], unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < float("inf"):  # type: ignore[operator]
        raise ConfigError(f"CompressionPolicy({name}={value!r}): give {unit} of at least 0")
