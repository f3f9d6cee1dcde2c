"""OffloadingManager: blocks as tensors in and out, answers as statuses, over one tier, a disk or a remote level."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_factory import (
    CacheManager,
    ClosedError,
    ConfigError,
    CPUBackend,
    DiskBackend,
    GPUBackend,
    HierarchicalBackend,
    OffloadingManager,
    RemoteBackend,
)
from kvcache_factory.connector.mock import MockConnector, MockOptions, forget
from kvcache_factory.environment import PREFIX
from kvcache_factory.status import StatusCodes
from kvcache_factory.testing import FakeEngine, sized_level, tiny_identity, tiny_spec

SPEC = tiny_spec(block_tokens=4)
SHAPE = (SPEC.num_layers, 2, 4, SPEC.num_kv_heads, SPEC.head_dim)


def blocks(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Blocks of recognisable numbers."""
    return [torch.full(SHAPE, float(seed * 100 + i)) + torch.arange(24 * 8).reshape(SHAPE) / 1e3 for i in range(count)]


class Opened:
    """Opens managers and closes them; when the test has ended, none may have broken an invariant."""

    def __init__(self) -> None:
        self.made: list[OffloadingManager] = []

    def __call__(self, backend: Any = None, **options: Any) -> OffloadingManager:
        manager = CacheManager(backend or sized_level(16, SPEC), **options)
        self.made.append(OffloadingManager(SPEC, tiny_identity(SPEC), manager, max_wait_s=60))
        return self.made[-1]


@pytest.fixture
def opened() -> Iterator[Opened]:
    opener = Opened()
    yield opener
    for made in opener.made:
        made.manager.wait(60)
        leases, problems = made.manager.state()["leases"], made.manager.check()
        made.manager.close()
        assert (leases, problems) == (0, [])


def two_levels(path: Path) -> HierarchicalBackend:
    return HierarchicalBackend([sized_level(8, SPEC), DiskBackend(str(path), size_gb=0.01, segment_mb=1)])


def values(cache: OffloadingManager, prefix: Any, query: Any) -> list[torch.Tensor]:
    """What acquire gives, as copies."""
    acquired = cache.acquire(prefix, query)
    if acquired.is_not_found():
        return []
    tokens, handle = acquired.get()
    with handle:
        assert tokens == handle.num_tokens == 4 * len(handle)
        return [tensor.clone() for tensor in handle.to_tensors()]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


LEVELS = {
    "memory": lambda _: sized_level(16, SPEC),
    "device": lambda _: sized_level(16, SPEC, device=True),
    "disk": two_levels,
}


@pytest.fixture(params=sorted(LEVELS))
def cache(request: pytest.FixtureRequest, opened: Opened, tmp_path: Path) -> OffloadingManager:
    return opened(LEVELS[request.param](tmp_path / "blocks"))


def test_what_was_put_is_acquired(cache: OffloadingManager) -> None:
    """Bit for bit, and only its leading run; a query of other tokens finds nothing."""
    assert cache.exists(None, range(20)).is_not_found()
    assert cache.put(None, range(20), blocks(5)).get() == 20
    assert cache.exists(None, range(20)).get() == 20
    assert cache.exists(None, [*range(10), 99, 99]).get() == 8
    assert same(values(cache, None, range(20)), blocks(5))
    assert same(values(cache, None, range(11)), blocks(2))
    assert values(cache, None, range(1, 20)) == []


def test_a_prefix_says_what_comes_before(cache: OffloadingManager) -> None:
    """Put and acquired in pieces, blocks are the same as in one."""
    assert cache.put((), range(8), blocks(2)).get() == 8
    assert cache.put(range(8), range(8, 20), blocks(5)[2:]).get() == 12
    assert same(values(cache, None, range(20)), blocks(5))
    assert same(values(cache, torch.arange(8), torch.arange(8, 20)), blocks(5)[2:])
    assert cache.acquire(range(16), [7, 7, 7, 7]).is_not_found()
    landing = [torch.zeros(SHAPE) for _ in range(4)]
    assert cache.get(range(8), range(8, 30), landing).get() == 12
    assert same(landing[:3], blocks(5)[2:])
    assert not landing[3].any()


