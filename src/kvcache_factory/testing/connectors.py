"""The contract of :class:`~kvcache_factory.connector.base.Connector` as tests to inherit."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch

from ..connector.base import Connector, ConnectorFeature, MemoryRegion
from ..status import Status, StatusCodes

T = TypeVar("T")
PAGE = 4096
REGIONS = 8
"""Regions in the kit's own memory, with a page that nobody may touch after each."""
KEYS = {
    "readable": b"aibrix/0f3a/5c",
    "any_bytes": bytes(range(256)),
    "one_byte": b"\0",
    "a_way_out": b"../../etc/passwd",
    "long": b"k" * 1000,
}


class ConnectorTests(ABC):
    """Subclass in a test module, implement :meth:`make_connector`, inherit the suite.

    Memory is registered first where the connector has the ``rdma`` feature, batches are tried where it has
    ``mput_mget``, sequences of regions where it has ``gdr_put`` or ``gdr_get``.
    """

    lasting: ClassVar[bool] = True
    """Whether values are still there when a connector is closed and another one opened."""
    sizes: ClassVar[Sequence[int]] = (PAGE, 16 * PAGE, 2 << 20)
    """Bytes of the values that are tried."""
    timeout_s: ClassVar[float] = 60.0
    """Seconds after which a call counts as hung; nothing is expected to come near it."""

    @abstractmethod
    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        """A connector, not yet open; each call with the same *directory* leads to the same values."""

    # -- parts of the tests -------------------------------------------------------------------------------------------

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        """Threads for calls that block."""
        with ThreadPoolExecutor(4) as executor:
            yield executor

    @pytest.fixture
    def loop(self) -> Iterator[asyncio.AbstractEventLoop]:
        """The loop that every coroutine of a connector runs on, as in a store."""
        loop = asyncio.new_event_loop()
        yield loop
        loop.close()

    @pytest.fixture(params=["page", "pages", "block"])
    def size(self, request: pytest.FixtureRequest) -> int:
        """Bytes of a value."""
        return self.sizes[["page", "pages", "block"].index(request.param) % len(self.sizes)]

    @pytest.fixture
    def memory(self, size: int) -> Memory:
        """Memory of a caller."""
        return Memory(size)

    @pytest.fixture
    def connector(self, executor: Executor, tmp_path: Path, memory: Memory) -> Iterator[Connector[bytes, Any]]:
        """The connector under test, open, with the memory registered."""
        connector = self.opened(executor, tmp_path, memory)
        yield connector
        assert connector.close().is_ok()

    def opened(self, executor: Executor, directory: Path, memory: Memory) -> Connector[bytes, Any]:
        """A connector that is ready for use."""
        connector = self.make_connector(executor, directory)
        assert connector.open().is_ok()
        if connector.feature.rdma:
            assert connector.register_slabs([memory.tensor]).is_ok()
        return connector

    @pytest.fixture
    def call(self, loop: asyncio.AbstractEventLoop) -> Call:
        """Run a coroutine to its end; one that hangs fails the test."""
        return Call(loop, self.timeout_s)

    # -- what it says of itself ---------------------------------------------------------------------------------------

    def test_it_has_a_name_and_features(self, executor: Executor, tmp_path: Path) -> None:
        """A description is known before anything is opened, and closing it is nothing."""
        connector = self.make_connector(executor, tmp_path)
        assert connector.name
        assert isinstance(connector.feature, ConnectorFeature)
        connector.close()

    def test_closing_twice_is_closing_once_and_it_opens_again(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """close() is idempotent; a level that was given up may be tried again."""
        assert connector.close().is_ok()
        assert connector.close().is_ok()
        assert connector.open().is_ok()
        if connector.feature.rdma:
            assert connector.register_slabs([memory.tensor]).is_ok()
        assert call(connector.exists(b"never")).is_not_found()

    def test_a_closed_connector_fails_at_once(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """Whatever is asked of it after close() is a failure, by status or exception, and never a hang."""
        assert call(connector.put(b"key", memory[0])).is_ok()
        connector.close()
        calls = (connector.exists(b"key"), connector.get(b"key", memory[1]), connector.put(b"key", memory[0]))
        for coroutine in (*calls, connector.delete(b"key")):
            assert failed(call, coroutine)

    def test_what_is_not_offered_is_not_implemented(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """Callers that ignore the features are told, not obeyed by accident; prefetch is harmless everywhere."""
        feature = connector.feature
        assert call(connector.prefetch([b"key"])) is None
        if not feature.rdma:
            with pytest.raises(NotImplementedError):
                connector.register_slabs([memory.tensor])
        if not feature.mput_mget:
            with pytest.raises(NotImplementedError):
                connector.get_batches([b"key"], [memory[0]], 1)
            for batch in (connector.mget, connector.mput):
                with pytest.raises(NotImplementedError):
                    call(batch([b"key"], [memory[0]]))

    # -- one value ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", list(KEYS.values()), ids=list(KEYS))
    def test_what_is_put_is_got(self, connector: Connector[bytes, Any], call: Call, memory: Memory, key: bytes) -> None:
        """Under any key, of any bytes; the source is left as it was, and so is everything around the target."""
        before = memory.bytes.copy()
        assert call(connector.exists(key)).is_not_found()
        assert call(connector.put(key, memory[0])).is_ok()
        assert call(connector.exists(key)).is_ok()
        assert np.array_equal(memory.bytes, before)
        assert call(connector.get(key, memory[3])).is_ok()
        memory.row(before, 3)[:] = memory.row(before, 0)
        assert np.array_equal(memory.bytes, before)

    def test_a_key_that_is_not_there_is_not_found(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """A miss is a value; the target is the caller's and may hold anything, its neighbours may not."""
        before = memory.bytes.copy()
        assert call(connector.get(b"absent", memory[2])).is_not_found()
        memory.row(before, 2)[:] = memory.row(memory.bytes, 2)
        assert np.array_equal(memory.bytes, before)

    def test_the_last_put_wins(self, connector: Connector[bytes, Any], call: Call, memory: Memory) -> None:
        """A value is replaced as a whole."""
        for source in (0, 1):
            assert call(connector.put(b"key", memory[source])).is_ok()
        assert call(connector.get(b"key", memory[2])).is_ok()
        assert np.array_equal(memory.row(memory.bytes, 2), memory.row(memory.bytes, 1))

    def test_keys_with_a_common_beginning_are_different_keys(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """No key stands for those that begin with it."""
        for source, key in enumerate((b"a", b"a/b", b"a/b\0")):
            assert call(connector.put(key, memory[source])).is_ok()
        assert call(connector.delete(b"a/b")).is_ok()
        assert call(connector.exists(b"a/b")).is_not_found()
        for source, key in ((0, b"a"), (2, b"a/b\0")):
            assert call(connector.get(key, memory[3])).is_ok()
            assert np.array_equal(memory.row(memory.bytes, 3), memory.row(memory.bytes, source))

    def test_what_is_deleted_is_gone(self, connector: Connector[bytes, Any], call: Call, memory: Memory) -> None:
        """Deleting what is not there is no failure."""
        assert call(connector.delete(b"key")).is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()
        assert call(connector.delete(b"key")).is_ok()
        assert call(connector.exists(b"key")).is_not_found()
        assert call(connector.get(b"key", memory[1])).is_not_found()

    def test_a_value_of_another_size_is_never_taken(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """A short or long value is no success, and nothing is written outside the region."""
        whole, half = memory[0], memory.part(1, memory.size // 2)
        assert call(connector.put(b"long", whole)).is_ok()
        assert call(connector.put(b"short", half)).is_ok()
        before = memory.bytes.copy()
        for key, target in ((b"long", memory.part(4, memory.size // 2)), (b"short", memory[5])):
            assert failed(call, connector.get(key, target))
        for row in (4, 5):
            memory.row(before, row)[:] = memory.row(memory.bytes, row)
        assert np.array_equal(memory.bytes, before)
        assert np.array_equal(memory.row(before, 4)[memory.size // 2 :], memory.original(4)[memory.size // 2 :])

    def test_a_shorter_value_is_taken_where_the_region_allows_it(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """It fills the beginning and nothing else; below the least, or without ``shorter_values``, it need not."""
        half = memory.part(0, memory.size // 2)
        assert call(connector.put(b"short", half)).is_ok()
        region, strict = memory[1], memory[2]
        region.least, strict.least = memory.size // 2, memory.size // 2 + 1
        assert failed(call, connector.get(b"short", strict))
        before = memory.bytes.copy()
        if not getattr(connector, "shorter_values", False):
            return
        assert call(connector.get(b"short", region)).is_ok()
        expected = memory.row(before, 1)
        expected[: memory.size // 2] = memory.row(before, 0)[: memory.size // 2]
        assert np.array_equal(memory.row(memory.bytes, 1), expected)

    def test_the_source_is_the_callers_again_when_the_call_ends(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """Nothing is sent later."""
        sent = memory.row(memory.bytes, 0).copy()
        assert call(connector.put(b"key", memory[0])).is_ok()
        memory.row(memory.bytes, 0)[:] = 0xEE
        assert call(connector.get(b"key", memory[1])).is_ok()
        assert np.array_equal(memory.row(memory.bytes, 1), sent)

    # -- many at once -------------------------------------------------------------------------------------------------

    def test_calls_that_run_together_do_not_mix(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """Several calls are on their way at once, on one loop, hits and misses among each other."""
        keys = [b"key/%d" % number for number in range(4)]

        async def all_of(calls: Sequence[Awaitable[Status[Any]]]) -> list[Status[Any]]:
            return list(await asyncio.gather(*calls))

        done = call(all_of([connector.put(key, memory[row]) for row, key in enumerate(keys)]))
        assert all(status.is_ok() for status in done)
        asked = [keys[3], b"absent", keys[0], keys[2]]
        done = call(all_of([connector.get(key, memory[4 + row]) for row, key in enumerate(asked)]))
        assert [status.error_code for status in done] == [
            StatusCodes.OK,
            StatusCodes.NOT_FOUND,
            StatusCodes.OK,
            StatusCodes.OK,
        ]
        for target, source in ((4, 3), (6, 0), (7, 2)):
            assert np.array_equal(memory.row(memory.bytes, target), memory.row(memory.bytes, source))

    def test_batches_are_the_single_calls(self, connector: Connector[bytes, Any], call: Call, memory: Memory) -> None:
        """One status for each pair, in order; a miss spoils no neighbour; an empty batch is a batch."""
        if not connector.feature.mput_mget:
            pytest.skip("this connector does not offer mput_mget: single calls are all it has")
        keys = [b"key/%d" % number for number in range(4)]
        assert [s.is_ok() for s in call(connector.mput(keys[:3], [memory[row] for row in range(3)]))] == [True] * 3
        done = call(connector.mget([keys[2], keys[3], keys[0]], [memory[row] for row in (4, 5, 6)]))
        assert [s.error_code for s in done] == [StatusCodes.OK, StatusCodes.NOT_FOUND, StatusCodes.OK]
        for target, source in ((4, 2), (6, 0)):
            assert np.array_equal(memory.row(memory.bytes, target), memory.row(memory.bytes, source))
        assert list(call(connector.mget([], []))) == list(call(connector.mput([], []))) == []

    def test_batches_hold_every_pair_once_and_in_order(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """Cutting loses nothing and keeps to the bound."""
        if not connector.feature.mput_mget:
            pytest.skip("this connector does not offer mput_mget: single calls are all it has")
        keys = [b"key/%d" % number for number in range(REGIONS - 1)]
        regions = [memory[row] for row in range(len(keys))]
        batches = connector.get_batches(keys, regions, 3)
        assert all(1 <= len(batch) <= 3 for batch in batches)
        assert [pair for batch in batches for pair in batch] == list(zip(keys, regions, strict=True))
        assert list(connector.get_batches([], [], 3)) == []

    def test_one_value_may_lie_in_several_regions(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """With GDR: what is gathered is one value, and can be scattered again."""
        feature = connector.feature
        if not (feature.gdr_put or feature.gdr_get):
            pytest.skip("this connector offers neither gdr_put nor gdr_get: a value is one region")
        half = memory.size // 2
        parts = [memory.part(0, half), memory.part(1, memory.size - half)]
        whole = np.concatenate([memory.row(memory.bytes, 0)[:half], memory.row(memory.bytes, 1)[: memory.size - half]])
        memory.row(memory.bytes, 2)[:] = whole
        assert call(connector.put(b"key", parts if feature.gdr_put else memory[2])).is_ok()
        into = [memory.part(4, half), memory.part(5, memory.size - half)] if feature.gdr_get else [memory[4]]
        assert call(connector.get(b"key", into if feature.gdr_get else into[0])).is_ok()
        assert b"".join(region.tobytes() for region in into) == whole.tobytes()

    # -- others -------------------------------------------------------------------------------------------------------

    def test_values_outlast_the_connection(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """What one connector stored, the next one finds."""
        if not self.lasting:
            pytest.skip("this connector says that its values go with it (lasting = False)")
        memory = Memory(PAGE)
        first = self.opened(executor, tmp_path, memory)
        assert call(first.put(b"key", memory[0])).is_ok()
        first.close()
        second = self.opened(executor, tmp_path, memory)
        assert call(second.get(b"key", memory[1])).is_ok()
        assert np.array_equal(memory.row(memory.bytes, 1), memory.row(memory.bytes, 0))
        second.close()


class Memory:
    """:data:`REGIONS` regions of *size* random bytes in one slab, each followed by a page of nobody's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._step = -(-size // PAGE) * PAGE + PAGE
        self._seed = np.random.default_rng(size).integers(0, 256, REGIONS * self._step + PAGE, np.uint8)
        unaligned = np.empty(len(self._seed) + PAGE, np.uint8)
        start = -unaligned.ctypes.data % PAGE  # as slots are, so that direct I/O and registration work
        self.bytes = unaligned[start : start + len(self._seed)]
        self.bytes[:] = self._seed
        self.tensor: torch.Tensor = torch.from_numpy(self.bytes)

    def __getitem__(self, number: int) -> MemoryRegion:
        return self.part(number, self.size)

    def part(self, number: int, length: int) -> MemoryRegion:
        """The first *length* bytes of a region."""
        assert 0 <= number < REGIONS
        return MemoryRegion(self.bytes, number * self._step, length)

    def row(self, of: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
        """The bytes of a region in *of*, which is :attr:`bytes` or a copy of it."""
        return of[number * self._step :][: self.size]

    def original(self, number: int) -> np.ndarray[Any, Any]:
        """The bytes that a region began with."""
        return self.row(self._seed, number)


class Call:
    """Runs one coroutine after the other on one loop, each to its end or to the deadline."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s

    def __call__(self, coroutine: Awaitable[T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, self._timeout_s))


def failed(call: Call, coroutine: Awaitable[Status[Any]]) -> bool:
    """Whether a call ended without success: with a status that says so, or with an exception that is no hang."""
    try:
        return not call(coroutine).is_ok()
    except TimeoutError:
        raise
    except Exception:
        return True
