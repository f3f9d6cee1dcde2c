"""What the tests of this room share: caches of a few blocks over a directory, and their ledger at a glance."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvcache_factory.backend import CPUBackend, DiskBackend, HierarchicalBackend, Level
from kvcache_factory.block.identity import Identity
from kvcache_factory.block.spec import BlockSpec
from kvcache_factory.engine.lasting import LastingTier
from kvcache_factory.keyspace import KeySpace
from kvcache_factory.manager import CacheManager
from kvcache_factory.store.disk import DiskStore
from kvcache_factory.testing import FakeEngine, sized_level, tiny_identity, tiny_spec

SPEC = tiny_spec()
BLOCK = SPEC.block_tokens
SEGMENT_SLOTS = 116
"""Blocks that fit into the smallest segment, one MiB."""

PATIENCE_S = 60.0
"""How long tests wait for what must happen."""

Kind = Literal["cpu", "gpu", "three"]


class DiskCache:
    """A manager with a disk as its last level, its one key space, and an engine to go with them."""

    def __init__(self, manager: CacheManager, space: KeySpace, blocks: int = 64) -> None:
        self.manager = manager
        self.space = space
        self.engine = FakeEngine(space.spec, blocks)

    @property
    def disk(self) -> LastingTier:
        """The last tier."""
        tier = self.manager._chain.tiers[-1]
        assert isinstance(tier, LastingTier)
        return tier

    @property
    def store(self) -> DiskStore:
        """The last tier's store."""
        assert isinstance(self.disk.store, DiskStore)
        return self.disk.store

    def begin_save(self, tokens: Any, **options: Any) -> int:
        """Compute and store the blocks of *tokens*, which go down in the background; returns how many were new."""
        chain = self.space.chain(tokens)
        return self.space.save(chain, self.engine.region, self.engine.compute(chain), **options)

    def save(self, tokens: Any, **options: Any) -> int:
        """As :meth:`begin_save`, and wait until they are below."""
        stored = self.begin_save(tokens, **options)
        assert self.manager.wait(PATIENCE_S)
        return stored

    def load(self, tokens: Any, request_id: str = "request") -> int:
        """Match, load and release; every block that is said to be loaded must be right.  Returns how many were."""
        chain = self.space.chain(tokens)
        match = self.space.match(chain, request_id)
        self.engine.erase()
        count = self.space.load(match, self.engine.region, self.engine.positions(match.blocks))
        self.space.release(request_id)
        assert self.engine.versions(chain, count) == [0] * count, "wrong bytes"
        return count

    def load_in_vain(self, tokens: Any) -> int:
        """As :meth:`load`, waiting for a moment only: for reads that hang."""
        with self.waiting(0.05):
            return self.load(tokens)

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Loads wait at most *seconds*; outside they wait for as long as a busy machine may need."""
        flow = self.manager._chain.flow
        patient = flow.settings.max_wait_s
        for wait_s in (seconds, patient):
            flow.settings = msgspec.structs.replace(flow.settings, max_wait_s=wait_s)
            for fetcher in flow._fetchers.values():
                fetcher._max_wait_s = wait_s
            if wait_s == seconds:
                yield

    def matched(self, tokens: Any) -> int:
        """Blocks of *tokens* that a look-up promises."""
        match = self.space.match(self.space.chain(tokens), "look")
        self.space.release("look")
        return match.blocks

    def forget_above(self) -> None:
        """Empty every level above the disk, where its blocks stay."""
        self.manager.wait()
        for number, tier in enumerate(self.manager._chain.tiers[:-1]):
            self.manager._chain.evict(tier.index.capacity, number)
        self.manager.wait()

    def counted(self, event: str, tier: str = "disk") -> dict[str, int]:
        """Blocks that were counted under *event*, by reason."""
        rows = self.manager.state()["events"]
        return {row["reason"]: row["blocks"] for row in rows if (row["tier"], row["event"]) == (tier, event)}

    def errors(self) -> dict[str, int]:
        """What was caught on its way to the engine, by kind."""
        rows = self.manager.state()["events"]
        return {row["reason"]: row["times"] for row in rows if (row["tier"], row["event"]) == ("manager", "error")}


def open_cache_over(
    path: Path | str,
    *,
    kind: Kind = "cpu",
    dram: int = 16,
    device: int = 8,
    disk_mb: float = 4,
    spec: BlockSpec = SPEC,
    identity: Identity | None = None,
    prepare: Callable[[CacheManager], object] | None = None,
    manager_options: dict[str, Any] | None = None,
    marks: tuple[float, float] = (1.0, 1.0),
    **disk_options: Any,
) -> DiskCache:
    """A cache with *dram* blocks in memory, and in *device* memory where *kind* has that, over a directory."""
    disk = DiskBackend(str(path), size_gb=disk_mb / 1024, segment_mb=1, **disk_options)
    levels: list[Level] = []
    if kind != "cpu":
        levels.append(sized_level(device, spec, device=True))
    if kind != "gpu":
        level = sized_level(dram, spec)
        assert isinstance(level, CPUBackend)
        levels.append(level)
    backend = HierarchicalBackend([*levels, disk], demote_at=marks[0], demote_to=marks[1])
    manager = CacheManager(backend, **(manager_options or {}))
    flow = manager._chain.flow
    flow.settings = msgspec.structs.replace(flow.settings, max_wait_s=PATIENCE_S)
    if prepare is not None:
        prepare(manager)
    return DiskCache(manager, manager.register(spec, identity or tiny_identity(spec)))


def tokens_of(conversation: int, blocks: int) -> list[int]:
    """Tokens of the first *blocks* blocks of a conversation; conversations share no block."""
    return [conversation * 100_000 + i for i in range(blocks * BLOCK)]


def files(path: Path, suffix: str) -> list[Path]:
    """Files of a directory with a suffix, such as ``.data``."""
    return sorted(p for p in path.iterdir() if p.name.endswith(suffix))


def used_bytes(path: Path) -> int:
    """Bytes that the files of a directory take on the disk or claim in their sizes, whichever is more."""
    sizes = []
    for entry in os.scandir(path):
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue
        sizes.append(max(status.st_size, 512 * status.st_blocks if status.st_size > 4096 else 0))
    return sum(sizes)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Invert one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def find(path: Path, pattern: bytes) -> list[tuple[Path, int]]:
    """Where *pattern* begins in the data files of a directory."""
    found = []
    for file in files(path, ".data"):
        data, at = file.read_bytes(), -1
        while (at := data.find(pattern, at + 1)) >= 0:
            found.append((file, at))
    return found


def image_offsets(path: Path, key: bytes) -> list[tuple[Path, int]]:
    """Data file and offset of every slot image with a *key*."""
    return [(file, at - 48) for file, at in find(path, key) if at % 4096 == 48]


class Gate:
    """Holds the next call of a method of one object, before or after it does its work, until the gate is opened."""

    def __init__(self, owner: Any, name: str, when: Literal["before", "after"] = "before") -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._real = getattr(owner, name)
        self._when = when
        self._lock = threading.Lock()
        self._used = False
        setattr(owner, name, self._call)

    def _call(self, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            hold, self._used = not self._used, True
        if hold and self._when == "before":
            self._stand()
        result = self._real(*arguments, **options)
        if hold and self._when == "after":
            self._stand()
        return result

    def _stand(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE_S), "nobody has opened the gate"

    def wait(self) -> None:
        """Until the call stands at the gate."""
        assert self.reached.wait(PATIENCE_S), "nobody has come to the gate"

    def open(self) -> None:
        """Let it pass."""
        self._open.set()


def in_background(job: Callable[[], Any]) -> Callable[[], Any]:
    """Start *job* in a thread; returns what waits for its end and gives its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(job()), daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert results, "it has failed"
        return results[0]

    return join
