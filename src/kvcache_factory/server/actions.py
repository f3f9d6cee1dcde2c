"""What may be done to a manager from outside: a closed list of verbs, each with the arguments that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import ConfigError
from ..manager import CacheManager


class ClearSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="clear_session"):
    """Forget a session's history and the blocks that only it references."""

    session: str

    def run(self, manager: CacheManager) -> Any:
        return manager.clear_session(self.session)


class DestroySession(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="destroy_session"
):
    """End a session; *purge* overwrites its bytes."""

    session: str
    purge: bool = False

    def run(self, manager: CacheManager) -> Any:
        return manager.destroy_session(self.session, self.purge)


class Evict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="evict"):
    """Let blocks leave a tier by policy."""

    blocks: int
    tier: str | None = None

    def run(self, manager: CacheManager) -> Any:
        if self.blocks < 0:
            raise ConfigError(f"blocks={self.blocks}: give a number of blocks")
        return manager.evict(self.blocks, self.tier)


class DropTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="drop_tier"):
    """Drop every block of a tier."""

    tier: str

    def run(self, manager: CacheManager) -> Any:
        return manager.drop_tier(self.tier)


class Reset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="reset"):
    """Drop every block and every session's history."""

    def run(self, manager: CacheManager) -> Any:
        manager.reset()


class Bypass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag="bypass"):
    """Serve nothing, or serve again."""

    on: bool = True

    def run(self, manager: CacheManager) -> Any:
        manager.bypass(self.on)


Action = ClearSession | DestroySession | Evict | DropTier | Reset | Bypass
MAX_BODY = 64 << 10


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request: what to do, to which manager; to the only one where none is named."""

    do: Action
    manager: str | None = None


def carry_out(body: bytes, managers: Callable[[], dict[str, CacheManager]]) -> Any:
    """Do what *body*, the JSON of an :class:`Order`, says; returns its result.  Raises ConfigError, SessionError."""
    try:
        order = msgspec.json.decode(body, type=Order)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"the request is not understood: {error}") from None
    there = managers()
    if order.manager is None and len(there) != 1:
        raise ConfigError(f"name one of the managers: {', '.join(there) or 'there is none'}")
    label = order.manager if order.manager is not None else next(iter(there))
    if label not in there:
        raise ConfigError(f"there is no manager {label!r}; there are {', '.join(there)}")
    return order.do.run(there[label])
