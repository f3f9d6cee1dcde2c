"""Frozen plans that travel from those who decide (index, policies) to those who move bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .spec import Layout

Rows = npt.NDArray[np.int32]


class Segment(msgspec.Struct, frozen=True):
    """Consecutive blocks of a match that one tier serves: *rows* ``[n]`` hold the blocks from number *first* on."""

    tier: int
    first: int
    rows: Rows


class ChainView(msgspec.Struct, frozen=True):
    """The leading blocks of a chain as they were when it was looked up: keys and records, which never change."""

    root_key: bytes
    identity_digest: bytes
    keys: npt.NDArray[np.uint64]
    token_blocks: npt.NDArray[np.uint32]
    extras: npt.NDArray[np.uint64]
    memo: dict[int, Any]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.keys)

    @property
    def parents(self) -> npt.NDArray[np.uint64]:
        """Keys ``[n, 2]`` of the blocks before each, the root key first."""
        return np.concatenate((np.frombuffer(self.root_key, np.uint64)[None], self.keys))[:-1]


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
    lease, root, chain:
        What loading needs to know.
    """

    request_id: str
    blocks: int = 0
    tokens: int = 0
    segments: tuple[Segment, ...] = ()
    reason: str = ""
    lease: int = -1
    root: int = 0
    chain: ChainView | None = None

    def shortened(self, blocks: int, reason: str) -> Match:
        """The leading *blocks* of it; the lease goes on holding all."""
        if blocks >= self.blocks:
            return self
        cut = [(segment, segment.rows[: blocks - segment.first]) for segment in self.segments if segment.first < blocks]
        return msgspec.structs.replace(
            self,
            blocks=blocks,
            tokens=self.tokens // self.blocks * blocks,
            segments=tuple(msgspec.structs.replace(segment, rows=rows) for segment, rows in cut),
            reason=reason,
        )


class SavePlan(msgspec.Struct, frozen=True):
    """Rows of the first tier that are reserved for blocks *first* .. of a chain, until somebody has filled *slots*."""

    first: int
    rows: Rows
    slots: Rows
    session: str = ""
    """Session that it is for; empty: none."""


class LoadPlan(msgspec.Struct, frozen=True):
    """Slots of the first tier that hold the leading blocks of a match, and the numbers of their layouts ``[n]``."""

    rows: Rows = np.empty(0, np.int32)
    codes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def by_layout(self, first: int = 0) -> Iterator[tuple[Layout, npt.NDArray[np.int64]]]:
        """Each order of bytes among the rows from number *first* on, with the numbers of its rows."""
        codes = self.codes[first:]
        for code in np.unique(codes).tolist():
            yield Layout.of_code(code), first + np.flatnonzero(codes == code)
