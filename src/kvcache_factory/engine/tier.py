"""A tier: where bytes rest (store), who is there (index), who leaves (policy), and how much there is (budget)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.envelope import checksum
from ..block.spec import BlockSpec
from ..codec.base import Encoded, ImageCodec, PayloadCoder
from ..errors import CapacityError
from ..memory.move import copy_slots
from ..memory.slab import Slab
from ..policy.base import NO_HINT, EvictionPolicy, RequestHint
from ..store.base import SlotMemory, Store
from .compressing import CompressionRule
from .index import Index
from .ledger import Event, Ledger
from .table import Keys, Rows
from .values import Chain, Reservation

GIB = 1 << 30
SAMPLE_EVERY = 16
"""With ``integrity="sample"``, one block in this many carries a checksum."""


class Ingestion(StrEnum):
    """When a block of the tier above is copied to this one."""

    ALL = "all"
    """When it is stored."""
    HOT = "hot"
    """When it has been hit often enough."""
    EVICTED = "evicted"
    """When it is about to leave the tier above."""


class Tier:
    """One level of the hierarchy.

    Parameters
    ----------
    name:
        Name in the ledger, e.g. ``"gpu"``.
    store:
        An unopened store.
    policy:
        A policy of this tier's own.
    budget_bytes:
        Hard cap on slots and index together.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        policy: EvictionPolicy,
        budget_bytes: int,
        ledger: Ledger,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.store = store
        self.policy = policy
        self.budget_bytes = budget_bytes
        self.ledger = ledger
        self.loaded = ledger.entry(name, Event.LOADED)
        self.load_times = ledger.durations(name, "load")
        self._clock = clock
        self.ingestion = Ingestion.ALL
        self.hot_hits = 2
        self.swap_to: int | None = None
        """Number of the tier to which what leaves by policy is moved; None: the next."""
        self.is_staging = False
        """Whether blocks only pass through on their way to and from outside."""
        self.least_blocks = 1
        """Blocks for which the budget of a staging tier is raised if it is smaller."""
        self.codec: ImageCodec | None = None
        """What seals whole images on their way to the store."""
        self.coder: PayloadCoder | None = None
        """What makes payloads smaller, and knows how to read those that are."""
        self.rule = CompressionRule()
        """Which blocks it is for."""
        self.spec: BlockSpec | None = None
        self.gate: Callable[[Tier, Keys], AbstractContextManager[int]] | None = None
        """Says how many leading blocks of a chain may come in, for as long as the context is open; None: all."""
        self._index: Index | None = None
        self._charge(0)

    def open(self, spec: BlockSpec) -> None:
        """Allocate slots and index for blocks of *spec*; CapacityError when not one block fits."""
        books = Index.bytes_per_row(spec.block_tokens) + self.policy.bytes_per_row
        per_row = self.store.slot_bytes(spec) + books
        if self.is_staging:
            self.budget_bytes = max(self.budget_bytes, self.least_blocks * per_row)
        rows = min(self.budget_bytes // per_row, np.iinfo(np.int32).max)
        if rows < 1:
            raise CapacityError(
                f"tier {self.name!r} has {self.budget_bytes:,} bytes, but one block of {spec.block_tokens} tokens "
                f"takes {per_row:,}; give it at least {per_row * 1.01 / GIB:.3g} GiB"
            )
        self.store.open(spec, rows)
        self._index = Index(rows, spec.block_tokens, self.policy, self._clock)
        self._time_lock()
        self.spec = spec
        self._charge(per_row)

    def _charge(self, block_bytes: int) -> None:
        """A block takes so many bytes, overhead included."""
        self.block_bytes = block_bytes
        self.asked = self.ledger.pair(self.name, Event.ASKED, Event.HIT, block_bytes)

    def _time_lock(self) -> None:
        """Measure how long threads wait for the index, if durations are measured."""
        if self.ledger.timed:
            self.index.time_lock(self.ledger.durations(self.name, "lock_wait").add)

    def timing(self, operation: str) -> AbstractContextManager[None]:
        """Measure what is inside as an *operation* of this tier, if durations are measured."""
        return self.ledger.timing(self.name, operation)

    @property
    def index(self) -> Index:
        """The index; the tier must be open."""
        assert self._index is not None, f"tier {self.name!r} is not open"
        return self._index

    @property
    def slots(self) -> SlotMemory:
        """The slots as memory that engine tensors can be copied into and out of."""
        memory = self.store.memory
        assert memory is not None, f"the store of tier {self.name!r} is not memory"
        return memory

    @property
    def payload_offset(self) -> int:
        """Bytes from the start of a slot to its payload."""
        return self.store.payload_offset

    def surplus(self, share: float) -> float:
        """Blocks that are here beyond this *share* of what there is room for."""
        return self.index.used - share * self.index.capacity

    def slots_of(self, rows: Rows) -> Rows:
        """The slots of *rows*, which must be whole."""
        return rows

    def copy_payloads(self, rows: Rows, memory: Slab, slots: Rows, offset: int) -> int:
        """Write the payloads of *rows*, which the caller holds, to *slots* of host memory, from byte *offset* on.

        Returns how many leading ones could be written.
        """
        assert self.spec is not None
        copy_slots(self.slots, self.slots_of(rows), memory, slots, self.spec.payload_bytes, self.payload_offset, offset)
        return len(rows)

    def whole(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of *rows* are in slots, as they are."""
        return np.ones(len(rows), np.bool_)

    def ready(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of *rows* can be copied out of slots; those of others must be decoded first."""
        return np.ones(len(rows), np.bool_)

    def touched(self, rows: Rows) -> None:
        """A request has used *rows*."""

    @property
    def is_open(self) -> bool:
        """Whether slots and index exist."""
        return self._index is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that are here, overhead included."""
        index = self._index  # looked at once: metrics are read while a manager closes
        return index.used * self.block_bytes if index else 0

    def reserve(
        self,
        chain: Chain,
        root: int,
        first: int,
        count: int,
        fidelity: int | npt.NDArray[np.uint8] = 0,
        layout: int | npt.NDArray[np.uint8] = 0,
        hint: RequestHint = NO_HINT,
    ) -> Reservation:
        """See :meth:`Index.reserve`; also has the space for what it returns."""
        if self.gate is None:
            return self.index.reserve(chain, root, first, count, fidelity, layout, hint)
        keys = chain.keys[first : first + count]
        with self.gate(self, keys) as fitting:
            taken = self.index.reserve(chain, root, first, fitting, fidelity, layout, hint)
        shut_out = int((~self.index.knows(keys[fitting:])).sum())
        if not shut_out:
            return taken
        return msgspec.structs.replace(taken, wanted=taken.wanted + shut_out, reason=taken.reason or "quota")

    def evict(self, count: int) -> Keys:
        """See :meth:`Index.evict`."""
        return self.index.evict(count)

    def drop(self, rows: Rows, reason: str) -> int:
        """See :meth:`Index.drop`; counted."""
        gone = self.index.drop(rows)
        self.settle()
        self.count(Event.DROPPED, gone, reason)
        return gone

    def drop_unshared(self, keys: Keys, reason: str, wipe: bool) -> int:
        """See :meth:`Index.drop_unshared`; counted.  Blocks that are being filled are not committed any more."""
        gone = self.index.drop_unshared_keys(keys, wipe)
        self.settle()
        self.count(Event.DROPPED, gone, reason)
        return gone

    def let_leave(self, keys: Keys, reason: str) -> int:
        """As :meth:`drop_unshared`, but :meth:`settle` is left to the caller, who may hold a lock."""
        gone = self.index.drop_unshared_keys(keys)
        self.count(Event.DROPPED, gone, reason)
        return gone

    def abort(self, rows: Rows, reason: str = "copy_failed") -> None:
        """See :meth:`Index.abort`; what others had stored on top of *rows* goes too, and is counted."""
        self.count(Event.DROPPED, self.index.abort(rows), reason)

    def count_left(self, reservation: Reservation, below: Tier | None = None) -> None:
        """Count what had to leave, or could not come, for a reservation."""
        self.count_evicted(reservation.evicted, below)
        self.count(Event.DROPPED, reservation.replaced, "replaced")
        self.count(Event.NOT_STORED, reservation.wanted - len(reservation.rows), reservation.reason)

    def reject(self, rows: Rows, reason: str) -> None:
        """The first of *rows* could not be read or is not what its key says: it leaves with what was built on it."""
        self.count(Event.LOAD_FAILED, len(rows), reason)
        self.drop(rows[:1], reason)

    def settle(self) -> None:
        """Let the store do what is due for rows that have left."""

    def state(self) -> dict[str, Any]:
        """What the tier holds, as plain data."""
        index = self._index
        return {
            "tier": self.name,
            "policy": self.policy.name,
            "budget_bytes": self.budget_bytes,
            "capacity_blocks": index.capacity if index else 0,
            "held_blocks": index.used if index else 0,
            "held_bytes": self.held_bytes,
            "block_bytes": self.block_bytes,
            "prefaulted": getattr(self.store.memory, "prefaulted", 1.0) if index else 0.0,
            "codec": self.codec.name if self.codec is not None else "none",
            "payload_bytes": self.spec.payload_bytes if self.spec is not None else 0,
            **self._figures(),
        }

    def _figures(self) -> dict[str, Any]:
        """What the store says, with the padding of slots among what is lost to fragmentation."""
        figures = self.store.figures()
        index = self._index
        if self.spec is not None and index is not None:
            slot = self.store.slot_bytes(self.spec)
            padding = slot - self.store.payload_offset - self.spec.payload_bytes
            lost = figures.setdefault("fragmentation", {})
            lost[slot] = lost.get(slot, 0) + padding * index.used
        return figures

    def count(self, event: Event, blocks: int, reason: str = "") -> None:
        """Count *blocks* in the ledger under this tier; nothing when there are none."""
        if blocks:
            self.ledger.add(self.name, event, blocks, blocks * self.block_bytes, reason)

    def count_encoded(self, codec: str, made: Encoded) -> None:
        """Count a block that *codec* made smaller, by the bytes that it takes now, and keep its largest error."""
        self.ledger.add(self.name, Event.ENCODED, 1, len(made.data), codec)
        self.ledger.note_worst(self.name, f"codec_error_{codec}", made.max_rel_error)

    def count_evicted(self, keys: Keys, below: Tier | None, outside: Keys | None = None) -> None:
        """Count evicted blocks, telling those that are in the tier *below* or *outside* from those that are lost."""
        known = below.index.rows_of(keys) >= 0 if below is not None and len(keys) else np.zeros(len(keys), np.bool_)
        if outside is not None:
            known |= np.isin(keys[:, 0], outside[:, 0])
        kept = int(known.sum())
        self.count(Event.EVICTED, kept, "kept_below")
        self.count(Event.EVICTED, len(keys) - kept, "capacity")
        self.count(Event.UNUSED, self.index.take_unused())

    def seal(self, rows: Rows, integrity: str) -> None:
        """Note checksums of the payloads of *rows* that were just filled, as far as *integrity* asks for it."""
        for row in self._checked(rows, integrity):
            self.index.checksum[row] = self._payload_checksum(row)

    def sound(self, rows: Rows, integrity: str) -> int:
        """How many leading *rows* still have the payload that was sealed."""
        for row in self._checked(rows, integrity):
            expected = int(self.index.checksum[row])
            if expected and self._payload_checksum(row) != expected:
                return int((rows == row).argmax())
        return len(rows)

    def known_sums(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """Checksums of the payloads of *rows* as they were filled; 0 where none was noted, or of an encoded block."""
        sums: npt.NDArray[np.uint64] = np.where(self.whole(rows), self.index.checksum[rows], 0).astype(np.uint64)
        return sums

    def _checked(self, rows: Rows, integrity: str) -> list[int]:
        if integrity == "off":
            return []
        if integrity == "sample":
            rows = rows[self.index.keys[rows, 0] % SAMPLE_EVERY == 0]
        return [int(row) for row in rows]

    def _payload_checksum(self, row: int) -> int:
        assert self.spec is not None
        payload = self.store.payload(row)
        return checksum(payload) if payload is not None else 0

    def close(self) -> None:
        """Give slots and index back; idempotent."""
        self.store.close()
        self._index = None
