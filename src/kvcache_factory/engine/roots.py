"""Roots: where the chains of one identity begin.

In an index a root is a negative number in place of a parent's row; below memory it is the key before the first block.
Salts and adapters come and go, so roots that no key space holds and no block stands on are forgotten now and then.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection

MOST_IDLE = 4096
"""Roots at which those that nothing needs are first looked for."""


class Roots:
    """Numbers for root keys, and the identity behind each; one per manager.  A number is never used for another key."""

    def __init__(self, most_idle: int = MOST_IDLE) -> None:
        # A key space may be collected in the middle of anything, and lets go of its root then.
        self._lock = threading.RLock()
        self._numbers: dict[bytes, int] = {}
        self._origins: dict[int, tuple[bytes, bytes]] = {}
        self._known: dict[bytes, None] = {}
        self._asked_at: dict[int, int] = {}
        self._held: Counter[int] = Counter()
        self._next = -2
        self._most_idle = self._look_at = most_idle
        self.asked = 0
        """How often a number was asked for."""

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, root_key: bytes, identity_digest: bytes, *, known: bool = False) -> int:
        """The number of a root; -1 means "no parent" and is nobody's.

        *known*: the identity is a registered model's, and overrides what a log has said.
        """
        with self._lock:
            number = self._numbers.get(root_key)
            if number is None:
                number = self._numbers[root_key] = self._next
                self._next -= 1
            if known:
                self._remember(identity_digest)
            if known or number not in self._origins:
                self._origins[number] = root_key, identity_digest
            self.asked += 1
            self._asked_at[number] = self.asked
            return number

    def _remember(self, identity_digest: bytes) -> None:
        self._known.pop(identity_digest, None)
        self._known[identity_digest] = None
        if len(self._known) > self._most_idle:
            del self._known[next(iter(self._known))]

    def identities(self) -> list[bytes]:
        """Digests of the identities of models that were registered, the latest last and not more than may be idle."""
        with self._lock:
            return list(self._known)

    def origin(self, number: int) -> tuple[bytes, bytes]:
        """Root key and identity digest behind a number."""
        return self._origins[number]

    def hold(self, number: int) -> None:
        """A key space stands on this root, whether or not it has blocks."""
        with self._lock:
            self._held[number] += 1

    def let_go(self, number: int) -> None:
        """That key space is gone."""
        with self._lock:
            self._held[number] -= 1
            if not self._held[number]:
                del self._held[number]

    @property
    def crowded(self) -> bool:
        """Whether it is time for :meth:`forget`."""
        return len(self._numbers) > self._look_at

    def forget(self, used: Collection[int], asked: int) -> int:
        """Forget the roots that no key space holds and no block stands on; returns how many.

        *used*: the numbers that blocks stand on, looked up after *asked* was read; what was asked for since stays.
        """
        with self._lock:
            idle = [
                (key, number)
                for key, number in self._numbers.items()
                if number not in used and number not in self._held and self._asked_at[number] <= asked
            ]
            for key, number in idle:
                del self._numbers[key], self._origins[number], self._asked_at[number]
            self._look_at = max(2 * len(self._numbers), self._most_idle)
            return len(idle)
