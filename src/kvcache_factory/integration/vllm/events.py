"""KV events: which of an engine's blocks the host holds too, in vLLM's own words and under its own hashes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ...block.plan import SavePlan
from ...engine.table import Keys
from .requests import TrackedRequest

LOOK_EVERY_S = 1.0
"""How often it is looked for what has left."""

MAX_KNOWN = 1 << 20
"""Blocks whose leaving is announced; of more, the oldest are forgotten."""


class EventLog:
    """Announces blocks that are stored and blocks that have left.

    Parameters
    ----------
    parts, engine_tokens:
        Engine blocks of a storage block, and tokens of each.
    present:
        Which of keys ``[n, 2]`` are held, as booleans ``[n]``.
    """

    def __init__(
        self,
        parts: int,
        engine_tokens: int,
        present: Callable[[Keys], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts
        self._engine_tokens = engine_tokens
        self._present = present
        self._clock = clock
        self._looked = clock()
        self._planned: dict[int, tuple[list[bytes], list[Any]]] = {}
        self._known: OrderedDict[bytes, list[Any]] = OrderedDict()
        self._events: list[Any] = []

    def planned(self, number: int, tracked: TrackedRequest, plan: SavePlan) -> None:
        """A plan to store blocks of a request, which may be gone when it ends."""
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        request, size = tracked.request, self._engine_tokens
        hashes = [maybe_convert_block_hash(value) for value in request.block_hashes]
        lora = request.lora_request
        keys, events = [], []
        for block in range(plan.first, plan.first + len(plan.rows)):
            first, end = block * self._parts, (block + 1) * self._parts
            event = BlockStored(
                block_hashes=hashes[first:end],
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=tracked.chain.tokens[first * size : end * size].tolist(),
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.name if lora else None,
                session_id=tracked.session,
            )
            keys.append(tracked.chain.key_bytes(block))
            events.append(event)
        self._planned[number] = (keys, events)

    def ended(self, number: int, filled: int) -> None:
        """The leading *filled* blocks of a plan are stored."""
        keys, events = self._planned.pop(number, ([], []))
        for key, event in zip(keys[:filled], events[:filled], strict=True):
            self._known[key] = event.block_hashes
            self._events.append(event)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def take(self) -> list[Any]:
        """The events since the last call."""
        now = self._clock()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._look()
        events, self._events = self._events, []
        return events

    def _look(self) -> None:
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved

        if not self._known:
            return
        names = list(self._known)
        held = self._present(np.frombuffer(b"".join(names), np.uint64).reshape(-1, 2))
        gone = [hash_ for name, here in zip(names, held, strict=True) if not here for hash_ in self._known.pop(name)]
        if gone:
            self._events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU))
