"""What the process that attached a manager may ask of the connector in the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ...config import parse_config
from ...errors import ConfigError, UnknownSessionError

if TYPE_CHECKING:
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

    return {
        "attach": attach,
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
