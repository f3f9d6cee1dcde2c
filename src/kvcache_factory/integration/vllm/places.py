"""Where the slots of a manager are, for a worker in the same process or in another one."""

from __future__ import annotations

import itertools
import os
import threading
import weakref

from ...errors import ConfigError
from ...manager import CacheManager
from ...memory.move import AnySlab
from ...memory.shared import SharedSlab
from .plans import SlabPlace

_NUMBERS = itertools.count(1)
_OWNED: weakref.WeakValueDictionary[int, CacheManager] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def announce(manager: CacheManager) -> SlabPlace:
    """Let workers find the slots of *manager*, which must be open."""
    slots = manager.first_slots
    handle = slots.handle if isinstance(slots, SharedSlab) else None
    with _LOCK:
        number = next(_NUMBERS)
        _OWNED[number] = manager
    return SlabPlace(number, os.getpid(), handle, manager.payload_offset)


def reach(place: SlabPlace) -> AnySlab:
    """The slots at *place*: themselves in their own process, a mapping of them elsewhere.

    Raises ConfigError when they are private to another process, or gone.
    """
    if place.pid == os.getpid():
        manager = _OWNED.get(place.number)
        if manager is None:
            raise ConfigError("the manager behind this engine is gone; keep a reference to it while the engine lives")
        return manager.first_slots
    if place.handle is None:
        raise ConfigError(
            "this engine's workers are other processes, which cannot reach the manager's memory; use "
            "CPUBackend(shared=True) as its first level"
        )
    return SharedSlab.attach(place.handle)
