"""What has been computed before, stored or not any more: a bounded memory of keys, for counting only."""

from __future__ import annotations

import numpy as np

from .table import Keys

PER_BLOCK = 4
"""Keys remembered for each block that there is room for."""
LEAST, MOST = 1 << 12, 1 << 22


class Seen:
    """Remembers keys in a table of 8 bytes each; a newer key may take the place of an older one.

    Two keys are taken for the same with probability 2**-64: figures depend on it, blocks never do.

    Parameters
    ----------
    blocks:
        Blocks that all tiers have room for.
    """

    def __init__(self, blocks: int) -> None:
        size = min(max(PER_BLOCK * blocks, LEAST), MOST)
        self._mask = np.uint64((1 << (size - 1).bit_length()) - 1)
        self._tags = np.zeros(int(self._mask) + 1, np.uint64)

    def leading(self, keys: Keys) -> int:
        """How many leading *keys* ``[n, 2]`` were seen before; all of them are from now on."""
        places, tags = keys[:, 0] & self._mask, keys[:, 1]
        known = self._tags[places] == tags
        self._tags[places] = tags
        return len(keys) if known.all() else int(known.argmin())

    def add(self, keys: Keys) -> None:
        """Remember *keys* ``[n, 2]``."""
        self._tags[keys[:, 0] & self._mask] = keys[:, 1]

    def clear(self) -> None:
        """Forget everything."""
        self._tags.fill(0)
