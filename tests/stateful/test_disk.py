"""Memory over a disk against a plain dict: restarts, crashes in the middle of a write, and a second process.

Misses are always allowed; a block that comes back must be, byte for byte, one that was stored under its prefix.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.faults.harness import DiskCache, flip, image_offsets, open_cache_over, used_bytes

from kvcache_factory.block.key import KeyChain
from kvcache_factory.store.disk.directory import Holder

Blocks = tuple[int, ...]
conversations = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
sides = st.integers(0, 1)


class DiskMachine(RuleBasedStateMachine):
    """One or two managers over one directory; ``may`` holds every version that was ever stored under a prefix.

    With one manager, what was dropped or purged must not come back: ``may`` forgets it.
    """

    processes: ClassVar[int]
    disk_mb: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvcache-factory-"))
        self.path = self.root / "kv"
        self.caches = [self._open() for _ in range(self.processes)]
        self.dead: list[DiskCache] = []
        self.may: dict[Blocks, set[int]] = {}
        self.version = 0

    def _open(self) -> DiskCache:
        return open_cache_over(self.path, dram=8, disk_mb=self.disk_mb)

    def _cache(self, side: int) -> DiskCache:
        return self.caches[side % self.processes]

    def _chain(self, cache: DiskCache, blocks: Blocks) -> KeyChain:
        return cache.space.chain([10 * block + i for block in blocks for i in range(cache.space.block_tokens)])

    def _store(self, cache: DiskCache, blocks: Blocks, session: str | None = None) -> None:
        self.version += 1
        chain = self._chain(cache, blocks)
        for end in range(1, len(blocks) + 1):
            self.may.setdefault(blocks[:end], set()).add(self.version)
        positions = cache.engine.compute(chain, self.version)
        cache.space.save(chain, cache.engine.region, positions, session=session)
        assert cache.manager.wait(60)

    def _forget(self, prefix: Blocks) -> None:
        if self.processes == 1:
            for known in [p for p in self.may if p[: len(prefix)] == prefix]:
                del self.may[known]

    # -- what engines do ----------------------------------------------------------------------------------------------

    @rule(side=sides, blocks=conversations)
    def save(self, side: int, blocks: Blocks) -> None:
        """Store what is missing."""
        self._store(self._cache(side), blocks)

    @rule(side=sides, blocks=conversations)
    def load(self, side: int, blocks: Blocks) -> None:
        """What comes back was stored under this prefix."""
        cache = self._cache(side)
        chain = self._chain(cache, blocks)
        match = cache.space.match(chain, "r")
        cache.engine.erase()
        count = cache.space.load(match, cache.engine.region, cache.engine.positions(match.blocks))
        cache.space.release("r")
        allowed = [self.may.get(blocks[: end + 1], set()) for end in range(count)]
        got = cache.engine.versions(chain, count, set().union(*allowed))
        assert all(version in these for version, these in zip(got, allowed, strict=True)), (got, allowed)

    @rule(side=sides, count=st.integers(1, 8))
    def evict(self, side: int, count: int) -> None:
        """Memory is needed for something else."""
        self._cache(side).manager.evict(count)

    @rule(side=sides, blocks=conversations)
    def prefetch(self, side: int, blocks: Blocks) -> None:
        """Bring up ahead."""
        cache = self._cache(side)
        cache.space.prefetch(self._chain(cache, blocks))

    @rule(side=sides)
    def refresh(self, side: int) -> None:
        """Look at what the other has done."""
        self._cache(side).manager.refresh()

    # -- what is asked to go ------------------------------------------------------------------------------------------

    @rule(side=sides, blocks=conversations)
    def drop(self, side: int, blocks: Blocks) -> None:
        """Gone, with all that was built on it, also after a restart."""
        cache = self._cache(side)
        cache.space.drop(self._chain(cache, blocks), len(blocks) - 1)
        self._forget(blocks)

    @rule(side=sides, blocks=conversations, others=conversations)
    def purge(self, side: int, blocks: Blocks, others: Blocks) -> None:
        """A session comes, stores on a prefix of its own, and goes."""
        cache = self._cache(side)
        private: Blocks = (3, *blocks)
        cache.manager.create_session("s")
        self._store(cache, private, session="s")
        self._store(cache, others)
        cache.manager.destroy_session("s", purge=True)
        self._forget((3,))

    @precondition(lambda self: self.processes == 1)
    @rule(blocks=conversations)
    def purged_is_gone(self, blocks: Blocks) -> None:
        """Nothing of a session that was purged is matched."""
        cache = self._cache(0)
        assert cache.space.match(self._chain(cache, (3, *blocks)), "r").blocks == 0
        cache.space.release("r")

    # -- what happens to processes and files --------------------------------------------------------------------------

    @rule(side=sides)
    def restart(self, side: int) -> None:
        """Closed in order and opened again."""
        number = side % self.processes
        self.caches[number].manager.close()
        self.caches[number] = self._open()

    @rule(side=sides, blocks=conversations, step=st.sampled_from(["rest", "data", "torn"]))
    def crash(self, side: int, blocks: Blocks, step: str) -> None:
        """Abandoned: at rest, after the data was written and before the log, or with half an image written."""
        number = side % self.processes
        cache = self.caches[number]
        if step != "rest":
            for segment in cache.store._open.own():
                segment.append = lambda records: None  # type: ignore[method-assign]
            self._store(cache, blocks)
        if step == "torn":
            for file, at in image_offsets(self.path, self._chain(cache, blocks).key_bytes(0)):
                flip(file, at + 4100)
        pool = cache.store._open
        holders: list[Holder] = [pool.presence, *pool.segments.values()]
        for holder in holders:
            holder.let_go()
        self.dead.append(cache)
        self.caches[number] = self._open()

    @rule(side=sides, blocks=conversations, bit=st.integers(0, 8 * 4864 - 1))
    def flip_a_bit(self, side: int, blocks: Blocks, bit: int) -> None:
        """Anywhere in the image of a block on the disk."""
        for file, at in image_offsets(self.path, self._chain(self._cache(side), blocks).key_bytes(len(blocks) - 1)):
            flip(file, at + bit // 8, bit % 8)

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        """No invariant is broken, nothing is leased, no failure was swallowed, and the budget is kept."""
        for cache in self.caches:
            assert cache.manager.wait(60)
            assert cache.manager.check() == []
            assert cache.manager.state()["leases"] == 0
            assert cache.errors() == {}
        assert used_bytes(self.path) <= self.disk_mb << 20

    def teardown(self) -> None:
        """Everything can leave, and a fresh process finds nothing wrong."""
        self.sound()
        for cache in self.caches:
            cache.forget_above()
            assert cache.manager._chain.tiers[0].index.used == 0
        for cache in [*self.caches, *self.dead]:
            cache.manager.close()
        shutil.rmtree(self.root)


class OneProcess(DiskMachine):
    """What is dropped stays away."""

    processes = 1


class TwoProcesses(DiskMachine):
    """Each sees what the other stores, sooner or later."""

    processes = 2


class TwoProcessesAndLittleRoom(DiskMachine):
    """The second to come has to wait for its share."""

    processes = 2
    disk_mb = 1


FEW = settings(max_examples=25, stateful_step_count=20)


class TestOneProcess(OneProcess.TestCase):
    settings = FEW


class TestTwoProcesses(TwoProcesses.TestCase):
    settings = FEW


class TestTwoProcessesAndLittleRoom(TwoProcessesAndLittleRoom.TestCase):
    settings = FEW
