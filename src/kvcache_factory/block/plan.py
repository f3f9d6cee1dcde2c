"""Frozen plans that travel from those who decide (index, policies) to those who move bytes."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]


class Segment(msgspec.Struct, frozen=True):
    """Consecutive blocks of a match that one tier serves: *rows* ``[n]`` hold the blocks from number *first* on."""

    tier: int
    first: int
    rows: Rows


class Match(msgspec.Struct, frozen=True):
    """The leading run of a chain that is stored, held by the lease of *request_id* until it is released.

    Attributes
    ----------
    blocks, tokens:
        Length of the run.
    segments:
        Which tier serves which part, in order.
    reason:
        Why the run is not longer; empty when the whole chain was asked for and found.
    """

    request_id: str
    blocks: int = 0
    tokens: int = 0
    segments: tuple[Segment, ...] = ()
    reason: str = ""
    lease: int = -1
