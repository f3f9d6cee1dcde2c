"""What the process that attached a manager may ask of the connector in the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ...config import parse_config
from ...errors import ConfigError, UnknownSessionError

if TYPE_CHECKING:
    from ...manager import CacheManager
    from ...policy.base import ReuseHint
    from .connector import KVCacheFactoryConnector
    from .owner import Owner
    from .settings import Settings


AS_THEY_ARE = ("state", "evict", "drop_tier", "bypass", "wait", "check", "reset")
"""Verbs that the manager has under the same name, with the same arguments."""


class Verbs:
    """The verbs of the control socket that mean something else here than in the manager."""

    def __init__(self, connector: KVCacheFactoryConnector, settings: Settings) -> None:
        self._connector = connector
        self._settings = settings

    @property
    def owner(self) -> Owner:
        """Who has the manager; it is there once the connector is awake."""
        return self._connector.scheduler.owner

    @property
    def manager(self) -> CacheManager:
        """The manager of this process."""
        return self.owner.manager

    def attach(self, config: dict[str, Any]) -> bool:
        """Wake the connector with this configuration; False when it is awake and has the same."""
        if self._connector.awake:
            if self.owner.made_from != parse_config(config):
                raise ConfigError("this engine has a manager already; attach the one that it was made with")
            return False
        self._connector.wake(msgspec.structs.replace(self._settings, manager=parse_config(config), sleeping=False))
        return True

    def clear_session(self, session_id: str) -> int:
        """Blocks that were dropped; none for a session that never sent a request."""
        try:
            return self.manager.clear_session(session_id)
        except UnknownSessionError:
            return 0

    def destroy_session(self, session_id: str, purge: bool) -> bool:
        """Whether there was such a session."""
        return self.owner.forget(session_id, purge)

    def create_session(self, session_id: str, options: dict[str, Any]) -> bool:
        """Whether it is new here."""
        return self.owner.create(session_id, options)

    def fork_session(self, source_id: str, session_id: str, options: dict[str, Any] | None) -> bool:
        """Whether the fork is new here; its source need not have sent a request."""
        self.owner.know(source_id)
        return self.owner.fork(source_id, session_id, options)

    def pin_session(self, session_id: str, pinned: bool) -> None:
        """As the manager does, of a session that need not have sent a request."""
        self.owner.know(session_id)
        self.manager.pin_session(session_id, pinned)

    def session_hint(self, session_id: str, said: ReuseHint) -> None:
        """What is said of the session's return."""
        self.owner.know(session_id)
        self.manager.session(session_id).reuse_hint = said

    def session_stats(self, session_id: str) -> dict[str, Any] | None:
        """None where there is no such session."""
        return self.manager.session(session_id).stats() if self.manager.has_session(session_id) else None

    def session_idle_s(self, session_id: str) -> float | None:
        """None where there is no such session."""
        return self.manager.session(session_id).idle_s if self.manager.has_session(session_id) else None


def handlers(connector: KVCacheFactoryConnector, settings: Settings) -> dict[str, Callable[..., Any]]:
    """The verbs of the control socket, by name."""
    verbs = Verbs(connector, settings)

    def as_it_is(name: str) -> Callable[..., Any]:
        return lambda *args: getattr(verbs.manager, name)(*args)

    own: list[Callable[..., Any]] = [
        verbs.attach,
        verbs.clear_session,
        verbs.destroy_session,
        verbs.create_session,
        verbs.fork_session,
        verbs.pin_session,
        verbs.session_hint,
        verbs.session_stats,
        verbs.session_idle_s,
    ]
    return {verb.__name__: verb for verb in own} | {name: as_it_is(name) for name in AS_THEY_ARE}
