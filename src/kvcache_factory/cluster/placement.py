"""Which member of a cluster a key belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import ConfigError
from .membership import Membership


class SimplePlacement:
    """slot = hash64(key) mod total slots; the member is the owner of the slot.

    hash64 is XXH64 with seed 0, so that every process and every run agrees.
    """

    def __init__(self, membership: Membership) -> None:
        self._owners = membership.owners()

    def owners_of(self, keys: Sequence[bytes]) -> npt.NDArray[np.int32]:
        """The number of the member that each key belongs to, int32 [n]; -1 where nobody owns its slot."""
        total = len(self._owners)
        if not total:
            return np.full(len(keys), -1, np.int32)
        return self._owners[[xxhash.xxh64_intdigest(key) % total for key in keys]]


PLACEMENTS = {"SIMPLE": SimplePlacement}


def placement_class(name: str) -> type[SimplePlacement]:
    """A placement by name; ConfigError when there is none."""
    found = PLACEMENTS.get(name.upper())
    if found is None:
        raise ConfigError(f"there is no placement {name!r}; use {', '.join(PLACEMENTS)}")
    return found
