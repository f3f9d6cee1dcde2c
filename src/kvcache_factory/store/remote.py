"""A connector as a store: one loop thread, entered once for each batch, with deadlines and a circuit breaker.

What is put is the whole slot image, as one region, or with GDR as two: header in host memory, payload on the device.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import msgspec

from ..block.spec import BlockSpec
from ..connector.base import Connector, ConnectorFeature, MemoryRegion, OptionsConnector
from ..errors import KVCacheError, StoreError
from ..memory.device import DeviceSlab
from ..status import Status, StatusCodes
from .answers import ANYTHING, Answers, together
from .base import Operation, OutsideStore, SlotMemory, Slots
from .breaker import Breaker
from .moving import Moves, Regions, region_by_region
from .pieces import Pieces
from .threads import DaemonExecutor, LoopThread

_log = logging.getLogger("kvcache_factory")
LOG_EVERY_S = 60.0
_PROBE = b"kvcache-factory/probe"
Work = Callable[[Moves], Coroutine[Any, Any, Answers]]

_HARMLESS = frozenset({"", "absent", "invalid", "full"})
"""Reasons with which a server has answered."""
_OURS = "not_ready"
"""A reason that says nothing about the server."""


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a connector is driven."""

    name: str
    """What messages call it."""
    op_batch: int = 32
    """Blocks of one call where there are calls for a batch, and calls that run together where there are not."""
    piece_bytes: int = 8 << 20
    """Bytes of a batch that are prepared or checked at once, while others are on their way."""
    sent_piece_bytes: int = 64 << 20
    """The same of a put by a connector that takes regions as they get ready: work beside a call slows its sending."""
    look_bytes: int = 2 << 20
    """Bytes that are checked at once where that takes no call of its own: while they are in the processor's cache."""
    workers: int = 8
    """Threads for calls that block."""
    open_timeout_s: float = 10.0
    """Seconds that connecting may take."""
    close_timeout_s: float = 5.0
    """Seconds that what is on its way may take when the store is closed, and again disconnecting."""
    probe_timeout_s: float = 2.0
    """Seconds that a trial may take."""
    fair_s: float = 0.05
    """Seconds that a store must have had before a deadline that is over is held against it."""