def test_memory_is_allocated_filled_and_put(cache: OffloadingManager) -> None:
    """Without a copy: what is written into the handle is what is acquired; stored blocks need no memory."""
    cache.put(None, range(8), blocks(2))
    handle = cache.allocate_for(None, range(20)).get()
    assert (handle.start, handle.num_tokens, len(handle)) == (8, 12, 3)
    assert cache.exists(None, range(20)).get() == 8  # invisible until it is put
    for tensor, block in zip(handle.to_tensors(), blocks(5)[2:], strict=True):
        tensor.copy_(block)
    assert cache.put(None, range(20), handle).get() == 20
    with pytest.raises(ClosedError):
        handle.to_tensors()
    assert same(values(cache, None, range(20)), blocks(5))
    nothing = cache.allocate_for(None, range(20)).get()
    assert (nothing.start, len(nothing)) == (20, 0)
    assert cache.put(None, range(20), nothing).get() == 20


def test_fewer_blocks_may_be_put_than_were_allocated(cache: OffloadingManager) -> None:
    """A shorter query keeps the leading ones; the others' memory goes back."""
    handle = cache.allocate_for(None, range(16)).get()
    for tensor, block in zip(handle.to_tensors(), blocks(4), strict=True):
        tensor.copy_(block)
    assert cache.put(None, range(8), handle).get() == 8
    assert same(values(cache, None, range(16)), blocks(2))
    assert cache.put(None, range(16), [*blocks(2), *blocks(4)[2:3]]).get() == 12


def test_handles_that_are_not_used_give_their_memory_back(opened: Opened) -> None:
    """Released, left by a with, or forgotten: the slots are free again, and acquired blocks can leave."""
    cache = opened(sized_level(4, SPEC))
    for give_back in (lambda h: h.release(), lambda h: h.__exit__(), lambda h: None):
        handle = cache.allocate_for(None, range(16)).get()
        assert len(handle) == 4
        assert cache.allocate_for(None, range(50, 54)).error_code is StatusCodes.OUT_OF_MEMORY
        give_back(handle)
        del handle
        gc.collect()
    handle = cache.allocate_for(None, range(16)).get()
    assert [cache.put(None, range(16), handle).get() for _ in range(2)] == [16, 16]  # the second finds them stored
    held = cache.acquire(None, range(16)).get()[1]
    assert cache.put(None, range(50, 54), blocks(1)).error_code is StatusCodes.OUT_OF_MEMORY
    held.release()
    held.release()
    assert cache.put(None, range(50, 54), blocks(1)).get() == 4


def test_a_gap_is_refused(cache: OffloadingManager) -> None:
    """A block whose prefix is not stored could never be used."""
    status = cache.put(range(8), range(8, 12), blocks(1))
    assert status.is_denied()
    assert "prefix" in str(status.value)


def test_blocks_are_deleted_with_what_was_built_on_them(cache: OffloadingManager) -> None:
    """Behind the prefix everything is gone, before it nothing."""
    cache.put(None, range(20), blocks(5))
    cache.flush()
    assert cache.delete(range(8), range(8, 12)).get() >= 3
    assert cache.exists(None, range(20)).get() == 8


def test_what_is_only_on_the_disk_comes_back(opened: Opened, tmp_path: Path) -> None:
    """More than memory holds, and after a restart: acquired through memory, a prefix below it is no gap."""
    cache = opened(two_levels(tmp_path / "blocks"))
    for seed in range(4):
        assert cache.put(None, range(seed, seed + 16), blocks(4, seed)).get() == 16
        assert cache.flush().is_ok()
    for seed in range(4):
        assert same(values(cache, None, range(seed, seed + 16)), blocks(4, seed))
    cache.manager.close()
    again = opened(two_levels(tmp_path / "blocks"))
    assert again.prefetch(None, range(16)).is_ok()
    assert same(values(again, None, range(16)), blocks(4, 0))
    assert again.put(range(1, 17), range(17, 21), blocks(5, 1)[4:]).get() == 4
    assert same(values(again, None, range(1, 21)), blocks(5, 1))


