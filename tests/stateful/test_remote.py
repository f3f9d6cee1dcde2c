"""Two managers over one remote store against plain sets: any order of calls, with faults."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.engine.remote_harness import SHARE, RemoteCache, remote_cache

from kvcache_factory.connector import mock
from kvcache_factory.connector.mock import MockConnector, MockOptions
from kvcache_factory.engine.remote import RemoteLevel
from kvcache_factory.status import Status, StatusCodes
from kvcache_factory.store.breaker import Breaker
from kvcache_factory.store.remote import RemoteStore
from kvcache_factory.testing import Answer, Fail, FaultyConnector, Flip

Blocks = tuple[int, ...]
"""A conversation as the numbers of its blocks: equal beginnings are equal prefixes."""
POOL: list[Blocks] = [(0,), (0, 1, 2), (0, 1, 2, 0, 1), (0, 1, 2, 0, 1, 2, 2, 2), (0, 1, 0, 0), (1, 1, 1, 1), (1, 2)]
conversations = st.sampled_from(POOL)
managers = st.sampled_from([0, 1])
FAULTS = [Fail(ConnectionError), Answer(None), Answer(Status(StatusCodes.NOT_FOUND)), Answer(Status()), Flip(9, 1)]


class RemoteMachine(RuleBasedStateMachine):
    """``there`` and ``here`` hold prefixes that have no excuse to be missing remotely and in a manager's memory.

    Bytes that come back are those of their prefix, always: what was damaged on its way is a miss.
    """

    def __init__(self) -> None:
        super().__init__()
        mock.forget(SHARE)
        self.connectors: list[FaultyConnector] = []
        more = {"ingestion": "all", "op_batch": 3, "double_get_blocks": 0, "double_get_ratio": 0.0}
        self.caches: list[RemoteCache] = [remote_cache(prepare=self._prepare, **more) for _ in range(2)]
        self.there: set[Blocks] = set()
        self.here: list[set[Blocks]] = [set(), set()]

    def _prepare(self, level: RemoteLevel) -> None:
        connector = FaultyConnector(MockConnector(MockOptions(share=SHARE)))
        self.connectors.append(connector)
        store = level.store
        assert isinstance(store, RemoteStore)
        store._make = lambda executor: connector
        store.breaker = Breaker(failures=10**9)

    @staticmethod
    def _tokens(blocks: Blocks) -> list[int]:
        return [10 * block + i for block in blocks for i in range(4)]

    @rule(who=managers, blocks=conversations)
    def save(self, who: int, blocks: Blocks) -> None:
        """What is new to a manager's memory is written for the other one."""
        prefixes = [blocks[:end] for end in range(1, len(blocks) + 1)]
        cache = self.caches[who]
        new = cache.save(self._tokens(blocks))
        cache.settled()
        self.here[who] |= set(prefixes)
        self.there |= set(prefixes[len(prefixes) - new :]) if new else set()

    @rule(who=managers, blocks=conversations)
    def turn(self, who: int, blocks: Blocks) -> None:
        """Ask ahead, look up, load: the leading run of what memory and the remote store have together."""
        cache = self.caches[who]
        cache.fetch(self._tokens(blocks))
        got = cache.load(self._tokens(blocks))
        assert got == [0] * len(got)
        known = self.here[who] | self.there
        must = next((end - 1 for end in range(1, len(blocks) + 1) if blocks[:end] not in known), len(blocks))
        assert len(got) >= must
        self.here[who] |= {blocks[:end] for end in range(1, len(got) + 1)}

    @rule(who=managers, blocks=conversations, faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=4))
    def turn_with_faults(self, who: int, blocks: Blocks, faults: list[Any]) -> None:
        """Fewer blocks may come, wrong ones never; what was damaged is deleted, also where it was right."""

        def schedule(op: str, call: int) -> Any:
            fault = faults[call % len(faults)]
            return None if isinstance(fault, Flip) and op != "get" else fault

        cache = self.caches[who]
        self.connectors[who].schedule = schedule
        cache.fetch(self._tokens(blocks))
        got = cache.load(self._tokens(blocks))
        assert got == [0] * len(got)
        cache.save(self._tokens(blocks))
        cache.settled()
        self.connectors[who].schedule = lambda op, call: None
        self.there.clear()
        self.here[who] |= {blocks[:end] for end in range(1, len(blocks) + 1)}

    @rule(who=managers, count=st.integers(1, 6))
    def evict(self, who: int, count: int) -> None:
        """Memory lets go; the remote store does not."""
        if self.caches[who].manager.evict(count):
            self.here[who].clear()

    @rule(who=managers, blocks=conversations, first=st.integers(0, 2))
    def drop(self, who: int, blocks: Blocks, first: int) -> None:
        """Gone from this memory and remotely, with what this memory knew to be built on it."""
        if first >= len(blocks):
            return
        cache = self.caches[who]
        cache.space.drop(cache.space.chain(self._tokens(blocks)), first)
        remaining = {name.rsplit(b"/", 1)[1] for name in cache.settled()}
        chain = cache.space.chain(self._tokens(blocks))
        assert not {chain.key_bytes(i).hex().encode() for i in range(first, len(blocks))} & remaining
        top = blocks[: first + 1]
        self.here[who] = {p for p in self.here[who] if p[: len(top)] != top}
        self.there = {p for p in self.there if p[: len(top)] != top}

    @rule(who=managers)
    def reset(self, who: int) -> None:
        """What this manager wrote is gone."""
        self.caches[who].manager.reset()
        self.caches[who].settled()
        self.here[who].clear()
        self.there.clear()

    def teardown(self) -> None:
        """No pin was lost, no invariant broken."""
        for cache in self.caches:
            assert cache.manager.wait(60)
            assert cache.manager.check() == []
            assert cache.manager.state()["remote"]["abandoned_blocks"] == 0
            cache.manager.evict(64)
            assert cache.manager._chain.tiers[0].index.used == 0
            cache.manager.close()


class TestRemote(RemoteMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
