"""The engine's own tiers with nothing in them: stores that hold no bytes, a mover that moves none, no threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from ..block.identity import Identity
from ..block.spec import BlockSpec
from ..engine.index import Index
from ..engine.io import IOPool, Lane, Ticket
from ..engine.ledger import Ledger
from ..engine.mover import Mover
from ..engine.table import Keys
from ..engine.tier import Tier
from ..memory.region import BlockPositions, Region
from ..policy.base import EvictionPolicy
from ..store.base import SlotMemory, Slots, Store


class TraceChain:
    """The blocks of one request as the index wants them: keys, and records without tokens."""

    __slots__ = ("extras", "found_fidelity", "identity", "keys", "memo", "num_blocks", "token_blocks")

    def __init__(self, identity: Identity, keys: Keys, zeros: Keys, no_tokens: npt.NDArray[np.uint32]) -> None:
        self.identity = identity
        self.keys = keys
        self.num_blocks = len(keys)
        self.extras = zeros[: len(keys)]
        self.token_blocks = no_tokens[: len(keys)]
        self.memo: dict[int, Any] = {}
        self.found_fidelity = 0


class StillStore(Store):
    """Slots without bytes."""

    name: ClassVar[str] = "still"

    def open(self, spec: BlockSpec, slots: int) -> None:
        pass

    def slot_bytes(self, spec: BlockSpec) -> int:
        return spec.slot_bytes

    @property
    def memory(self) -> SlotMemory | None:
        return cast(SlotMemory, self)

    def write(self, slots: Slots, source: SlotMemory, source_slots: Slots, source_offset: int) -> int:
        return len(slots)

    def read(self, slots: Slots, target: SlotMemory, target_slots: Slots, target_offset: int) -> int:
        return len(slots)

    def close(self) -> None:
        pass


class StillTier(Tier):
    """A tier of *rows* blocks, of which only the index is there."""

    def __init__(
        self, name: str, rows: int, policy: EvictionPolicy, ledger: Ledger, clock: Callable[[], float]
    ) -> None:
        super().__init__(name, StillStore(), policy, 0, ledger, clock)
        self._rows = rows

    def open(self, spec: BlockSpec) -> None:
        self._index = Index(self._rows, 0, self.policy, self._clock)
        self.spec = spec
        self.block_bytes = row_bytes(spec)
        self.budget_bytes = self._rows * self.block_bytes


def row_bytes(spec: BlockSpec) -> int:
    """Bytes that a block takes in a tier, its share of the index included."""
    return spec.slot_bytes + Index.bytes_per_row(spec.block_tokens)


class StillMover(Mover):
    """Copies nothing."""

    @staticmethod
    def layout_code(tag: Any) -> int:
        return 0

    def gather_into(
        self, memory: SlotMemory, payload_offset: int, slots: Any, region: Region, positions: BlockPositions
    ) -> None:
        pass

    def scatter(
        self,
        memory: SlotMemory,
        payload_offset: int,
        slots: Any,
        codes: npt.NDArray[np.uint8],
        region: Region,
        positions: BlockPositions,
    ) -> None:
        pass


class StillPool(IOPool):
    """Runs background jobs when it is told to, in this thread: a background that has always caught up."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        super().__init__(0, 1 << 30, on_error)

    def run(self) -> None:
        """Run what waits, loads first, until nothing does."""
        for ticket in self._waiting():
            ticket.run()
            if ticket.error is not None:
                self._on_error(ticket.error)

    def _waiting(self) -> Iterator[Ticket]:
        while self.pending:
            yield next(self._lanes[lane] for lane in Lane if self._lanes[lane]).popleft()

    def wait(self, timeout: float | None = None) -> bool:
        self.run()
        return True

    def close(self) -> None:
        self.run()
        super().close()


class _Nowhere:
    """Engine tensors that are not there."""

    tag = "LCND"


NOWHERE = cast(Region, _Nowhere())


def positions(count: int) -> BlockPositions:
    """Places of *count* blocks in :data:`NOWHERE`."""
    return cast(BlockPositions, range(count))