def test_blocks_of_engines_are_handed_out_in_one_order(opened: Opened) -> None:
    """What an engine stored heads first is a view with tokens first: same numbers, no copy."""
    cache = opened()
    engine = FakeEngine(SPEC, kind="sequence")
    chain = cache.space.chain(range(12))
    cache.space.save(chain, engine.region, engine.compute(chain))
    paged = FakeEngine(SPEC, kind="paged")
    match = cache.space.match(chain, "r")
    assert cache.space.load(match, paged.region, paged.positions(3)) == 3
    cache.space.release("r")
    expected = [torch.from_numpy(paged._block(i).copy()).reshape(-1) for i in range(3)]
    assert same([t.contiguous().view(torch.uint8).reshape(-1) for t in values(cache, None, range(12))], expected)


def test_wrong_arguments_are_invalid(cache: OffloadingManager) -> None:
    """Never an exception: the value says what is wrong."""
    wrong: list[Any] = [
        cache.acquire([1, 2, 3], range(4)),
        cache.exists(None, [-1]),
        cache.exists(None, "text"),
        cache.put(None, range(4), [torch.zeros(3)]),
        cache.put(None, range(4), [torch.zeros(SHAPE, dtype=torch.float16)]),
        cache.get(None, range(4), [torch.zeros(3)]),
        cache.delete([1], range(4)),
    ]
    assert {status.error_code for status in wrong} == {StatusCodes.INVALID}
    assert all(isinstance(status.value, Exception) for status in wrong)
    handle = cache.allocate_for(None, range(4)).get()
    assert cache.put(None, range(1, 5), handle).is_invalid()
    assert cache.put(None, range(4), handle).get() == 4  # the right tokens still can be put
    acquired = cache.acquire(None, range(4)).get()[1]
    assert cache.put(None, range(4), acquired).is_invalid()
    acquired.release()


def test_after_close_every_call_is_an_error(opened: Opened) -> None:
    """Nothing hangs and nothing is raised."""
    cache = opened()
    cache.put(None, range(4), blocks(1))
    assert cache.close().is_ok()
    assert cache.close().is_ok()
    for status in (cache.exists(None, range(4)), cache.acquire(None, range(4)), cache.flush()):
        assert status.is_error()


def test_chunks_are_whole_blocks_and_at_least_four(opened: Opened) -> None:
    """CHUNK_SIZE is rounded down to a block multiple; pieces follow each other without a gap."""
    assert [opened(chunk_tokens=n).chunk_size for n in (0, 4, 16, 23, 24)] == [512, 16, 16, 20, 24]
    cache = opened(chunk_tokens=16)
    assert cache.block_size == 4
    pieces = [(list(prefix), list(query)) for prefix, query in cache.chunks([0, 1, 2, 3], range(4, 40))]
    assert pieces == [(list(range(at)), list(range(at, min(at + 16, 40)))) for at in (4, 20, 36)]
    assert cache.put(None, range(4), blocks(1)).get() == 4
    for number, (prefix, query) in enumerate(cache.chunks([0, 1, 2, 3], range(4, 40))):
        assert cache.put(prefix, query, blocks(10)[1 + 4 * number : 5 + 4 * number]).get() == len(query)
    assert same(values(cache, None, range(40)), blocks(10))


def test_the_environment_describes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a manager of one's own: MAX_SEQ_LEN, sizes and all; closed with the object."""
    monkeypatch.setenv(PREFIX + "L1_CACHE_CAPACITY_GB", "0.01")
    monkeypatch.setenv(PREFIX + "MAX_SEQ_LEN", "10")
    with OffloadingManager(SPEC, tiny_identity(SPEC)) as cache:
        assert cache.put(None, range(20), blocks(5)).get() == 8
        assert cache.exists(None, range(20)).get() == 8
        manager = cache.manager
    assert not manager.state()["open"]


