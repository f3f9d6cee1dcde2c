"""Leases: what holds the rows of a match, by request id, until the request ends or the lease is too old."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from .tier import Tier


class Usage:
    """What became of the history of one request, in blocks from its first on."""

    __slots__ = ("chosen", "found", "reusable", "served")

    def __init__(self, reusable: int = 0, found: int = 0) -> None:
        self.reusable = reusable
        """Seen before."""
        self.found = found
        """Stored."""
        self.served = 0
        """Given to the engine."""
        self.chosen = 0
        """Found, and computed because that was judged faster."""


class Lease:
    """Pins held for one request; one pin holds a row and all its ancestors."""

    def __init__(self, number: int, pins: list[tuple[Tier, int]], created: float, usage: Usage) -> None:
        self.number = number
        self.usage = usage
        self.pins = pins
        self.created = created
        self.busy = 0
        self.closed = False


class LeaseBook:
    """The open leases of a manager, the oldest first.

    Parameters
    ----------
    max_age_s:
        A lease older than this is given back by the next call, unless a copy is using it: a lost request must not hold
        memory for ever.
    clock:
        Seconds.
    on_expired:
        Called for each lease that was given back because of its age.
    on_ended:
        Called with the usage of each request that has ended, by itself or because of its age.
    """

    def __init__(
        self,
        max_age_s: float,
        clock: Callable[[], float],
        on_expired: Callable[[], None],
        on_ended: Callable[[Usage], None] = lambda usage: None,
    ) -> None:
        self._max_age_s = max_age_s
        self._clock = clock
        self._on_expired = on_expired
        self._on_ended = on_ended
        self._numbers = itertools.count()
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, request_id: str, pins: list[tuple[Tier, int]], usage: Usage | None = None) -> int:
        """Take over *pins* for a request; what it held before is given back.  Returns the lease's number.

        The *usage* of a request that looks again is that of its last look.
        """
        with self._lock:
            lease = Lease(next(self._numbers), pins, self._clock(), usage or Usage())
            before = self._leases.pop(request_id, None)
            self._leases[request_id] = lease
        self._close(before)
        self.expire()
        return lease.number

    def extend(self, request_id: str, tier: Tier, row: int) -> bool:
        """Let a request hold *row*, the end of a chain that it has stored, too; False when it has no lease."""
        tier.index.pin(row)
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is not None:
                lease.pins.append((tier, row))
        if lease is None:
            tier.index.unpin(row)
        return lease is not None

    def release(self, request_id: str, output_tokens: int = 0) -> bool:
        """Give the lease of a request, which generated *output_tokens*, back; False when it has none (any more)."""
        with self._lock:
            lease = self._leases.pop(request_id, None)
            if lease is None:
                return False
            ends = {id(tier): (tier, row) for tier, row in lease.pins}  # the last of each tier ends the longest chain
        for tier, row in ends.values():
            tier.index.finish(row, output_tokens)
        self._close(lease)
        self._on_ended(lease.usage)
        return True

    def find(self, request_id: str, number: int) -> Lease | None:
        """The lease of this *number*, while the request has it."""
        lease = self._leases.get(request_id)
        return lease if lease is not None and lease.number == number else None

    def holds(self, request_id: str, number: int) -> bool:
        """Whether a request still has the lease of this *number*."""
        return self.find(request_id, number) is not None

    def enter(self, request_id: str, number: int) -> Lease | None:
        """Keep a lease alive while a copy uses its rows; None when it is gone.  :meth:`leave` must follow."""
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or lease.number != number:
                return None
            lease.busy += 1
            return lease

    def leave(self, lease: Lease) -> None:
        """End what :meth:`enter` began."""
        with self._lock:
            lease.busy -= 1
            pins = self._take_pins(lease)
        _unpin(pins)

    def expire(self) -> None:
        """Give back every lease that is too old."""
        oldest = self._clock() - self._max_age_s
        with self._lock:
            old = []
            for request_id, lease in self._leases.items():
                if lease.created > oldest:
                    break
                if not lease.busy:
                    old.append(request_id)
            expired = [self._leases.pop(request_id) for request_id in old]
        for lease in expired:
            self._close(lease)
            self._on_expired()
            self._on_ended(lease.usage)

    def clear(self) -> None:
        """Give every lease back."""
        with self._lock:
            leases = list(self._leases.values())
            self._leases.clear()
        for lease in leases:
            self._close(lease)

    def _close(self, lease: Lease | None) -> None:
        if lease is None:
            return
        with self._lock:
            lease.closed = True
            pins = self._take_pins(lease)
        _unpin(pins)

    @staticmethod
    def _take_pins(lease: Lease) -> list[tuple[Tier, int]]:
        # A copy in flight owns the rows: whoever is last gives them back.
        if not lease.closed or lease.busy:
            return []
        pins, lease.pins = lease.pins, []
        return pins


def _unpin(pins: list[tuple[Tier, int]]) -> None:
    for tier, row in pins:
        tier.index.unpin(row)
