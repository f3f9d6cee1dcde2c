"""Made-up workloads, the same for the same seed: to judge a policy on traffic that nobody tuned it to.

Three kinds that differ in what comes back, when, and how much of it is shared.  Their figures say how policies compare,
not what a deployment would see: record that with ``CacheManager(record=...)``.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, instead_of
from .formats import TraceRequest
from .lines import Faults
from .workload import Progress, Workload

PREFIX = "synthetic:"
REQUESTS = 12_000


class Turn(NamedTuple):
    """What one session will ask next: when, for which blocks, and how it goes on."""

    at_s: float
    session: int
    blocks: list[int]


class Ids:
    """Identifiers of blocks that were never used before."""

    def __init__(self) -> None:
        self._next = 1 << 32

    def new(self, count: int) -> list[int]:
        """The next *count*."""
        self._next += count
        return list(range(self._next - count, self._next))


def _pareto(draw: random.Random, least: int, most: int, shape: float = 1.2) -> int:
    """A count with a long tail."""
    return min(most, int(least * draw.paretovariate(shape)))


def _lognormal_s(draw: random.Random, median_s: float, spread: float) -> float:
    return draw.lognormvariate(math.log(median_s), spread)


def _zipf(draw: random.Random, count: int) -> int:
    """A number below *count*, the small ones more often: popularity falls with the rank."""
    return int(count ** draw.random()) - 1


def chat(draw: random.Random, requests: int) -> Iterator[TraceRequest]:
    """Conversations of people who read and think between turns, behind one of eight system prompts.

    Half of all conversations end after one turn; whoever has gone on once is likely to go on again.
    """
    ids = Ids()
    systems = [ids.new(draw.randint(2, 12)) for _ in range(8)]
    due: list[Turn] = []
    turns: dict[int, int] = {}
    arrival, session = 0.0, 0
    for _ in range(requests):
        if not due or due[0].at_s > arrival:
            heapq.heappush(due, Turn(arrival, session, systems[_zipf(draw, 8)] + ids.new(_pareto(draw, 1, 64))))
            arrival += draw.expovariate(1 / 2.5)
            session += 1
        now = heapq.heappop(due)
        output = _pareto(draw, 60, 3000)
        turn = turns.pop(now.session, 0) + 1
        goes_on = draw.random() < min(0.93, 0.5 + 0.08 * (turn - 1))
        yield _request(now, output, 128, "unknown")
        if goes_on:
            turns[now.session] = turn
            think = _lognormal_s(draw, 75.0, 1.1) + output / 40
            grown = now.blocks + ids.new(output // 128 + _pareto(draw, 1, 16, 1.6))
            heapq.heappush(due, Turn(now.at_s + think, now.session, grown))


def agents(draw: random.Random, requests: int) -> Iterator[TraceRequest]:
    """Coding agents: long sessions of quick tool calls behind shared tools, with a person's pause now and then.

    A context that has grown too long is summed up: its tail is written anew behind the tools.
    """
    ids = Ids()
    tools = [ids.new(draw.randint(16, 40)) for _ in range(4)]
    due: list[Turn] = []
    heads: dict[int, int] = {}
    arrival, session = 0.0, 0
    for _ in range(requests):
        if not due or due[0].at_s > arrival:
            head = tools[_zipf(draw, 4)]
            heads[session] = len(head)
            heapq.heappush(due, Turn(arrival, session, head + ids.new(_pareto(draw, 2, 60))))
            arrival += draw.expovariate(1 / 180)
            session += 1
        now = heapq.heappop(due)
        output = _pareto(draw, 40, 4000)
        kind = draw.random()
        calls_tool = kind < 0.88
        yield _request(now, output, 512, "tool_pending" if calls_tool else "unknown")
        if kind > 0.985:
            del heads[now.session]
            continue
        pause = _lognormal_s(draw, 6.0, 0.9) if calls_tool else _lognormal_s(draw, 240.0, 1.3)
        blocks = now.blocks + ids.new(max(1, output // 512) + _pareto(draw, 1, 30, 1.4) - 1)
        if len(blocks) > 300:
            blocks = blocks[: heads[now.session]] + ids.new(12)
        heapq.heappush(due, Turn(now.at_s + pause + output / 60, now.session, blocks))


def rag(draw: random.Random, requests: int) -> Iterator[TraceRequest]:
    """Questions about documents that many ask about: two of two thousand, the more popular first; news fade.

    No session returns: what comes back is the beginning that others have in common.
    """
    ids = Ids()
    system = ids.new(3)
    documents = [ids.new(_pareto(draw, 4, 60)) for _ in range(2000)]
    at_s = 0.0
    for number in range(requests):
        at_s += draw.expovariate(1 / 0.8)
        if draw.random() < 0.02:  # a new document is the talk of the day
            documents.insert(draw.randint(0, 20), ids.new(_pareto(draw, 4, 60)))
            documents.pop()
        chosen = sorted({_zipf(draw, len(documents)) for _ in range(2)})
        blocks = [*system, *(block for which in chosen for block in documents[which]), *ids.new(1)]
        yield _request(Turn(at_s, number, blocks), _pareto(draw, 80, 1200), 256, "ended")


def _request(turn: Turn, output: int, block_tokens: int, reuse: str) -> TraceRequest:
    blocks = np.array(turn.blocks, np.uint64)
    return TraceRequest(turn.at_s, blocks, len(blocks) * block_tokens, output, 0, turn.session, reuse)


Generator = Callable[[random.Random, int], Iterator[TraceRequest]]
_KINDS: dict[str, tuple[Generator, int]] = {"agents": (agents, 512), "chat": (chat, 128), "rag": (rag, 256)}
KINDS = tuple(_KINDS)


def make_workload(
    name: str, *, seed: int = 1, requests: int = REQUESTS, progress: Progress = lambda done, total: None
) -> Workload:
    """The workload of kind *name*, with or without ``synthetic:`` before it; ConfigError for another kind.

    The same seed gives the same requests everywhere.
    """
    kind = name.removeprefix(PREFIX)
    if kind not in _KINDS:
        raise ConfigError(f"there is no synthetic workload {kind!r}; {instead_of(kind, _KINDS)}")
    generate, block_tokens = _KINDS[kind]
    workload = Workload(f"{PREFIX}{kind}", block_tokens, Faults())
    try:
        for number, request in enumerate(generate(random.Random(seed), requests)):
            workload.add(request)
            if number % 256 == 0:
                progress(number, requests)
        return workload.finish()
    except BaseException:
        workload.close()
        raise
