"""Connectors whose client blocks: whole batches on one thread, and nothing touched after the call has ended."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.connector import ConnectorOptions, MemoryRegion
from kvcache_factory.connector.blocking import BlockingConnector, Statuses, status_of, text_key, until_done
from kvcache_factory.connector.blocking import Call as Batch
from kvcache_factory.memory.slab import Slab
from kvcache_factory.status import Status, StatusCodes
from kvcache_factory.store.remote import RemoteSettings, RemoteStore
from kvcache_factory.testing import tiny_spec
from kvcache_factory.testing.connectors import Call


class Watched(BlockingConnector):
    """Has every key; notes what it is asked, and waits where it is told to."""

    name = "watched"  # type: ignore[assignment]

    def __init__(self, conn_id: str, executor: Executor, options: Any) -> None:
        super().__init__(conn_id, executor, options)
        self.asked: Counter[tuple[str, int]] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()
        self.interrupted = 0

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def _note(self, call: Batch, verb: str, keys: Sequence[bytes]) -> Statuses:
        def interrupt() -> None:
            self.interrupted += 1
            self.gate.set()

        self.asked[verb, len(keys)] += 1
        call.on_cancel(interrupt)
        self.busy.set()
        assert self.gate.wait(60)
        self.busy.clear()
        return [Status() for _ in keys]

    def exists_all(self, call: Batch, keys: Sequence[bytes]) -> Statuses:
        return self._note(call, "exists", keys)

    def get_all(self, call: Batch, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        return self._note(call, "get", keys)

    def put_all(self, call: Batch, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        return self._note(call, "put", keys)

    def delete_all(self, call: Batch, keys: Sequence[bytes]) -> Statuses:
        return self._note(call, "delete", keys)


def test_a_store_asks_for_a_batch_in_one_call() -> None:
    """Look-ups and deletions too: eight blocks are one call, not eight."""
    made: list[Watched] = []

    def make(executor: Executor) -> Watched:
        made.append(Watched("conn", executor, ConnectorOptions()))
        return made[-1]

    store, spec, slots = RemoteStore(make, RemoteSettings(name="watched")), tiny_spec(), np.arange(8, dtype=np.int32)
    slab = Slab(8, spec.slot_bytes)
    store.open(spec, [slab], 8)
    names = [b"%d" % number for number in range(8)]
    for operation in (
        store.exists(names, 60),
        store.put(names, slab, slots, 60),
        store.get(names, slab, slots, 60),
        store.delete(names, 60),
    ):
        assert operation.wait(60)
        assert operation.count == 8
    store.close()
    assert made[0].asked == {("exists", 8): 1, ("put", 8): 1, ("get", 8): 1, ("delete", 8): 1}
    slab.close()


def test_a_cancelled_call_is_interrupted_and_waited_for(executor: Executor, call: Call) -> None:
    """The coroutine ends after the thread: its region is nobody's then."""
    connector, region = Watched("conn", executor, ConnectorOptions()), MemoryRegion(np.zeros(8, np.uint8))
    assert connector.open().is_ok()
    connector.gate.clear()

    async def give_up() -> None:
        task = asyncio.ensure_future(connector.get(b"key", region))
        while not connector.busy.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not connector.busy.is_set()

    call(give_up())
    assert connector.interrupted == 1


def test_a_call_that_cannot_be_interrupted_is_waited_for_however_often_it_is_cancelled(call: Call) -> None:
    """Cancelling twice does not let go of the memory."""

    async def give_up() -> None:
        work: Future[int] = Future()
        task = asyncio.ensure_future(until_done(asyncio.wrap_future(work), lambda: None))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        work.set_result(1)
        with pytest.raises(asyncio.CancelledError):
            await task

    call(give_up())


def test_parts_of_a_batch_are_cancelled_with_it() -> None:
    """Also those that begin afterwards."""
    batch, ended = Batch(), []
    first, second = batch.split(2)
    first.on_cancel(lambda: ended.append(1))
    batch.cancel()
    second.on_cancel(lambda: ended.append(2))
    assert ended == [1, 2]
    assert second.cancelled


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TimeoutError(), StatusCodes.TIMEOUT),
        (PermissionError(), StatusCodes.DENIED),
        (OSError(errno.ENOSPC, "full"), StatusCodes.OUT_OF_MEMORY),
        (OSError(errno.EDQUOT, "quota"), StatusCodes.OUT_OF_MEMORY),
        (MemoryError(), StatusCodes.OUT_OF_MEMORY),
        (ConnectionResetError(), StatusCodes.ERROR),
        (RuntimeError("vendor"), StatusCodes.ERROR),
    ],
)
def test_exceptions_become_statuses(error: Exception, code: StatusCodes) -> None:
    """The exception is the value, so that a log can tell more."""
    status = status_of(error)
    assert status.error_code is code
    assert status.value is error


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_names_in_text_are_one_to_one(one: bytes, other: bytes) -> None:
    """Different keys have different names, and every name is plain ASCII without a blank."""
    assert (text_key(one) == text_key(other)) == (one == other)
    assert text_key(one).isascii()
    assert " " not in text_key(one)


def test_a_list_of_regions_is_misuse(executor: Executor) -> None:
    """One region for a value: lists belong to connectors with the GDR features."""
    connector, region = Watched("conn", executor, ConnectorOptions()), MemoryRegion(np.zeros(8, np.uint8))
    assert connector.open().is_ok()
    with pytest.raises(AssertionError, match="one region"):
        asyncio.run(connector.mget([b"key"], [[region]]))
