"""A few slots in memory that belong to no tier: for blocks that pass through and are not kept."""

from __future__ import annotations

import threading

import numpy as np

from ..block.spec import BlockSpec
from ..memory.slab import Slab
from .table import Rows

TRANSIT_BYTES = 64 << 20
MIN_SLOTS = 8


class Transit:
    """A pool of slot images, allocated when it is first needed."""

    def __init__(self, spec: BlockSpec, nbytes: int = TRANSIT_BYTES) -> None:
        self.spec = spec
        self._slots = max(nbytes // spec.slot_bytes, MIN_SLOTS)
        self._memory: Slab | None = None
        self._free = list(range(self._slots - 1, -1, -1))
        self._changed = threading.Condition()

    @property
    def memory(self) -> Slab:
        """The slots; :meth:`take` must have been called."""
        assert self._memory is not None
        return self._memory

    def take(self, count: int, *, wait: bool | float = False, least: int = 1) -> Rows:
        """Up to *count* free slots, none when there are none; with *wait*, at least *least*, or what there is after
        that time."""
        with self._changed:
            if self._memory is None:
                self._memory = Slab(self._slots, self.spec.slot_bytes)
            if wait:
                self._changed.wait_for(lambda: len(self._free) >= least, None if wait is True else wait)
            count = min(count, len(self._free))
            return np.array([self._free.pop() for _ in range(count)], np.int32)

    def give_back(self, slots: Rows) -> None:
        """Return slots that :meth:`take` gave."""
        with self._changed:
            self._free.extend(slots.tolist())
            self._changed.notify_all()

    def close(self) -> None:
        """Free the memory."""
        with self._changed:
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
