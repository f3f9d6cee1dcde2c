"""Roots: where the chains of one identity begin.

In an index a root is a negative number in place of a parent's row; below memory it is the key before the first block.
"""

from __future__ import annotations

import threading


class Roots:
    """Numbers for root keys, and the identity behind each; one per manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[bytes, int] = {}
        self._origins: dict[int, tuple[bytes, bytes]] = {}
        self._known: dict[bytes, None] = {}

    def number(self, root_key: bytes, identity_digest: bytes, *, known: bool = False) -> int:
        """The number of a root; -1 means "no parent" and is nobody's.

        *known*: the identity is a registered model's, and overrides what a log has said.
        """
        with self._lock:
            number = self._numbers.setdefault(root_key, -2 - len(self._numbers))
            if known:
                self._known[identity_digest] = None
            if known or number not in self._origins:
                self._origins[number] = root_key, identity_digest
            return number

    def identities(self) -> list[bytes]:
        """Digests of the identities of registered models."""
        with self._lock:
            return list(self._known)

    def origin(self, number: int) -> tuple[bytes, bytes]:
        """Root key and identity digest behind a number."""
        return self._origins[number]
