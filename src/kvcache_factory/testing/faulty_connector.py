"""A connector that fails on schedule: it raises, hangs, answers nonsense, damages values, or is dead for a while."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import msgspec

from ..connector.base import Connector, ConnectorFeature, MemoryRegion
from ..status import Status
from .faults import Fail, Flip

if TYPE_CHECKING:
    import torch


class Hang(msgspec.Struct, frozen=True):
    """Wait until :meth:`FaultyConnector.let_go`, then do it: late, into memory that was lent long ago."""


class Answer(msgspec.Struct, frozen=True):
    """Answer *value*, whatever that is, and do nothing."""

    value: Any = None


class FaultyConnector(Connector[bytes, Any]):
    """Another connector, with faults.

    Operations are the names of the methods: ``open``, ``close``, ``exists``, ``get``, ``put``, ``delete``, ``mget``,
    ``mput``.  Calls are counted in :attr:`calls`; :attr:`schedule`, from an operation and the number of its call to
    Fail, Hang, Answer, Flip or None, may be replaced at any time, and so may :attr:`dead`.
    """

    def __init__(self, inner: Connector[bytes, Any], schedule: Any = None) -> None:
        self.inner = inner
        self.schedule = schedule or (lambda op, call: None)
        self.dead = False
        self.calls: Counter[str] = Counter()
        self._released: Future[None] = Future()

    def let_go(self) -> None:
        """Let everything go on that hangs, and hang no more until :meth:`hold`."""
        self._released.set_result(None)

    def hold(self) -> None:
        """Let later calls hang again."""
        self._released = Future()

    def _begin(self, op: str) -> Any:
        call = self.calls[op]
        self.calls[op] += 1
        if self.dead:
            raise ConnectionError(f"dead ({op} {call})")
        fault = self.schedule(op, call)
        if isinstance(fault, Fail):
            raise fault.error(f"{fault.message} ({op} {call})")
        return fault

    async def _do(self, op: str, *arguments: Any) -> Any:
        fault = self._begin(op)
        if isinstance(fault, Hang):
            await asyncio.wrap_future(self._released)
        if isinstance(fault, Answer):
            return fault.value
        answer = await getattr(self.inner, op)(*arguments)
        if isinstance(fault, Flip):
            regions = arguments[1] if op == "mget" else [arguments[1]]
            _flip(regions[fault.block % len(regions)], fault.bit)
        return answer

    @classmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> FaultyConnector:
        return cls(kwargs["inner"], kwargs.get("schedule"))

    @property
    def name(self) -> str:
        return f"faulty {self.inner.name}"

    @property
    def feature(self) -> ConnectorFeature:
        return self.inner.feature

    def open(self) -> Status[Any]:
        fault = self._begin("open")
        if isinstance(fault, Hang):
            self._released.result()
        answer: Status[Any] = fault.value if isinstance(fault, Answer) else self.inner.open()
        return answer

    def close(self) -> Status[Any]:
        fault = self._begin("close")
        if isinstance(fault, Hang):
            self._released.result()
        answer: Status[Any] = fault.value if isinstance(fault, Answer) else self.inner.close()
        return answer

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        return self.inner.register_slabs(slabs)

    def get_batches(
        self, keys: Sequence[Any], mrs: Sequence[MemoryRegion | Sequence[MemoryRegion]], batch_size: int
    ) -> Sequence[Sequence[tuple[bytes, MemoryRegion | Sequence[MemoryRegion]]]]:
        return self.inner.get_batches(keys, mrs, batch_size)

    async def exists(self, key: bytes) -> Status[Any]:
        answer: Status[Any] = await self._do("exists", key)
        return answer

    async def get(self, key: bytes, mr: MemoryRegion | Sequence[MemoryRegion]) -> Status[Any]:
        answer: Status[Any] = await self._do("get", key, mr)
        return answer

    async def put(self, key: bytes, mr: MemoryRegion | Sequence[MemoryRegion]) -> Status[Any]:
        answer: Status[Any] = await self._do("put", key, mr)
        return answer

    async def delete(self, key: bytes) -> Status[Any]:
        answer: Status[Any] = await self._do("delete", key)
        return answer

    async def mget(
        self, keys: Sequence[bytes], mrs: Sequence[MemoryRegion | Sequence[MemoryRegion]]
    ) -> Sequence[Status[Any]]:
        answer: Sequence[Status[Any]] = await self._do("mget", keys, mrs)
        return answer

    async def mput(
        self, keys: Sequence[bytes], mrs: Sequence[MemoryRegion | Sequence[MemoryRegion]]
    ) -> Sequence[Status[Any]]:
        answer: Sequence[Status[Any]] = await self._do("mput", keys, mrs)
        return answer


def _flip(region: MemoryRegion | Sequence[MemoryRegion], bit: int) -> None:
    part = region if isinstance(region, MemoryRegion) else region[0]
    part.view[bit // 8 % part.length] ^= 1 << bit % 8