class RemoteStore(OutsideStore):
    """Hosts one connector.

    Parameters
    ----------
    make:
        Makes the unopened connector, given threads for its calls that block.
    breaker:
        When to stop asking.
    """

    def __init__(
        self,
        make: Callable[[Executor], Connector[bytes, Any]],
        settings: RemoteSettings,
        breaker: Breaker | None = None,
    ) -> None:
        self.settings = settings
        self.breaker = breaker or Breaker()
        self._make = make
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connector: Connector[bytes, Any] | None = None
        self._feature = ConnectorFeature()
        self._memories: Sequence[SlotMemory] = ()
        self._in_flight = 0
        self._abandoned = 0
        self._most_abandoned = 0
        self._probing = False
        self._closed = True
        self._header_bytes = 0
        self._said: dict[str, float] = {}

    # -- open and close -----------------------------------------------------------------------------------------------

    def open(self, spec: BlockSpec, memories: Sequence[SlotMemory], most_abandoned: int) -> None:
        assert self._closed, "the store is open"
        self._header_bytes = spec.header_bytes
        self._memories = list(memories)
        self._most_abandoned = most_abandoned
        # One more than there are workers: trials and disconnecting must not wait behind calls that hang.
        self._executor = DaemonExecutor(self.settings.workers + 2, "kvcache-factory-remote")
        try:
            self._connect()
        except BaseException:
            self._executor.shutdown(wait=False)
            raise
        self._by_region = region_by_region(self._connector)
        piece_bytes = self.settings.sent_piece_bytes if self._by_region else self.settings.piece_bytes
        self._piece_blocks = -(-piece_bytes // spec.slot_bytes)
        look_bytes = self.settings.look_bytes if self._by_region else self.settings.piece_bytes
        self._look_blocks = max(look_bytes // spec.slot_bytes, 1)
        self._loop = LoopThread("kvcache-factory-remote-loop")
        self._closed = False

    def _connect(self) -> None:
        try:
            connector = self._make(self._executor)
            self._executor.submit(self._open, connector).result(self.settings.open_timeout_s)
        except TimeoutError:
            raise self._unavailable(f"no answer within {self.settings.open_timeout_s:g} s") from None
        except KVCacheError:
            raise
        except Exception as error:
            raise self._unavailable(f"{type(error).__name__}: {error}") from error
        self._connector, self._feature = connector, connector.feature

    def _open(self, connector: Connector[bytes, Any]) -> None:
        opened = connector.open()
        if not opened.is_ok():
            raise self._unavailable(str(opened))
        if connector.feature.rdma:
            registered = connector.register_slabs([slab for memory in self._memories for slab in _tensors(memory)])
            if not registered.is_ok():
                raise self._unavailable(f"memory could not be registered: {registered}")

    def _unavailable(self, why: str) -> StoreError:
        return StoreError(
            f"connector {self.settings.name} could not be opened ({why}); start its server, correct its options, or "
            "leave the remote level out",
            reason="unavailable",
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: not self._in_flight, self.settings.close_timeout_s)
        connector, self._connector = self._connector, None
        assert connector is not None
        ended = self._executor.submit(connector.close)
        try:
            ended.result(self.settings.close_timeout_s)
        except Exception as error:  # nothing can be done about it, and everything else has to end
            self._say(f"did not close: {type(error).__name__}: {error}")
        with self._lock:
            self._changed.wait_for(lambda: not self._in_flight, self.settings.close_timeout_s)
        self._loop.stop()
        self._executor.shutdown(wait=False)
        self._memories = ()

    # -- batches ------------------------------------------------------------------------------------------------------

    def exists(self, names: Sequence[bytes], deadline_s: float) -> Operation:
        return self._do(len(names), lambda moves: moves.each("exists", names), deadline_s)

    def get(
        self,
        names: Sequence[bytes],
        memory: SlotMemory,
        slots: Slots,
        deadline_s: float,
        headers: tuple[SlotMemory, Slots] | None = None,
        check: Callable[[slice], object] | None = None,
    ) -> Operation:
        regions = self._regions(memory, slots, headers)
        for region in regions if self.takes_shorter else []:
            if isinstance(region, MemoryRegion):
                region.least = self._header_bytes
        pieces = Pieces(len(names), self._look_blocks, check=check)
        for block, region in enumerate(regions if self._by_region else []):
            if isinstance(region, MemoryRegion):
                region.on_come = partial(pieces.came, block)
        return self._do(len(names), lambda moves: moves.get(names, regions, pieces), deadline_s, pieces)

    def put(
        self,
        names: Sequence[bytes],
        memory: SlotMemory,
        slots: Slots,
        deadline_s: float,
        headers: tuple[SlotMemory, Slots] | None = None,
        prepare: Callable[[slice], Sequence[int] | None] | None = None,
    ) -> Operation:
        regions = self._regions(memory, slots, headers)

        def shortened(part: slice) -> None:
            sizes = prepare(part) if prepare is not None else None
            for region, size in zip(regions[part], sizes or [], strict=sizes is not None):
                assert isinstance(region, MemoryRegion), "what is stored shorter lies in one memory"
                region.length = size

        pieces = Pieces(len(names), self._piece_blocks, prepare=shortened if prepare is not None else None)
        for block, region in enumerate(regions if self._by_region else []):
            if isinstance(region, MemoryRegion):
                region.on_wait = partial(pieces.wait_for, block)
        return self._do(len(names), lambda moves: moves.put(names, regions, pieces), deadline_s, pieces)

    def delete(self, names: Sequence[bytes], deadline_s: float) -> Operation:
        return self._do(len(names), lambda moves: moves.each("delete", names), deadline_s)

    @property
    def takes_shorter(self) -> bool:
        connector = self._connector  # memory that a store lends is of one length for a whole batch
        return isinstance(connector, OptionsConnector) and connector.shorter_values and not self._feature.zero_copy

    def takes_device_memory(self, way: str) -> bool:
        """Whether values may lie in device memory on their *way*, ``"put"`` or ``"get"``."""
        return self._feature.gdr_put if way == "put" else self._feature.gdr_get

    def state(self) -> dict[str, Any]:
        connector = self._connector
        members = connector.members() if isinstance(connector, OptionsConnector) else []
        with self._lock:
            return {
                "connector": self.settings.name,
                "breaker": "open" if self.breaker.is_open else "closed",
                "breaker_openings": self.breaker.openings,
                "operations_in_flight": self._in_flight,
                "abandoned_blocks": self._abandoned,
                "out_of_service": self._abandoned > self._most_abandoned,
                "members": members,
            }

    def _do(self, blocks: int, work: Work, deadline_s: float, pieces: Pieces | None = None) -> Operation:
        """Enter the loop with one batch and wait, but not for ever; what goes on then keeps its memory."""
        operation, end = Operation(blocks), time.monotonic() + deadline_s
        pieces = pieces or Pieces(blocks, 1)
        with self._lock:
            refused = self._refusal() or ("timeout" if deadline_s <= 0 else "")
            if refused or not blocks:
                operation.end(0, refused)
                return operation
            self._in_flight += 1
            self._loop.enter(self._run(operation, work))
        if pieces.attend(operation, end):
            if trouble := pieces.not_ready or pieces.not_checked:
                self._say(f"a piece could not be prepared or checked: {trouble[:200]}", about="not_ready")
            late = pieces.late and operation.reason == "timeout"
            self._judge(_OURS if late else operation.reason, operation.detail)
            return operation
        with self._lock:
            self._abandoned += blocks
        hasty = deadline_s < self.settings.fair_s
        operation.then(lambda: self._returned(blocks, "" if pieces.late or not hasty else operation.reason))
        self._judge(_OURS if pieces.late or hasty else "timeout")
        return operation

    def _refusal(self) -> str:
        if self._closed:
            return "closed"
        if self._abandoned > self._most_abandoned:
            return "out_of_service"
        return "breaker_open" if self.breaker.is_open else ""

    def _returned(self, blocks: int, trouble: str) -> None:
        """An abandoned operation has ended, perhaps with what nobody could hold against the store before."""
        with self._lock:
            self._abandoned -= blocks
        if trouble not in _HARMLESS:
            self._judge(trouble)

    async def _run(self, operation: Operation, work: Work) -> None:
        answers = Answers(0, "error")
        try:
            answers = await work(Moves(self._open_connector, self._executor, self.settings.op_batch))
        except ANYTHING as error:
            answers = Answers(0, "error", f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._in_flight -= 1
                self._changed.notify_all()
            operation.end(answers.count, answers.reason, answers.detail)

    @property
    def _open_connector(self) -> Connector[bytes, Any]:
        if self._connector is None:
            raise StoreError("the store is closed", reason="closed")
        return self._connector

    # -- breaker ------------------------------------------------------------------------------------------------------

    def _judge(self, reason: str, detail: str = "") -> None:
        if reason in _HARMLESS:
            if not self.breaker.is_open:  # a late success of an old call proves little; a trial closes it
                self.breaker.succeeded()
            return
        if detail:
            self._say(f"a call failed: {detail[:200]}", about=reason)
        if reason not in ("closed", _OURS) and self.breaker.failed():
            self._say(f"out of order ({reason}); not asked until it answers")
            self._try_later()

    def _say(self, text: str, about: str = "") -> None:
        """One line a minute for each text, or what it is *about*: a store that comes and goes must not fill a log."""
        now, about = time.monotonic(), about or text
        if now - self._said.get(about, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._said = {about: now, **{t: s for t, s in self._said.items() if now - s < LOG_EVERY_S}}
            _log.warning("connector %s: %s", self.settings.name, text)

    def _try_later(self) -> None:
        with self._lock:
            if self._closed or self._probing:
                return
            self._probing = True
        self._loop.later(self.breaker.next_trial_s(), self._probe)

    async def _probe(self) -> None:
        reached = False
        try:
            reached = await self._answers() or await self._reconnect()
        except ANYTHING:
            reached = False
        finally:
            self._probing = False
            if reached and self.breaker.succeeded():
                self._say("answers again")
            if not reached:
                self._try_later()

    async def _answers(self) -> bool:
        trial = asyncio.ensure_future(together([partial(self._open_connector.exists, _PROBE)]))
        done, _ = await asyncio.wait([trial], timeout=self.settings.probe_timeout_s)
        if not done:
            await asyncio.wait([trial])  # one trial at a time: a call that hangs is not joined by others
            return False
        [answer] = trial.result()
        return isinstance(answer, Status) and answer.error_code in (StatusCodes.OK, StatusCodes.NOT_FOUND)

    async def _reconnect(self) -> bool:
        """Close and open the connector, where nothing is on its way with it."""
        connector = self._open_connector
        with self._lock:
            if self._in_flight:
                return False
        await self._loop.loop.run_in_executor(self._executor, connector.close)
        await self._loop.loop.run_in_executor(self._executor, self._open, connector)
        return await self._answers()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _regions(self, memory: SlotMemory, slots: Slots, headers: tuple[SlotMemory, Slots] | None) -> list[Regions]:
        whole: list[MemoryRegion] = [_region(memory, slot, memory.slot_bytes) for slot in slots.tolist()]
        if headers is None:
            return list(whole)
        host, host_slots = headers
        tops = [_region(host, slot, self._header_bytes) for slot in host_slots.tolist()]
        return [list(pair) for pair in zip(tops, whole, strict=True)]


def _region(memory: SlotMemory, slot: int, length: int) -> MemoryRegion:
    if isinstance(memory, DeviceSlab) and memory.device != "cpu":
        return MemoryRegion(memory.bytes_of(slot), 0, length)
    return MemoryRegion(memory.view.reshape(-1), slot * memory.slot_bytes, length)


def _tensors(memory: SlotMemory) -> list[Any]:
    """Flat tensors over a memory, for registering it."""
    if isinstance(memory, DeviceSlab) and memory.device != "cpu":
        return [memory.bytes_of(slot) for slot in range(memory.slots)]
    return [MemoryRegion(memory.view.reshape(-1)).slab]
