"""What has been computed before, stored or not any more: a bounded memory of keys, for counting only."""

from __future__ import annotations

import threading

import numpy as np

from .table import KeyRing, Keys

PER_BLOCK = 4
"""Keys remembered for each block that there is room for."""
LEAST, MOST = 1 << 14, 1 << 21


class Seen:
    """Remembers at least the last *capacity* ``// 2`` different keys, exactly; thread-safe.

    One that is seen again moves to the front only when it has grown old, since most are seen twice within a request:
    when they are asked for and when they are saved.

    Parameters
    ----------
    blocks:
        Blocks that all tiers have room for.
    least:
        Places that there are at least.
    """

    def __init__(self, blocks: int, least: int = LEAST) -> None:
        self.capacity = min(max(PER_BLOCK * blocks, least), MOST)
        self._lock = threading.Lock()
        self._empty()

    def _empty(self) -> None:
        self._ring = KeyRing(self.capacity)

    def leading(self, keys: Keys) -> int:
        """How many leading *keys* ``[n, 2]`` of a chain were seen before; all of them are from now on.

        A key stands for all the tokens before it, so whoever has seen it has seen those before it in the chain.
        """
        with self._lock:
            known = np.flatnonzero(self._ring.note(keys) >= 0)
        return int(known[-1]) + 1 if len(known) else 0

    def add(self, keys: Keys) -> None:
        """Remember *keys* ``[n, 2]`` of a chain."""
        with self._lock:
            self._ring.note(keys)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._empty()