def test_another_block_size_than_the_managers_is_refused() -> None:
    """BLOCK_SIZE says what the blocks of this deployment are."""
    with CacheManager(sized_level(4, SPEC), block_tokens=8) as manager, pytest.raises(ConfigError, match="8 tokens"):
        OffloadingManager(SPEC, tiny_identity(SPEC), manager)


class Outside:
    """What a remote level of mocks holds."""

    def __init__(self, share: str) -> None:
        self.share = share

    def backend(self, ingestion: Any, blocks: int = 16) -> HierarchicalBackend:
        level = RemoteBackend(
            connector="MOCK",
            options={"share": self.share},
            ingestion=ingestion,
            double_get_blocks=0,
            double_get_ratio=0,
        )
        return HierarchicalBackend([sized_level(blocks, SPEC), level])

    def count(self) -> int:
        connector = MockConnector(MockOptions(share=self.share))
        connector.open()
        assert connector._values is not None
        return len(connector._values)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    yield Outside(str(tmp_path))
    forget(str(tmp_path))


@pytest.mark.parametrize(("ingestion", "expected"), [("all", (8, 8, 8)), ("hot", (0, 8, 8)), ("evicted", (0, 0, 0))])
def test_what_is_ingested_when(opened: Opened, outside: Outside, ingestion: str, expected: tuple[int, ...]) -> None:
    """Blocks outside after a put of eight, a first read and a second one; then what leaves memory is written, too."""
    cache = opened(outside.backend(ingestion))
    assert cache.put(None, range(32), blocks(8)).get() == 32
    assert cache.flush(60).is_ok()
    counts = [outside.count()]
    for _ in range(2):
        assert same(values(cache, None, range(32)), blocks(8))
        assert cache.flush(60).is_ok()
        counts.append(outside.count())
    assert tuple(counts) == expected
    assert cache.manager.evict(3) == 3
    assert cache.flush(60).is_ok()
    assert outside.count() == (3 if ingestion == "evicted" else 8)


def test_another_process_finds_what_is_outside(opened: Opened, outside: Outside) -> None:
    """Nothing in its memory: exists, acquire and get bring it in, delete takes it out."""
    writer = opened(outside.backend("all"))
    assert writer.put(None, range(32), blocks(8)).get() == 32
    assert writer.flush(60).is_ok()
    reader = opened(outside.backend("all"))
    assert reader.exists(None, range(32)).get() == 32
    assert same(values(reader, None, range(32)), blocks(8))
    assert reader.put(range(32), range(32, 36), blocks(9)[8:]).get() == 4
    third = opened(outside.backend("all"))
    reader.flush(60)
    assert third.put(range(36), range(36, 40), blocks(10)[9:]).get() == 4  # its prefix is outside, and is no gap
    assert third.delete(range(16), range(16, 32)).is_ok()
    assert third.flush(60).is_ok()
    assert opened(outside.backend("all")).exists(None, range(32)).get() == 16


def test_without_the_first_tier_the_remote_one_serves(opened: Opened, outside: Outside) -> None:
    """L1 off: put passes through the staging area, acquire reads from outside."""
    level = outside.backend("all").levels[1]
    cache = opened(HierarchicalBackend([CPUBackend(staging=True), level]))
    assert cache.put(None, range(32), blocks(8)).get() == 32
    assert cache.flush(60).is_ok()
    assert outside.count() == 8
    other = opened(HierarchicalBackend([CPUBackend(staging=True), level]))
    assert same(values(other, None, range(32)), blocks(8))


def test_a_device_first(opened: Opened, outside: Outside) -> None:
    """Payloads without headers: tensors on that device, and the remote level below it."""
    levels = [
        GPUBackend(device="cpu", size_gb=sized_level(16, SPEC, device=True).size_gb),
        outside.backend("all").levels[1],
    ]
    cache = opened(HierarchicalBackend(levels))
    assert cache.put(None, range(32), blocks(8)).get() == 32
    assert cache.flush(60).is_ok()
    assert same(values(opened(HierarchicalBackend(levels)), None, range(32)), blocks(8))
