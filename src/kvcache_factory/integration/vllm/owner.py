"""The manager behind an engine: handed over by this process, or made from settings and owned."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Any

from ...config import dump_config
from ...errors import ConfigError
from ...manager import CacheManager
from .settings import Settings

_NUMBERS = itertools.count(1)
_HANDED_OVER: weakref.WeakValueDictionary[int, CacheManager] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class Owner:
    """A manager, and whether it ends with the engine."""

    def __init__(self, manager: CacheManager, owned: bool) -> None:
        self.manager = manager
        self._owned = owned

    def close(self) -> None:
        """Close the manager if it was made for the engine: its background copies are finished first."""
        if self._owned:
            self.manager.close()


def hand_over(manager: CacheManager) -> int:
    """A number under which an engine in this process finds *manager*."""
    with _LOCK:
        for number, known in _HANDED_OVER.items():
            if known is manager:
                return number
        number = next(_NUMBERS)
        _HANDED_OVER[number] = manager
        return number


def open_manager(settings: Settings, parallel_config: Any) -> Owner:
    """The manager that *settings* name.  Raises ConfigError when it cannot be reached from here."""
    if settings.attached and settings.attached_pid == os.getpid():
        manager = _HANDED_OVER.get(settings.attached)
        if manager is None:
            raise ConfigError("the manager of this engine is gone; keep a reference to it while the engine lives")
        return Owner(manager, owned=False)
    in_process = parallel_config.distributed_executor_backend == "uni" and parallel_config.world_size == 1
    config = settings.manager_config(shared=not in_process)
    return Owner(CacheManager.from_config(dump_config(config)), owned=True)
