"""Changing the membership of a cluster: join, leave, spread the slots, notice who is gone.

Every change is one compare-and-set of the whole membership, so that any number of programs may make them.  A server
that joined with a heartbeat keeps a key alive for as long as it beats; when that key has vanished, the server is gone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from ..errors import ConfigError, StoreError
from .membership import DEFAULT_SLOTS, Membership, Node, dump_membership, parse_membership, ranges_of, spread
from .meta_service import MetaService

TRIES = 64
"""Compare-and-sets that may fail before a change is given up."""


class Administration:
    """One cluster's membership in a meta service.

    Parameters
    ----------
    meta:
        The meta service.
    key:
        Where the membership is kept.
    slots:
        How many slots a new cluster has.
    """

    def __init__(self, meta: MetaService, key: str, slots: int = DEFAULT_SLOTS) -> None:
        if not key:
            raise ConfigError("say under which key the membership of the cluster is kept")
        self._meta = meta
        self._key = key
        self._slots = slots

    def read(self) -> Membership:
        """The membership; an empty one when there is none.  Raises FormatError when it cannot be read."""
        text = self._meta.get(self._key)
        return Membership() if text is None else parse_membership(text)

    def join(self, addr: str, port: int, fields: Mapping[str, Any] | None = None) -> Membership:
        """Add a server, or replace what is said of it, and give it its share of the slots."""
        wrong = {"addr", "port", "slots"} & set(fields or {})
        if wrong:
            raise ConfigError(f"{', '.join(sorted(wrong))} cannot be a further field of a server")
        node = Node(addr, port, fields=tuple((fields or {}).items()))

        def change(nodes: list[Node]) -> list[Node]:
            places = [other.place for other in nodes]
            if node.place not in places:
                return [*nodes, node]
            before = nodes[places.index(node.place)]
            nodes[places.index(node.place)] = msgspec.structs.replace(node, slots=before.slots)
            return nodes

        return self._change(change)

    def leave(self, addr: str, port: int) -> Membership:
        """Take a server out and give its slots to the others; ConfigError when it is not there."""
        gone = Node(addr, port).place

        def change(nodes: list[Node]) -> list[Node]:
            if gone not in [node.place for node in nodes]:
                raise ConfigError(f"{gone} is no member of {self._key!r}")
            return [node for node in nodes if node.place != gone]

        membership = self._change(change)
        self._forget(gone)
        return membership

    def rebalance(self) -> tuple[Membership, list[str]]:
        """Take out servers whose heart has stopped and spread the slots evenly; also returns who was taken out."""
        dead = [place for place, beats in self.heartbeats().items() if beats is False]
        membership = self._change(lambda nodes: [node for node in nodes if node.place not in dead])
        for place in dead:
            self._forget(place)
        return membership, dead

    def beat(self, addr: str, port: int, ttl_s: int) -> None:
        """Say that a server is alive, for *ttl_s* seconds from now."""
        place = Node(addr, port).place
        self._meta.put(self._alive(place), b"1", ttl_s)
        self._meta.put(self._beating(place), str(ttl_s).encode())

    def expect_no_beat(self, addr: str, port: int) -> None:
        """Take a server for alive until it beats again, whatever it did before."""
        self._forget(Node(addr, port).place)

    def heartbeats(self) -> dict[str, bool | None]:
        """For each server whether its heart beats; None for those that joined without one."""
        found: dict[str, bool | None] = {}
        for node in self.read().nodes:
            beating = self._meta.get(self._beating(node.place)) is not None
            found[node.place] = (self._meta.get(self._alive(node.place)) is not None) if beating else None
        return found

    def _forget(self, place: str) -> None:
        for key in (self._beating(place), self._alive(place)):  # in this order it never looks dead between
            self._meta.delete(key)

    def _beating(self, place: str) -> str:
        return f"{self._key}:beating:{place}"

    def _alive(self, place: str) -> str:
        return f"{self._key}:alive:{place}"

    def _change(self, change: Callable[[list[Node]], list[Node]]) -> Membership:
        """Change the nodes and spread the slots, as one step that nobody else's change can be lost in."""
        for number in range(TRIES):
            text = self._meta.get(self._key)
            before = Membership() if text is None else parse_membership(text)
            after = self._spread(before, change(list(before.nodes)))
            if after.nodes == before.nodes or self._meta.replace(self._key, text, dump_membership(after)):
                return after if after.nodes != before.nodes else before
            time.sleep(random.uniform(0, 0.002 * (number + 1)))
        raise StoreError(f"the membership {self._key!r} was changed by others {TRIES} times in a row", reason="busy")

    def _spread(self, before: Membership, nodes: list[Node]) -> Membership:
        total = before.total_slots or self._slots
        places = {node.place: number for number, node in enumerate(nodes)}
        numbers = np.array([places.get(node.place, -1) for node in before.nodes] + [-1], np.int32)
        owners = np.full(total, -1, np.int32)
        owners[: before.total_slots] = numbers[before.owners()]
        owners = spread(owners, len(nodes))
        shared = [
            msgspec.structs.replace(node, slots=ranges_of(np.flatnonzero(owners == number).tolist()))
            for number, node in enumerate(nodes)
        ]
        return Membership(tuple(shared), before.version + 1)
