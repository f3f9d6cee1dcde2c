"""One session."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..policy.base import RequestHint, ReuseHint
from .holdings import Group, Quota, References
from .settings import OnQuota, Size, check_labels, check_on_quota, check_size, check_ttl

if TYPE_CHECKING:
    from ..engine.tier import Tier

PRUNE_AT = 4096
"""References of a session at which those to lost blocks are first looked for."""


class SessionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What ``create_session`` may be given; None: as the manager's settings say."""

    quota_gb: Size | None = None
    ttl_s: float | None = None
    labels: dict[str, str] = {}
    pin: bool = False
    on_quota: OnQuota | None = None

    def __post_init__(self) -> None:
        check_size("quota_gb", self.quota_gb)
        check_ttl(self.ttl_s)
        if self.on_quota is not None:
            check_on_quota(self.on_quota)
        msgspec.structs.force_setattr(self, "labels", check_labels(self.labels))


class Session:
    """One conversation, user or job whose blocks are accounted together.

    Attributes
    ----------
    id:
        Name, unique in its manager.
    data:
        Free for adapters: what belongs to the conversation, such as its token ids.  Emptied by ``clear_session``, and
        copied by ``fork_session``: by the value's own ``fork()`` where it has one.
    labels:
        What it is counted under, such as ``{"tenant": "acme"}``.
    pinned:
        Whether its blocks are kept whatever the policy says.
    """

    def __init__(
        self, session_id: str, options: SessionOptions | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        options = options if options is not None else SessionOptions()
        self.id = session_id
        self.data: dict[str, Any] = {}
        self._reuse_hint: ReuseHint = "unknown"
        self.options = options
        self.labels = options.labels
        self.quota = Quota(options.quota_gb)
        self.on_quota: OnQuota = options.on_quota or "evict"
        self.ttl_s = options.ttl_s
        self.pinned = options.pin
        self.created_s = time.time()
        self.requests = 0
        self.asked_tokens = 0
        self.reused_tokens = 0
        self.stored_blocks = 0
        self.refused_blocks = 0
        self.dropped_blocks = 0
        self.held = References()
        self.groups: tuple[Group, ...] = ()
        self.pins: list[tuple[Tier, int]] = []
        self.prune_at = PRUNE_AT
        self.purged: bool | None = None
        """None while the session lives; then whether its blocks were to be overwritten."""
        self.stamp = 0
        self.storing: set[int] = set()
        """Requests whose blocks are charged and not stored yet."""
        self.inside = 0
        """Scopes that are open: such a session is not idle."""
        self._clock = clock
        self._lock = threading.RLock()  # a destructor may end a scope inside
        self.used_at = clock()
        self.measure: Callable[[Session], dict[str, int]] = _nothing
        self.tell: Callable[[Session], None] = _nobody
        """Called when its hint has changed."""

    def __repr__(self) -> str:
        return f"Session({self.id!r}, requests={self.requests}, reused_tokens={self.reused_tokens})"

    @property
    def reuse_hint(self) -> ReuseHint:
        """Whether the session will be back, for policies: ``"unknown"``, ``"returns"``, ``"tool_pending"`` (soon) or
        ``"ended"``.  Holds for the requests of the session that do not say it themselves; ConfigError for other words.
        """
        return self._reuse_hint

    @reuse_hint.setter
    def reuse_hint(self, said: ReuseHint) -> None:
        self._reuse_hint = RequestHint(reuse=said).reuse
        self.tell(self)

    @property
    def idle_s(self) -> float:
        """Seconds since it was last used; 0 inside of ``use_session``."""
        return 0.0 if self.inside else self._clock() - self.used_at

    def touch(self) -> None:
        """It is in use."""
        self.used_at = self._clock()

    def enter(self) -> None:
        """A scope begins; until it has ended, the session is not idle."""
        with self._lock:
            self.inside += 1

    def leave(self) -> None:
        """A scope ends."""
        with self._lock:
            self.inside -= 1
        self.touch()

    def stats(self) -> dict[str, Any]:
        """Its figures as plain data: what it holds in each tier in bytes, what was asked and reused, its rules.

        A block that several sessions reference is in the figures of each.  *dropped_blocks* are references that it gave
        up at a quota, *refused_blocks* what was not stored or not charged because of one.
        """
        held = self.measure(self)
        quotas = {tier: size for tier in held if (size := self.quota.bytes_in(tier)) is not None}
        return {
            "session": self.id,
            "labels": dict(self.labels),
            "blocks": len(self.held),
            "bytes": sum(held.values()),
            "tier_bytes": held,
            "quota_bytes": sum(quotas.values()) if quotas else None,
            "tier_quota_bytes": quotas,
            "on_quota": self.on_quota,
            "pinned": self.pinned,
            "ttl_s": self.ttl_s,
            "idle_s": round(self.idle_s, 3),
            "age_s": round(time.time() - self.created_s, 3),
            "requests": self.requests,
            "asked_tokens": self.asked_tokens,
            "reused_tokens": self.reused_tokens,
            "stored_blocks": self.stored_blocks,
            "refused_blocks": self.refused_blocks,
            "dropped_blocks": self.dropped_blocks,
        }


def forked(data: dict[str, Any]) -> dict[str, Any]:
    """What adapters keep in a session, for another session that goes on from there."""
    return {
        name: value.fork() if callable(getattr(value, "fork", None)) else copy.copy(value)
        for name, value in list(data.items())
    }


def _nothing(session: Session) -> dict[str, int]:
    return {}


def _nobody(session: Session) -> None:
    pass
