"""``bench policy``: what one block costs in each eviction policy, at work in an index that is full."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import jit
from ..engine.index import Index
from ..policy.base import EvictionPolicy, Keys, RequestHint, Rows, Unlink
from ..policy.names import known_policies, make_policy
from .measure import Progress, quiet

ROWS = 16_384
SESSIONS = 1_024
PROMPT_BLOCKS, TURN_BLOCKS = 16, 8
ROOT = -2
_NEEDS = {"hybrid": {"policies": ["lru", "s3fifo"]}}


def run_policy(progress: Progress | None = None, quick: bool = False) -> list[dict[str, Any]]:
    """Rows ``policy``, ``us_per_block`` (CPU time in it by blocks asked for), ``bytes_per_row`` (with ghosts)."""
    progress = progress or quiet
    names = sorted(known_policies())
    jit.warm_up()
    rows = []
    for number, name in enumerate(names):
        progress(number, len(names), name)
        costs = [
            _cost(make_policy(name, **_NEEDS.get(name, {})), 400 if quick else 4_000) for _ in range(1 if quick else 3)
        ]
        cost = statistics.median(us for us, _ in costs)
        rows.append({"policy": name, "us_per_block": round(cost, 3), "bytes_per_row": round(costs[0][1], 1)})
    progress(len(names), len(names))
    return rows


def _cost(policy: EvictionPolicy, requests: int) -> tuple[float, float]:
    """Microseconds a block, and bytes a row, over *requests* turns of chats that come and go."""
    timed = Timed(policy)
    now = 0.0
    index = Index(ROWS, 0, timed, lambda: now)
    random = np.random.default_rng(0)
    chats = [PROMPT_BLOCKS] * SESSIONS
    begins = np.arange(SESSIONS) << 32
    asked = 0
    for turn in range(requests + 1_000):
        if turn == 1_000:  # by now it is full, and the policy has seen blocks come back
            timed.ns, asked = 0, 0
        now += 0.3
        # Most turns are of chats that were active lately; a chat that has grown long begins anew.
        chat = int(random.exponential(SESSIONS / 8)) % SESSIONS
        chats[chat] += TURN_BLOCKS
        if chats[chat] > 128:
            chats[chat], begins[chat] = PROMPT_BLOCKS, begins[chat] + (1 << 20)
        asked += chats[chat]
        _request(index, _Blocks(begins[chat] + np.arange(chats[chat])))
    return timed.ns / 1e3 / asked, book_bytes(policy) / ROWS


def book_bytes(thing: object, seen: set[int] | None = None) -> int:
    """Bytes of the arrays and containers that hang from *thing*; an array that is a view counts as what it shows."""
    seen = set() if seen is None else seen
    if id(thing) in seen or thing is None:
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes if thing.base is None else 0
    if isinstance(thing, dict):
        return sys.getsizeof(thing) + sum(book_bytes(part, seen) for part in (*thing, *thing.values()))
    if isinstance(thing, (list, tuple)):
        return sys.getsizeof(thing) + sum(book_bytes(part, seen) for part in thing)
    return sum(book_bytes(part, seen) for part in vars(thing).values()) if hasattr(thing, "__dict__") else 32


def _request(index: Index, chain: Any) -> None:
    found = index.match(chain, ROOT, chain.num_blocks).rows
    new = index.reserve(chain, ROOT, 0, chain.num_blocks).rows
    index.commit(new)
    if len(new) or len(found):
        index.finish(int((new if len(new) else found)[-1]), 100)
    if len(found):
        index.unpin(int(found[-1]))


class _Blocks:
    """A chain of numbered blocks without tokens."""

    def __init__(self, numbers: npt.NDArray[np.int64]) -> None:
        words = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.keys = np.stack((words ^ (words >> np.uint64(29)), numbers.astype(np.uint64)), axis=1)
        self.num_blocks = len(numbers)
        self.extras = np.zeros((len(numbers), 2), np.uint64)
        self.token_blocks = np.zeros((len(numbers), 0), np.uint32)
        self.memo: dict[int, Any] = {}


class Timed(EvictionPolicy):
    """Passes everything on to *inner* and adds up the CPU time that it takes, the index's unlinking included."""

    def __init__(self, inner: EvictionPolicy) -> None:
        super().__init__()
        self.inner = inner
        self.ns = 0

    def _time(self, call: Any, *arguments: Any) -> Any:
        begun = time.thread_time_ns()
        answer = call(*arguments)
        self.ns += time.thread_time_ns() - begun
        return answer

    def bind(self, rows: int, keys: Keys) -> None:
        self.inner.bind(rows, keys)

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        self._time(self.inner.on_request, now, rows, hit_len, hint)

    def on_finish(self, rows: Rows, output_tokens: int) -> None:
        self._time(self.inner.on_finish, rows, output_tokens)

    def on_evictable(self, row: int, evictable: bool) -> None:
        self._time(self.inner.on_evictable, row, evictable)

    def forget(self, row: int) -> None:
        self._time(self.inner.forget, row)

    def make_room(self, now: float, keys: Keys, hint: RequestHint, unlink: Unlink) -> tuple[int, list[int]]:
        answer: tuple[int, list[int]] = self._time(self.inner.make_room, now, keys, hint, unlink)
        return answer

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        answer: list[int] = self._time(self.inner.victims, count, unlink)
        return answer

    def next_victim(self) -> int:
        return self.inner.next_victim()
