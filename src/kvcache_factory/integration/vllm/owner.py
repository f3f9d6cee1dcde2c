"""The manager behind an engine: handed over by this process, or made from settings and owned."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from typing import Any

import msgspec

from ...config import ManagerConfig, dump_config
from ...errors import ConfigError, SessionError
from ...manager import CacheManager
from .settings import Settings

_NUMBERS = itertools.count(1)
_HANDED_OVER: weakref.WeakValueDictionary[int, CacheManager] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()

MAX_SESSIONS = 4096
"""Sessions that requests bring up by naming them; of more, the one whose last request is oldest is let go."""


class Owner:
    """A manager, and whether it ends with the engine."""

    def __init__(self, manager: CacheManager, owned: bool, made_from: ManagerConfig | None = None) -> None:
        self.manager = manager
        self.made_from = made_from
        self._owned = owned
        self._sessions: OrderedDict[str, None] = OrderedDict()

    def know(self, session_id: str) -> int:
        """Account the blocks of this session, which the process that made it may have elsewhere.

        Returns how many others are let go for it: their blocks stay, charged to nobody.  Sessions of a manager that was
        handed over are its owner's to make.
        """
        if not self._owned:
            return 0
        if not self.manager.has_session(session_id):
            self.create(session_id, {})
        self._sessions[session_id] = None
        self._sessions.move_to_end(session_id)
        let_go = 0
        while len(self._sessions) > MAX_SESSIONS:
            oldest, _ = self._sessions.popitem(last=False)
            let_go += self.manager.dismiss_session(oldest)
        return let_go

    def create(self, session_id: str, options: dict[str, Any]) -> bool:
        """A session that the process which attached has made, under the same rules; False when it is here already."""
        with contextlib.suppress(SessionError):
            self.manager.create_session(session_id, **options)
            return True
        return False

    def fork(self, source_id: str, session_id: str, options: dict[str, Any] | None) -> bool:
        """A fork that the process which attached has made; False when it is here already."""
        with contextlib.suppress(SessionError):
            self.manager.fork_session(source_id, session_id, **(options or {}))
            return True
        return False

    def forget(self, session_id: str, purge: bool = False) -> bool:
        """End a session that :meth:`know` made."""
        self._sessions.pop(session_id, None)
        return self.manager.destroy_session(session_id, purge)

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
    if settings.control:  # the process that steers this one serves the figures of both
        config = msgspec.structs.replace(config, metrics_port=None)
    return Owner(CacheManager.from_config(dump_config(config)), owned=True, made_from=settings.manager)
