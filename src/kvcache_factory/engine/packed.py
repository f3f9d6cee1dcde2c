"""A tier in memory whose blocks shrink where they are: rows are plenty, room is what counts.

A block begins in a slot of its own, as in any memory tier.  Encoding it moves its bytes to chunks, which are cut out of
other slots, and frees the slot; its row, and with it everything that the index and the policy know, stays.  Blocks that
somebody holds, or on which somebody holds a block, are left alone: leases promise that bytes stay where they are.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from ..block.envelope import Fidelity, Header, checksum, pack_header
from ..block.spec import PAGE, BlockSpec, Layout, round_up
from ..codec.base import DOES_NOT_PAY, Encoded
from ..errors import CapacityError
from ..memory.chunks import ChunkPool, read_chunks, read_slot, write_chunks
from ..memory.slab import Slab
from ..policy.base import NO_HINT, RequestHint
from .coding import decode_payload, encode_payload
from .index import Index
from .ledger import Event
from .movable import MovableIndex
from .table import Keys, Rows
from .tier import GIB, Tier
from .values import Chain, Reservation, StoredChain

PER_SLOT = 32
"""Chunks of a slot: what rounding up costs an encoded block at most, as a share of a whole one, is one in so many."""
NOWHERE = -1
MOST_STAGED = 0.5
"""Slots that decoded copies may take, as a share of all."""
STAGED_S = 10.0
"""Seconds for which a copy that was decoded ahead waits for the request that it is for."""
USED = -np.inf
"""When a copy was decoded that a request has used."""


class PackedTier(Tier):
    """See the module.  Its *coder* says how blocks are encoded, its *rule* which."""

    def open(self, spec: BlockSpec) -> None:
        assert self.coder is not None
        books = Index.bytes_per_row(spec.block_tokens) + self.policy.bytes_per_row + 4 * PER_SLOT + 24
        ratio = max(self.coder.largest_ratio, 1.0)
        slot = self.store.slot_bytes(spec)
        slots = int(self.budget_bytes // (slot + ratio * books))
        if slots < 1:
            raise CapacityError(
                f"tier {self.name!r} has {self.budget_bytes:,} bytes, but one block of {spec.block_tokens} tokens "
                f"takes {slot + int(ratio * books):,}; give it at least {(slot + ratio * books) * 1.01 / GIB:.3g} GiB"
            )
        rows = max(int(slots * ratio), slots)
        self.coder.open(spec)
        self.store.open(spec, slots)
        self._index = MovableIndex(rows, spec.block_tokens, self.policy, self._clock, deferred=True)
        self.spec = spec
        self._charge(slot + books)
        self._books = books
        self._slot_bytes = slot
        self._slab_slots = slots
        self._place = np.full(rows, NOWHERE, np.int32)
        self._chunks = np.full((rows, PER_SLOT), NOWHERE, np.int32)
        self._sizes = np.zeros(rows, np.int64)
        self._touched = np.zeros(rows, np.float64)
        self._staged_s = np.full(rows, USED, np.float64)
        self._refused = np.zeros(rows, np.uint32)  # generation of the row, plus one, that its codec has refused
        self._params: dict[int, bytes] = {}
        self._pool = ChunkPool(slots, PER_SLOT)
        self._room = threading.RLock()
        self._staged = 0
        self._most_staged = max(int(MOST_STAGED * slots), 1)

    @property
    def movable(self) -> MovableIndex:
        """The index as what it is here."""
        assert isinstance(self._index, MovableIndex)
        return self._index

    # -- what Tier promises, with rows that are no slots --------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        index = self._index
        if index is None:
            return 0
        with self._room:
            whole = int((self._place != NOWHERE).sum())
            chunks = self._pool.used_chunks * self._slot_bytes // PER_SLOT
        return whole * self._slot_bytes + chunks + index.used * self._books

    @property
    def packed_blocks(self) -> int:
        """Blocks that are encoded."""
        return int((self._sizes > 0).sum()) if self._index is not None else 0

    def slots_of(self, rows: Rows) -> Rows:
        slots: Rows = self._place[rows]
        assert (slots != NOWHERE).all(), "an encoded block has no slot"
        return slots

    def surplus(self, share: float) -> float:
        with self._room:
            slots = self._slab_slots - self._pool.free_slots - share * self._slab_slots
        return max(slots, super().surplus(share))

    def whole(self, rows: Rows) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._sizes[rows] == 0
        return found

    def ready(self, rows: Rows) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._place[rows] != NOWHERE
        return found

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
        self.settle()
        taken = super().reserve(chain, root, first, count, fidelity, layout, hint)
        self.settle()
        rows, evicted = taken.rows, taken.evicted
        got, left = self._give_slots(rows)
        if len(left):
            evicted = np.concatenate((evicted, left))
        reason = taken.reason
        if got < len(rows):
            self.abort(rows[got:], "full")
            rows, reason = rows[:got], "full"
        self._touched[rows] = self._clock()
        return Reservation(rows, taken.first, taken.wanted, evicted, taken.replaced, reason)

    def _give_slots(self, rows: Rows) -> tuple[int, Keys]:
        """Give slots to as many leading *rows* as there can be, evicting for them; also returns the keys that left."""
        evicted: list[Keys] = []
        while True:
            with self._room:
                if self._pool.free_slots >= len(rows):
                    self._place[rows] = self._pool.take_slots(len(rows))
                    break
                short = len(rows) - self._pool.free_slots
            if self.fold(everything=True):
                continue
            keys = self.evict(short)
            evicted.append(keys)
            if not len(keys):
                with self._room:
                    rows = rows[: self._pool.free_slots]
                    self._place[rows] = self._pool.take_slots(len(rows))
                break
        return len(rows), np.concatenate(evicted) if evicted else np.empty((0, 2), np.uint64)

    def evict(self, count: int) -> Keys:
        keys = super().evict(count)
        self.settle()
        return keys

    def abort(self, rows: Rows, reason: str = "copy_failed") -> None:
        super().abort(rows, reason)
        self.settle()

    def settle(self) -> None:
        rows = self.index.take_limbo()
        if not len(rows):
            return
        with self._room:
            self._free(rows)
        self.index.recycle(rows)

    def _free(self, rows: Rows) -> None:
        slots = self._place[rows]
        self._pool.give_slots(slots[slots != NOWHERE])
        self._staged -= int(((slots != NOWHERE) & (self._sizes[rows] > 0)).sum())
        self._place[rows] = NOWHERE
        for row in rows[self._sizes[rows] > 0].tolist():
            self._drop_chunks(row)

    def _drop_chunks(self, row: int) -> None:
        chunks = self._chunks[row]
        self._pool.give_chunks(chunks[chunks != NOWHERE])
        self._chunks[row] = NOWHERE
        self._sizes[row] = 0
        self._params.pop(row, None)

    def touched(self, rows: Rows) -> None:
        self._touched[rows] = self._clock()
        self._staged_s[rows] = USED

    def _payload_checksum(self, row: int) -> int:
        if self._sizes[row]:
            return checksum(self._data(row).data)
        payload = self.store.payload(int(self._place[row]))
        return checksum(payload) if payload is not None else 0

    def state(self) -> dict[str, object]:
        return {**super().state(), "encoded_blocks": self.packed_blocks}

    def close(self) -> None:
        super().close()
        if self.coder is not None:
            self.coder.close()

    # -- encoding -----------------------------------------------------------------------------------------------------

    def candidates(self, most: int) -> Rows:
        """Rows to encode next, at most *most*, by place in their chain, age and heat.

        The oldest first or, where the rule waits until room runs out, in the order in which the policy would have
        them leave.
        """
        index, rule, spec = self.movable, self.rule, self.spec
        assert spec is not None
        able = index.visible() & (self._place != NOWHERE) & (self._sizes == 0)
        able &= (index.codings == 0) & (index.depth >= rule.keep_first)
        able &= self._refused != index.generation + np.uint32(1)
        rows = np.flatnonzero(able).astype(np.int32)
        if len(rows):
            behind = (index.deepest()[rows] - index.depth[rows]) * spec.block_tokens
            rows = self.movable.unheld(rows[behind >= rule.behind_tokens])
        # Only now: a request that has ended since must have left its mark.
        rows = rows[self._touched[rows] <= self._clock() - rule.min_age_s]
        if rule.max_hits is not None:
            rows = rows[index.hits[rows] <= rule.max_hits]
        if not rule.when_full:
            return rows[np.argsort(self._touched[rows], kind="stable")][:most]
        chosen = self.index.select_victims(len(rows) + self.packed_blocks)
        for row in chosen.tolist():
            self.index.unpin(row)
        return chosen[np.isin(chosen, rows)][:most]

    def encode(self, rows: Rows) -> int:
        """Encode those of *rows* that nobody holds; returns how many were."""
        done = 0
        for row in rows.tolist():  # one by one: what is pinned holds everything above it
            if self.movable.pin_ready(row):
                try:
                    done += self._encode(row)
                finally:
                    self.index.unpin(row)
        self.settle()
        return done

    def _encode(self, row: int) -> bool:
        index, coder, spec = self.movable, self.coder, self.spec
        assert coder is not None
        assert spec is not None
        slot, depth, one = int(self._place[row]), int(index.depth[row]), np.array([row], np.int32)
        if slot == NOWHERE or self._sizes[row] or not len(index.unheld(one, 1)):
            return False
        payload = read_slot(self.slots, slot, self.payload_offset, spec.payload_bytes)
        layout = Layout.of_code(int(index.layout[row])).value
        noted = int(index.checksum[row])
        sound = not noted or checksum(payload.data) == noted  # damage must not get a new checksum with its coding
        made = encode_payload(spec, coder, payload, layout, depth) if sound else "checksum"
        count = self._chunks_for(made) if isinstance(made, Encoded) else 0
        if not isinstance(made, Encoded) or not count:
            self._refused[row] = index.generation[row] + np.uint32(1)
            self.count(Event.KEPT_RAW, 1, made if isinstance(made, str) else DOES_NOT_PAY)
            return False
        with self._room:
            chunks = self._pool.take_chunks(count)
        if chunks is not None:
            write_chunks(self.slots, chunks, PER_SLOT, made.data)

        def swap(_: Rows) -> None:
            with self._room:
                self._place[row] = NOWHERE
                self._pool.give_slots(np.array([slot], np.int32))
                taken = chunks
                if taken is None:  # no room but where it is now, which is free from here on, and large enough
                    taken = self._pool.take_chunks(count)
                    assert taken is not None
                    write_chunks(self.slots, taken, PER_SLOT, made.data)
                self._chunks[row, :count] = taken
                self._sizes[row] = len(made.data)
                self._params[row] = made.params
            index.checksum[row] = checksum(made.data.data)
            if coder.lossy:
                index.fidelity[row] = max(int(index.fidelity[row]), Fidelity.BOUNDED)
                index.codings[row] = 1

        if not len(index.while_unheld(one, 1, swap)):
            if chunks is not None:
                with self._room:
                    self._pool.give_chunks(chunks)
            return False
        self.count_encoded(coder.name, made)
        return True

    def _chunks_for(self, made: Encoded) -> int:
        """How many chunks encoded bytes take; 0 where nothing would be gained."""
        count = -(-len(made.data) // (self._slot_bytes // PER_SLOT))
        return count if count < PER_SLOT else 0

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _data(self, row: int) -> npt.NDArray[np.uint8]:
        chunks = self._chunks[row]
        return read_chunks(self.slots, chunks[chunks != NOWHERE], PER_SLOT, int(self._sizes[row]))

    def decode(self, row: int, out: npt.NDArray[np.uint8]) -> str | None:
        """Decode the encoded block *row*, which the caller holds, into *out* ``uint8 [payload_bytes]``."""
        coder, spec, index = self.coder, self.spec, self.index
        assert coder is not None
        assert spec is not None
        data = self._data(row)
        if checksum(data.data) != int(index.checksum[row]):
            return "checksum"
        layout = Layout.of_code(int(index.layout[row])).value
        return decode_payload(spec, coder, coder.name, data, self._params[row], layout, out)

    def copy_payloads(self, rows: Rows, memory: Slab, slots: Rows, offset: int) -> int:
        spec = self.spec
        assert spec is not None
        for number, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
            out = memory.view[slot, offset : offset + spec.payload_bytes]
            if self._place[row] != NOWHERE:
                out[:] = read_slot(self.slots, int(self._place[row]), self.payload_offset, spec.payload_bytes)
            elif self.decode(row, out) is not None:
                return number
        return len(rows)

    # -- decoded copies, beside what is encoded -----------------------------------------------------------------------

    def take_staging(self, count: int, *, evict: bool = False) -> tuple[Rows, Keys]:
        """Up to *count* slots for decoded copies, and the keys of what left for them; nothing does unless *evict*.

        They end with :meth:`stage` or :meth:`give_staging`.
        """
        if self._room_to_stage(count) < count:
            self.fold(everything=True)
        keys = np.empty((0, 2), np.uint64)
        with self._room:
            short = min(count, self._most_staged - self._staged) - self._pool.free_slots
        if evict and short > 0:
            keys = self.evict(short)
        with self._room:
            slots = self._pool.take_slots(self._room_to_stage(count))
            self._staged += len(slots)
        return slots, keys

    def _room_to_stage(self, count: int) -> int:
        with self._room:
            return max(min(count, self._most_staged - self._staged, self._pool.free_slots), 0)

    def give_staging(self, slots: Rows) -> None:
        """*slots* of :meth:`take_staging` were not needed."""
        with self._room:
            self._staged -= len(slots)
            self._pool.give_slots(slots)

    def stage(self, rows: Rows, slots: Rows) -> None:
        """Decoded copies of *rows*, which the caller holds, are in *slots*; where there is one already, that stays."""
        with self._room:
            fresh = (self._place[rows] == NOWHERE) & (self._sizes[rows] > 0)
            self._place[rows[fresh]] = slots[fresh]
            self._staged_s[rows[fresh]] = self._clock()
        self.give_staging(slots[~fresh])

    def fold(self, *, everything: bool = False) -> int:
        """Let go of decoded copies that nobody holds; returns of how many.

        Those that were decoded ahead and are not used yet stay for a while, unless *everything* has to go.
        """
        if not self._staged:
            return 0
        with self._room:
            over = (self._place != NOWHERE) & (self._sizes > 0)
            if not everything:
                over &= self._staged_s <= self._clock() - STAGED_S
            rows = np.flatnonzero(over).astype(np.int32)
        return len(self.movable.if_unheld(rows, 0, self._unstage))

    def _unstage(self, rows: Rows) -> None:
        with self._room:
            staged = rows[(self._place[rows] != NOWHERE) & (self._sizes[rows] > 0)]
            slots = self._place[staged]
            self._place[staged] = NOWHERE
            self.give_staging(slots)

    def write_image(self, chain: StoredChain, number: int, out: npt.NDArray[np.uint8]) -> None:
        """The sealed image of encoded block *number* of *chain*, as it is, to *out* ``uint8 [slot_bytes]``."""
        spec, coder, row = self.spec, self.coder, int(chain.rows[number])
        assert spec is not None
        assert coder is not None
        data = self._data(row)
        body = out[spec.header_bytes : spec.header_bytes + round_up(len(data), PAGE)]
        body[: len(data)] = data
        body[len(data) :] = 0
        header = Header(
            identity_digest=chain.identity_digest,
            key=chain.keys[number].tobytes(),
            parent_key=chain.parents[number].tobytes(),
            tokens=chain.token_blocks[number],
            extras=chain.extras[number].tobytes(),
            payload_bytes=len(data),
            payload_checksum=checksum(data.data),
            layout=Layout.of_code(int(chain.layout[number])).value,
            fidelity=Fidelity(int(chain.fidelity[number])),
            generation=int(chain.codings[number]),
            codec=coder.name,
            codec_params=self._params[row],
        )
        pack_header(header, spec.header_bytes, out.data)
