"""What goes into an index and what comes out of it."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from .table import Keys, Rows
from .tree import NO_KEYS

NOT_ADMITTED = "not_admitted"
"""Why blocks are not stored that the tier's policy finds worth less than whatever would have to leave for them."""


class Chain(Protocol):
    """What the index needs of a chain of blocks: keys, records, and a place to remember rows by index."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def token_blocks(self) -> npt.NDArray[np.uint32]: ...
    @property
    def extras(self) -> Keys: ...
    @property
    def memo(self) -> dict[int, Any]: ...


class StoredRecords(Protocol):
    """What names blocks outside: their keys and records, and whose they are."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def identity_digest(self) -> bytes: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def token_blocks(self) -> npt.NDArray[np.uint32]: ...
    @property
    def extras(self) -> Keys: ...


class StoredChain(msgspec.Struct, frozen=True):
    """A chain as another tier holds it: its keys and records, and the *rows* and root it has there."""

    root: int
    root_key: bytes
    identity_digest: bytes
    rows: Rows
    keys: Keys
    token_blocks: npt.NDArray[np.uint32]
    extras: Keys
    fidelity: npt.NDArray[np.uint8]
    layout: npt.NDArray[np.uint8]
    codings: npt.NDArray[np.uint8]
    memo: dict[int, Any]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.rows)

    @property
    def parents(self) -> Keys:
        """Keys ``[n, 2]`` of the blocks before each, the root key first."""
        return np.concatenate((np.frombuffer(self.root_key, np.uint64)[None], self.keys))[:-1]

    def leading(self, blocks: int) -> StoredChain:
        """The first *blocks* blocks."""
        names = ("rows", "keys", "token_blocks", "extras", "fidelity", "layout", "codings")
        return replace(self, memo={}, **{name: getattr(self, name)[:blocks] for name in names})


def runs(values: npt.NDArray[Any]) -> list[tuple[int, int, Any]]:
    """Where neighbours of equal value begin and end, and the value."""
    if not len(values):
        return []
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [(first, last, values[first].item()) for first, last in itertools.pairwise(cuts)]


def leading(good: npt.NDArray[np.bool_]) -> int:
    """How many values are true before the first that is not."""
    return int(good.argmin()) if not good.all() else len(good)


class Found(msgspec.Struct, frozen=True):
    """A verified leading run: its *rows*, and why it ended before the chain did."""

    rows: Rows
    reason: str


class Reservation(msgspec.Struct, frozen=True):
    """Rows that an operation owns until it commits or aborts them.

    *first* is the number in the chain of the first reserved block; *wanted* counts the blocks that were missing, so
    that ``wanted > len(rows)`` tells a shortened run, for the *reason* given.
    """

    rows: Rows
    first: int
    wanted: int
    evicted: Keys = NO_KEYS
    replaced: int = 0
    reason: str = ""
