"""Connections to the members of a cluster: opened beside, judged by what comes back, closed when they are idle."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ..connector.base import Connector
from ..status import Status, StatusCodes
from .membership import Membership, Node
from .placement import placement_class

_log = logging.getLogger("kvcache_factory")
Make = Callable[[Node], Connector[bytes, Any]]

ANYTHING = (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""What a client may raise: one that ends the loop would end every other call with it."""
FAILURES = 3
"""Calls in a row that fail before a member is taken out of service."""
STALL_S = 1.0
"""Age of the oldest call on its way at which a member is given no more."""
FIRST_RETRY_S, LAST_RETRY_S = 0.25, 30.0
"""Shortest and longest time between two tries to reach a member."""


class Link:
    """One open connector, and the calls on their way with it.  Guarded by the lock of the cluster."""

    def __init__(self, connector: Connector[bytes, Any]) -> None:
        self.connector = connector
        self.failures = 0
        self._started: dict[int, float] = {}
        self._numbers = itertools.count()

    def begin(self) -> int:
        """A call begins; give the number to :meth:`end`."""
        number = next(self._numbers)
        self._started[number] = time.monotonic()
        return number

    def end(self, number: int, failed: bool) -> None:
        """The call has ended."""
        del self._started[number]
        self.failures = self.failures + 1 if failed else 0

    @property
    def idle(self) -> bool:
        """Whether no call is on its way."""
        return not self._started

    @property
    def usable(self) -> bool:
        """Whether it may be given calls: it answers, and none hangs."""
        oldest = next(iter(self._started.values()), None)
        return self.failures < FAILURES and (oldest is None or time.monotonic() - oldest < STALL_S)

    @property
    def broken(self) -> bool:
        """Whether it must be opened anew."""
        return self.failures >= FAILURES


class Member:
    """One server of the cluster, with its link while there is one."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.link: Link | None = None
        self.why = "not connected yet"
        self._connecting: threading.Thread | None = None
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S

    @property
    def usable(self) -> bool:
        """Whether it may be given calls."""
        return self.link is not None and self.link.usable

    def due(self, now: float) -> bool:
        """Whether it is time to try to reach it."""
        wanted = self.link is None or self.link.broken
        return wanted and self._connecting is None and now >= self._retry_at

    def connect(self, make: Make, prepare: Callable[[Connector[bytes, Any]], Status[Any]], done: Done) -> None:
        """Open a connector in a thread of its own, since that may hang; *done* gets what came of it."""
        self._connecting = threading.Thread(
            target=self._connect, args=(make, prepare, done), name="kvcache-factory-cluster-connect", daemon=True
        )
        self._connecting.start()

    def _connect(self, make: Make, prepare: Callable[[Connector[bytes, Any]], Status[Any]], done: Done) -> None:
        link, why = None, ""
        try:
            connector = make(self.node)
            status = connector.open()
            if status.is_ok():
                status = prepare(connector)
                if not status.is_ok():
                    connector.close()
            link, why = (Link(connector), "") if status.is_ok() else (None, str(status))
        except ANYTHING as error:
            why = f"{type(error).__name__}: {error}"
        done(self, link, why)

    def settle(self, link: Link | None, why: str) -> Link | None:
        """Take over what came of connecting; returns the link that is of no use any more."""
        before, self._connecting, self.why = self.link, None, why
        if link is None:
            if self._retry_s == FIRST_RETRY_S:
                _log.warning(
                    "cluster: %s cannot be reached (%s); its keys are misses until it can", self.node.place, why
                )
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)
            return None
        self._retry_s, self.link = FIRST_RETRY_S, link
        return before


class Snapshot:
    """Members and who owns what, as they were at one moment."""

    def __init__(self, membership: Membership, members: list[Member], placement: str) -> None:
        self.membership = membership
        self.members = members
        self.placement = placement_class(placement)(membership)


Done = Callable[[Member, Link | None, str], None]


def failed(status: Status[Any]) -> bool:
    """Whether a status says something against the server."""
    return status.error_code in (StatusCodes.ERROR, StatusCodes.TIMEOUT, StatusCodes.CANCELLED)
