"""The contract of eviction policies: they see events about numbered rows and say who leaves.

A policy never sees tokens, keys it does not ask for, bytes or a clock of its own.  The index owns the tree: it tells a
policy which rows can leave (`on_evictable`), because a row that is leased, or has children in its tier, cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, ConfigError

Rows = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]
Unlink = Callable[[int], int]
"""Takes a row out of the tree; returns its parent if that can leave now, else -1.

That of an index has an attribute ``columns``, a :class:`TreeColumns`, so that a compiled loop can do the same itself.
"""


class TreeColumns(NamedTuple):
    """The index's columns about rows, for loops that take rows out of the tree by themselves.

    Taking out a leaf lowers ``children`` of its parent, if it has one (not below 0) by one.  A row can leave when its
    state is 2, and it has no children and no pins.
    """

    parent: Rows
    children: Rows
    pins: Rows
    state: npt.NDArray[np.uint8]


_NOTHING: Rows = np.empty(0, np.int32)
NO_TREE = TreeColumns(_NOTHING, _NOTHING, _NOTHING, np.empty(0, np.uint8))


def columns_of(unlink: Unlink) -> TreeColumns | None:
    """The columns that *unlink* works on, where it has them."""
    columns: TreeColumns | None = getattr(unlink, "columns", None)
    return columns


Importance = Callable[[npt.NDArray[np.uint32], str | None], Any]
"""``importance(tokens, text)``: 0 to 1 for each block of *tokens* ``[blocks, block_tokens]``, or one for all."""

ReuseHint = Literal["unknown", "returns", "ended", "tool_pending"]
REUSE_HINTS: tuple[str, ...] = get_args(ReuseHint)

Target = Literal["gpu", "cpu", "disk", "session"]
Action = Literal["evict", "swap_to_cpu", "swap_to_disk", "compress"]
TARGETS: tuple[str, ...] = get_args(Target)
ACTIONS: tuple[str, ...] = get_args(Action)


class RequestHint(msgspec.Struct, frozen=True):
    """What is known of a request, by its caller and by the index."""

    reuse: ReuseHint = "unknown"
    """Whether its session will return."""
    total_blocks: int = 0
    """Blocks of its chain; 0: not known."""
    first_block: int = 0
    """Where in the chain the first of the rows or keys that come with this hint lies."""
    tip: int = -1
    """Row that the first of the rows hangs from; -1: none."""
    session: str = ""
    """Session that it belongs to; empty: none."""
    output_tokens: int = 0
    """Tokens that it generated; 0: not known (yet)."""
    importance: Any = None
    """How important the blocks of its chain are, 0 to 1: one number, or one for each block; None: not known."""

    def __post_init__(self) -> None:
        if self.reuse not in REUSE_HINTS:
            raise ConfigError(f"reuse_hint={self.reuse!r} is not known; use one of {', '.join(REUSE_HINTS)}")


NO_HINT = RequestHint()


def _at_once(job: Callable[[], None]) -> bool:
    job()
    return True


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


class EvictionPolicy(ABC):
    """Base of every eviction policy.

    An instance given to a manager is a description; each tier works on its own :meth:`clone`, bound to the number of
    its rows.  A subclass implements :meth:`bind`, :meth:`on_request`, :meth:`on_evictable` and :meth:`next_victim`.

    Parameters
    ----------
    max_size_gb:
        Cap in GiB on what the manager keeps; the smaller of this and the backend's size wins.
    target:
        Where the policy decides: in levels of the kind ``"gpu"``, ``"cpu"`` or ``"disk"``; None: in all of them.
        ``"session"``: in all of them, about whole sessions.
    action:
        What happens to what it chooses: ``"evict"``: it leaves the level; ``"swap_to_cpu"``, ``"swap_to_disk"``: it is
        copied there before it leaves; ``"compress"``: it is encoded, and leaves only if that does not help.
    """

    name: ClassVar[str] = ""
    scorer: Importance | None = None
    """Where the policy wants importance: what to ask for it, when the caller of a save does not give it."""
    bytes_per_row: int = 0
    """Bytes of books that a row costs beyond the 60 that the index's budget has for a policy."""

    def __init__(
        self, max_size_gb: float | None = None, *, target: Target | None = None, action: Action = "evict"
    ) -> None:
        if max_size_gb is not None and not _is_size(max_size_gb):
            raise CapacityError(f"{type(self).__name__}(max_size_gb={max_size_gb!r}): give a size in GiB above 0")
        if target is not None and target not in TARGETS:
            raise ConfigError(f"{type(self).__name__}(target={target!r}): use one of {', '.join(TARGETS)}")
        if action not in ACTIONS:
            raise ConfigError(f"{type(self).__name__}(action={action!r}): use one of {', '.join(ACTIONS)}")
        self.max_size_gb = max_size_gb
        self.target: str | None = target
        self.action: str = action
        self.defer: Callable[[Callable[[], None]], bool] = _at_once

    def use_worker(self, defer: Callable[[Callable[[], None]], bool]) -> None:
        """Have work that needs no lock of the index done by *defer*, which returns False for what it does not take."""
        self.defer = defer

    def options(self) -> dict[str, Any]:
        """The constructor arguments that make an equal description."""
        given: dict[str, Any] = {}
        if self.max_size_gb is not None:
            given["max_size_gb"] = self.max_size_gb
        if self.target is not None:
            given["target"] = self.target
        if self.action != "evict":
            given["action"] = self.action
        return given

    def clone(self) -> EvictionPolicy:
        """A fresh, unbound policy of the same description."""
        return type(self)(**self.options())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.options().items())})"

    @abstractmethod
    def bind(self, rows: int, keys: Keys) -> None:
        """Allocate what is needed for row numbers 0 to *rows* - 1, forgetting everything.

        *keys* ``[rows, 2]`` is the index's column of keys, to be read only: the key of a row is there from before the
        policy hears of the row until after it has left, so that what left can be remembered by key.
        """

    @abstractmethod
    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        """A request used *rows*, in the order of its chain: the first *hit_len* were hits, the rest are new."""

    def restore(self, rows: Rows) -> None:
        """*rows* were there before this process; the oldest first."""
        for position in range(len(rows)):
            self.on_request(float(position - len(rows)), rows[position : position + 1], 0, NO_HINT)

    def on_finish(self, rows: Rows, output_tokens: int) -> None:  # noqa: B027  most policies do not use it
        """The request that used *rows* has ended after generating *output_tokens*."""

    @abstractmethod
    def on_evictable(self, row: int, evictable: bool) -> None:
        """*row* can leave from now on, or cannot any more."""

    def admit(self, now: float, keys: Keys, hint: RequestHint) -> int:
        """How many of the new blocks of *keys* ``[n, 2]``, from the first, are worth evicting others for."""
        return len(keys)

    def make_room(self, now: float, keys: Keys, hint: RequestHint, unlink: Unlink) -> tuple[int, list[int]]:
        """How many of the new blocks of *keys* are admitted, and the victims that leave for them.

        A policy that weighs each new block against the victim that it would replace overrides this; the others say
        first how many they :meth:`admit`.
        """
        admitted = self.admit(now, keys, hint)
        return admitted, self.victims(admitted, unlink) if admitted else []

    @abstractmethod
    def next_victim(self) -> int:
        """Take the row that should leave first out of the queue and return it; -1 when none can leave."""

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        """Up to *count* rows in the order in which they leave, children before parents.

        *unlink* takes each out of the tree at once, so that its parent can be the next.
        """
        leaving: list[int] = []
        while len(leaving) < count:
            row = self.next_victim()
            if row < 0:
                break
            leaving.append(row)
            parent = unlink(row)
            if parent >= 0:
                self.on_evictable(parent, True)
            self._has_left(row, parent)
        return leaving

    def _has_left(self, row: int, parent: int) -> None:  # noqa: B027  a hook that most need not have
        """*row* is gone; *parent* can leave now, or is -1: for policies that follow a branch."""

    def swap_victims(self, count: int, unlink: Unlink) -> list[int]:
        """As :meth:`victims`, for moving rows down ahead of need; more than *count* where rows move together."""
        return self.victims(count, unlink)

    def overdue(self, now: float) -> int:
        """How many rows should leave although there is room for them."""
        return 0

    def forget(self, row: int) -> None:
        """*row* was dropped for another reason than this policy's choice, and its number may be used again."""
        self.on_evictable(row, False)
