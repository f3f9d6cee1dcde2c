"""Names of compression methods: a manager's configuration can say how blocks will shrink.

This version stores blocks as they are.
"""

from __future__ import annotations

import msgspec

from ..errors import ConfigError

METHODS = ("int8",)


class CompressionPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which blocks to shrink, and how: a description that this version keeps and does not act on.

    A manager that is given one stores blocks exactly as they are, says so once in the log, and reports
    ``"compression": "none"`` in its state.
    """

    method: str = "int8"
    """Registered name."""
    threshold_step: int = 50
    """Blocks that lie more than this many steps back are meant."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"CompressionPolicy(method={self.method!r}): use one of {', '.join(METHODS)}")
        if not isinstance(self.threshold_step, int) or self.threshold_step < 0:
            raise ConfigError(f"CompressionPolicy(threshold_step={self.threshold_step!r}): give steps of at least 0")
