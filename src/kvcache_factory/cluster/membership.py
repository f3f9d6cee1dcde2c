"""The membership of a cluster: which servers there are, and which slots each of them owns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import FormatError

DEFAULT_SLOTS = 4096
MOST_SLOTS = 1 << 20
Owners = npt.NDArray[np.int32]
"""For each slot the number of its owner in the list of nodes, -1 where there is none."""


class SlotRange(msgspec.Struct, frozen=True):
    """Slots from *start* to *end*, both included."""

    start: int
    end: int


class Node(msgspec.Struct, frozen=True):
    """One server.

    Attributes:
        addr, port: where it listens.
        slots: the slots it owns.
        fields: every other field of its entry, handed to its connector as options.
    """

    addr: str
    port: int
    slots: tuple[SlotRange, ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def place(self) -> str:
        """Address and port, which no other node of the cluster has."""
        return f"[{self.addr}]:{self.port}" if ":" in self.addr else f"{self.addr}:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """The further fields by name."""
        return dict(self.fields)

    def is_same_server(self, other: Node) -> bool:
        """Whether a connection to *other* serves this one: everything but the slots is equal."""
        return (self.addr, self.port, self.fields) == (other.addr, other.port, other.fields)


class Membership(msgspec.Struct, frozen=True):
    """The nodes, and a number that grows with every change."""

    nodes: tuple[Node, ...] = ()
    version: int = 0

    @property
    def total_slots(self) -> int:
        """How many slots there are: one more than the last that somebody owns."""
        return max((r.end + 1 for node in self.nodes for r in node.slots), default=0)

    def owners(self) -> Owners:
        """Who owns each slot; FormatError when two nodes own the same one."""
        owners = np.full(self.total_slots, -1, np.int32)
        for number, node in enumerate(self.nodes):
            for r in node.slots:
                part = owners[r.start : r.end + 1]
                if (part >= 0).any():
                    other = self.nodes[int(part[part >= 0][0])].place
                    raise FormatError(f"slots {r.start} to {r.end} of {node.place} belong to {other}, too")
                part[:] = number
        return owners


def parse_membership(text: bytes | str) -> Membership:
    """Read ``{"nodes": [{"addr", "port", "slots": [{"start", "end"}], ...}], "version"}``; *end* is included.

    Raises FormatError when it is no JSON of this shape, and when slots or servers occur twice.  Slots that nobody owns
    are allowed: their keys are misses.
    """
    try:
        data = msgspec.json.decode(text, type=_Entries)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"the membership of the cluster cannot be read: {error}") from None
    membership = Membership(tuple(_node(entry) for entry in data.nodes), data.version)
    places = [node.place for node in membership.nodes]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise FormatError(f"the membership of the cluster names {twice} twice")
    membership.owners()
    return membership


def dump_membership(membership: Membership) -> bytes:
    """The JSON that :func:`parse_membership` reads."""
    nodes = [
        {"addr": n.addr, "port": n.port, "slots": [{"start": r.start, "end": r.end} for r in n.slots], **n.options}
        for n in membership.nodes
    ]
    return msgspec.json.encode({"nodes": nodes, "version": membership.version})


class _Entries(msgspec.Struct):
    nodes: list[dict[str, Any]]
    version: int = 0


def _node(entry: dict[str, Any]) -> Node:
    try:
        node = msgspec.convert({"slots": (), **entry}, Node)
    except msgspec.ValidationError as error:
        raise FormatError(f"a node of the cluster cannot be read: {error}") from None
    for r in node.slots:
        if not 0 <= r.start <= r.end < MOST_SLOTS:
            raise FormatError(f"node {node.place} has slots {r.start} to {r.end}; use 0 <= start <= end < {MOST_SLOTS}")
    if not node.addr or not 0 < node.port < 65536:
        raise FormatError(f"a node of the cluster is at {node.place!r}, which is no address and port")
    others = tuple((name, value) for name, value in entry.items() if name not in ("addr", "port", "slots"))
    return msgspec.structs.replace(node, fields=others)


def ranges_of(slots: Iterable[int]) -> tuple[SlotRange, ...]:
    """Slot numbers in ascending order as ranges."""
    found: list[SlotRange] = []
    for slot in slots:
        if found and found[-1].end == slot - 1:
            found[-1] = SlotRange(found[-1].start, slot)
        else:
            found.append(SlotRange(slot, slot))
    return tuple(found)


def spread(owners: Owners, members: int) -> Owners:
    """Every slot owned, by *members* members within one slot of evenly, moving as few as that takes."""
    after = owners.copy()
    if not members:
        after[:] = -1
        return after
    after[after >= members] = -1
    held = np.bincount(after[after >= 0], minlength=members)
    # Who has most keeps the remainder, so that nothing moves for it.
    share, rest = divmod(len(after), members)
    wanted = np.full(members, share)
    wanted[np.argsort(-held, kind="stable")[:rest]] += 1
    for member in np.flatnonzero(held > wanted).tolist():
        after[np.flatnonzero(after == member)[wanted[member] :]] = -1
    free = np.flatnonzero(after < 0)
    short = np.maximum(wanted - np.bincount(after[after >= 0], minlength=members), 0)
    after[free] = np.repeat(np.arange(members, dtype=np.int32), short)
    return after
