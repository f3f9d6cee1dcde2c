"""Named ranges in the timeline of NVIDIA's profilers, where CUDA is."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Ranges(Protocol):
    """What opens and closes a range."""

    def range_push(self, name: str) -> Any:
        """A range begins in this thread."""

    def range_pop(self) -> Any:
        """The innermost one ends."""


def find_ranges() -> Ranges | None:
    """NVTX of torch where it uses CUDA; None elsewhere, and where torch was not imported: no engine is there then."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    found: Ranges = torch.cuda.nvtx
    return found
