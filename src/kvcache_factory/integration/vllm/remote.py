"""What the process that attached a manager may ask of the connector in the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ...config import parse_config
from ...errors import ConfigError, UnknownSessionError

if TYPE_CHECKING:
    from ...policy.base import ReuseHint
    from .connector import KVCacheFactoryConnector
    from .settings import Settings


def handlers(connector: KVCacheFactoryConnector, settings: Settings) -> dict[str, Callable[..., Any]]:
    """The verbs of the control socket."""

    def attach(config: dict[str, Any]) -> bool:
        if connector.awake:
            if connector.scheduler.owner.made_from != parse_config(config):
                raise ConfigError("this engine has a manager already; attach the one that it was made with")
            return False
        connector.wake(msgspec.structs.replace(settings, manager=parse_config(config), sleeping=False))
        return True

    def clear_session(session_id: str) -> int:
        try:
            return connector.scheduler.owner.manager.clear_session(session_id)
        except UnknownSessionError:  # it never sent a request
            return 0

    def destroy_session(session_id: str, purge: bool) -> bool:
        return connector.scheduler.owner.forget(session_id, purge)

    def create_session(session_id: str, options: dict[str, Any]) -> bool:
        return connector.scheduler.owner.create(session_id, options)

    def fork_session(source_id: str, session_id: str, options: dict[str, Any] | None) -> bool:
        connector.scheduler.owner.know(source_id)
        return connector.scheduler.owner.fork(source_id, session_id, options)

    def pin_session(session_id: str, pinned: bool) -> None:
        connector.scheduler.owner.know(session_id)
        connector.scheduler.owner.manager.pin_session(session_id, pinned)

    def session_hint(session_id: str, said: ReuseHint) -> None:
        connector.scheduler.owner.know(session_id)
        connector.scheduler.owner.manager.session(session_id).reuse_hint = said

    def session_stats(session_id: str) -> dict[str, Any] | None:
        manager = connector.scheduler.owner.manager
        return manager.session(session_id).stats() if manager.has_session(session_id) else None

    def session_idle_s(session_id: str) -> float | None:
        manager = connector.scheduler.owner.manager
        return manager.session(session_id).idle_s if manager.has_session(session_id) else None

    return {
        "attach": attach,
        "create_session": create_session,
        "fork_session": fork_session,
        "pin_session": pin_session,
        "session_hint": session_hint,
        "session_stats": session_stats,
        "session_idle_s": session_idle_s,
        "clear_session": clear_session,
        "destroy_session": destroy_session,
        "state": lambda: connector.scheduler.owner.manager.state(),
        "evict": lambda blocks, tier=None: connector.scheduler.owner.manager.evict(blocks, tier),
        "drop_tier": lambda tier: connector.scheduler.owner.manager.drop_tier(tier),
        "bypass": lambda on: connector.scheduler.owner.manager.bypass(on),
        "wait": lambda timeout=None: connector.scheduler.owner.manager.wait(timeout),
        "check": lambda: connector.scheduler.owner.manager.check(),
        "reset": lambda: connector.scheduler.owner.manager.reset(),
    }
