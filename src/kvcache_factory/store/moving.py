"""Batches on the loop: calls follow the connector's features, and values move in the pieces of their batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import msgspec

from ..connector.base import Connector, MemoryRegion, OptionsConnector
from ..status import Status
from .answers import Answers, after, leading, together
from .lent import get_lent, put_lent
from .pieces import Pieces

Regions = MemoryRegion | Sequence[MemoryRegion]


class Moves(msgspec.Struct, frozen=True):
    """The calls to one connector, at most *op_batch* blocks together."""

    connector: Connector[bytes, Any]
    executor: Executor
    op_batch: int

    async def each(self, verb: str, names: Sequence[bytes]) -> Answers:
        """As many names together as belong to a batch, up to the first batch with a gap."""
        connector, step, done = self.connector, self.op_batch, Answers(0)
        single = getattr(connector, verb)
        whole = isinstance(connector, OptionsConnector) and connector.batched_lookups
        for start in range(0, len(names), step):
            part = names[start : start + step]
            if whole:
                answers = await _batch(getattr(connector, f"m{verb}"), part)
            else:
                answers = await together([partial(single, name) for name in part])
            done = after(done, leading(answers))
            if done.reason:
                break
        return done

    async def get(self, names: Sequence[bytes], regions: Sequence[Regions], pieces: Pieces) -> Answers:
        """Fill *regions*."""
        if self.connector.feature.prefetch:
            await self.connector.prefetch(names)
        if self.connector.feature.zero_copy:
            return leading(await get_lent(self.connector, self.executor, names, regions))
        return await self._move("get", names, regions, pieces)

    async def put(self, names: Sequence[bytes], regions: Sequence[Regions], pieces: Pieces) -> Answers:
        """Store *regions*."""
        if not self.connector.feature.zero_copy:
            return await self._move("put", names, regions, pieces)
        refused = await pieces.turn(len(names) - 1)  # one loan for all, so that all must be ready
        return refused or leading(await put_lent(self.connector, self.executor, names, regions))

    async def _move(self, verb: str, names: Sequence[bytes], regions: Sequence[Regions], pieces: Pieces) -> Answers:
        if not self.connector.feature.mput_mget:
            return await self._move_singly(verb, names, regions, pieces)
        call, done = getattr(self.connector, f"m{verb}"), Answers(0)
        if region_by_region(self.connector):
            done = await self._move_batches(call, names, regions)
            return after(Answers(done.count), pieces.refusal) if pieces.not_ready and done.reason == "timeout" else done
        for part in pieces.parts:
            refused = await pieces.turn(part.start)
            done = after(done, refused or await self._move_batches(call, names[part], regions[part]))
            for block in range(part.start, done.count):
                pieces.came(block)
            if done.reason:
                break
        return done

    async def _move_batches(self, call: Any, names: Sequence[bytes], regions: Sequence[Regions]) -> Answers:
        """Batches as the connector cuts them, which need not keep the order."""
        found: dict[bytes, object] = {}
        for batch in self.connector.get_batches(names, regions, self.op_batch):
            keys = [key for key, _ in batch]
            answers = await _batch(call, keys, [region for _, region in batch])
            found.update(zip(keys, answers, strict=True))
            if not all(isinstance(a, Status) and a.is_ok() for a in answers):
                break
        return leading([found.get(name) for name in names])

    async def _move_singly(
        self, verb: str, names: Sequence[bytes], regions: Sequence[Regions], pieces: Pieces
    ) -> Answers:
        """A call for each block, made as soon as its piece is ready, and so many at the same time."""
        call, done = getattr(self.connector, verb), Answers(0)

        async def move(block: int) -> object:
            refused = await pieces.turn(block)
            if refused:
                return refused
            answer = await call(names[block], regions[block])
            if isinstance(answer, Status) and answer.is_ok():
                pieces.came(block)
            return answer

        for start in range(0, len(names), self.op_batch):
            stop = min(start + self.op_batch, len(names))
            done = after(done, leading(await together([partial(move, block) for block in range(start, stop)])))
            if done.reason:
                break
        return done


async def _batch(call: Callable[..., Awaitable[Any]], keys: Sequence[bytes], *rest: Any) -> list[Any]:
    """One answer for each block of a batch; what the call raises stands for all of them, and for none before them."""

    async def answered() -> list[Any]:
        return list(await call(keys, *rest))

    [answers] = await together([answered])
    if isinstance(answers, BaseException):
        return [answers] * len(keys)
    return [*answers, *[None] * len(keys)][: len(keys)]


def region_by_region(connector: Connector[bytes, Any] | None) -> bool:
    """Whether the connector itself takes regions when they are ready, and says when they have come."""
    if not isinstance(connector, OptionsConnector) or not connector.region_by_region:
        return False
    feature = connector.feature  # others have values of several regions, or move them by calls that do not wait
    return feature.mput_mget and not (feature.zero_copy or feature.gdr_put or feature.gdr_get)
