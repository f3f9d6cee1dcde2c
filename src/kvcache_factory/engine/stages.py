"""Where the time of an operation goes: its stages, in the ledger and as ranges of NVIDIA's profilers."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from ..memory.ranges import Ranges
from .ledger import Ledger

_NOTHING: AbstractContextManager[None] = nullcontext()


class Stages:
    """Measures stages, if that is wanted; costs a call where it is not.

    Attributes:
        ranges: what shows stages in a profiler's timeline, or None.
    """

    def __init__(self, ledger: Ledger, wanted: bool) -> None:
        self._ledger = ledger
        self.wanted = wanted
        self.ranges: Ranges | None = None

    def __call__(self, tier: str, stage: str) -> AbstractContextManager[None]:
        """What is inside is a *stage* in *tier*."""
        return _Stage(self, tier, stage) if self.wanted else _NOTHING

    def note(self, tier: str, stage: str, seconds: float) -> None:
        """A *stage* took so many *seconds*."""
        self._ledger.observe(tier, stage, seconds)


class _Stage:
    """One stage that is going on."""

    __slots__ = ("_begun", "_ranges", "_stage", "_stages", "_tier")

    def __init__(self, stages: Stages, tier: str, stage: str) -> None:
        self._stages, self._tier, self._stage = stages, tier, stage
        self._ranges = stages.ranges

    def __enter__(self) -> None:
        if self._ranges is not None:
            self._ranges.range_push(f"kvcache-factory {self._stage}")
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stages.note(self._tier, self._stage, time.perf_counter() - self._begun)
        if self._ranges is not None:
            self._ranges.range_pop()
