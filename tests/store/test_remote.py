"""How a connector is hosted: calls follow its features, on one loop thread, entered once for each batch."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest
from tests.servers import until

from kvcache_factory.connector import Connector, ConnectorFeature, MemoryRegion, Status, StatusCodes
from kvcache_factory.connector.base import OptionsConnector
from kvcache_factory.errors import StoreError
from kvcache_factory.memory.device import DeviceSlab
from kvcache_factory.memory.slab import Slab
from kvcache_factory.store.breaker import Breaker
from kvcache_factory.store.remote import RemoteSettings, RemoteStore
from kvcache_factory.store.threads import DaemonExecutor
from kvcache_factory.testing import tiny_spec

SPEC = tiny_spec()
NAMES = [b"name/%d" % n for n in range(8)]
ROWS = np.arange(8, dtype=np.int32)


class Watched(Connector[bytes, Any]):
    """Notes every call: its name, how much it was given, and in which thread."""

    def __init__(self, feature: ConnectorFeature) -> None:
        self._feature = feature
        self.values: dict[bytes, bytes] = {}
        self.lent: dict[bytes, bytearray] = {}
        self.calls: list[tuple[str, int]] = []
        self.threads: set[int] = set()
        self.regions: list[Any] = []
        self.slabs: list[Any] = []

    def note(self, call: str, blocks: int = 1) -> None:
        self.calls.append((call, blocks))
        self.threads.add(threading.get_ident())

    @classmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> Watched:
        raise AssertionError("made by the test")

    @property
    def name(self) -> str:
        return "watched"

    @property
    def feature(self) -> ConnectorFeature:
        return self._feature

    def open(self) -> Status[Any]:
        return Status()

    def close(self) -> Status[Any]:
        return Status()

    def register_slabs(self, slabs: list[Any]) -> Status[Any]:
        self.slabs += slabs
        return Status()

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        self.note("prefetch", len(keys))

    async def exists(self, key: bytes) -> Status[Any]:
        self.note("exists")
        return Status(StatusCodes.OK if key in self.values else StatusCodes.NOT_FOUND)

    async def get(self, key: bytes, mr: Any) -> Status[Any]:
        self.note("get")
        return self._get(key, mr)

    def _get(self, key: bytes, mr: Any) -> Status[Any]:
        if key not in self.values:
            return Status(StatusCodes.NOT_FOUND)
        start = 0
        self.regions.append(mr)
        for region in [mr] if isinstance(mr, MemoryRegion) else mr:
            region.fill(self.values[key][start : start + region.length])
            start += region.length
        return Status()

    async def put(self, key: bytes, mr: Any) -> Status[Any]:
        self.note("put")
        return self._put(key, mr)

    def _put(self, key: bytes, mr: Any) -> Status[Any]:
        self.regions.append(mr)
        self.values[key] = b"".join(r.tobytes() for r in ([mr] if isinstance(mr, MemoryRegion) else mr))
        return Status()

    async def delete(self, key: bytes) -> Status[Any]:
        self.note("delete")
        self.values.pop(key, None)
        return Status()

    def get_batches(self, keys: Sequence[Any], mrs: Sequence[Any], batch_size: int) -> Any:
        """Cuts into batches in an order of its own, which it may."""
        pairs = list(zip(keys, mrs, strict=True))[::-1]
        return [pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)]

    async def mget(self, keys: Sequence[bytes], mrs: Sequence[Any]) -> Sequence[Status[Any]]:
        self.note("mget", len(keys))
        return [self._get(key, mr) for key, mr in zip(keys, mrs, strict=True)]

    async def mput(self, keys: Sequence[bytes], mrs: Sequence[Any]) -> Sequence[Status[Any]]:
        self.note("mput", len(keys))
        return [self._put(key, mr) for key, mr in zip(keys, mrs, strict=True)]

    async def acquire(self, keys: Sequence[bytes]) -> Sequence[Status[MemoryRegion]]:
        self.note("acquire", len(keys))
        missing: Status[MemoryRegion] = Status(StatusCodes.NOT_FOUND)
        self.lent.update({key: bytearray(self.values[key]) for key in keys if key in self.values})
        return [Status.ok(_region(self.lent[key])) if key in self.lent else missing for key in keys]

    async def release(self, keys: Sequence[bytes]) -> None:
        self.note("release", len(keys))
        for key in keys:
            del self.lent[key]

    async def alloc(self, keys: Sequence[bytes], length: int) -> Sequence[Status[MemoryRegion]]:
        self.note("alloc", len(keys))
        self.lent.update({key: bytearray(length) for key in keys if not key.endswith(b"refused")})
        full: Status[MemoryRegion] = Status(StatusCodes.OUT_OF_MEMORY)
        return [Status.ok(_region(self.lent[key])) if key in self.lent else full for key in keys]

    async def seal(self, keys: Sequence[bytes]) -> Sequence[Status[Any]]:
        self.note("seal", len(keys))
        self.values.update({key: bytes(self.lent.pop(key)) for key in keys})
        return [Status() for _ in keys]

    async def drop(self, keys: Sequence[bytes]) -> None:
        self.note("drop", len(keys))
        for key in keys:
            del self.lent[key]


def _region(data: bytearray) -> MemoryRegion:
    return MemoryRegion(np.frombuffer(data, np.uint8))


@pytest.fixture
def host() -> Iterator[Callable[..., tuple[RemoteStore, Watched, Slab]]]:
    """A store around a watched connector of some features, and memory full of numbers."""
    made: list[tuple[RemoteStore, Slab]] = []

    def make(op_batch: int = 3, **features: bool) -> tuple[RemoteStore, Watched, Slab]:
        watched = Watched(ConnectorFeature(**features))
        store = RemoteStore(lambda executor: watched, RemoteSettings(name="WATCHED", op_batch=op_batch))
        slab = Slab(8, SPEC.slot_bytes, huge_pages=False)
        slab.view[:] = np.random.default_rng(0).integers(0, 256, slab.view.shape, np.uint8)
        store.open(SPEC, [slab], 8)
        made.append((store, slab))
        return store, watched, slab

    yield make
    for store, slab in made:
        store.close()
        store.close()
        slab.close()


FEATURES: list[dict[str, bool]] = [
    {},
    {"mput_mget": True},
    {"prefetch": True, "rdma": True},
    {"zero_copy": True, "mput_mget": True},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_calls_follow_the_features(host: Any, features: dict[str, bool]) -> None:
    """What is not offered is not called; what is put comes back, in any batch order; one loop thread does it all."""
    store, watched, slab = host(**features)
    sent = slab.view.copy()
    assert store.put(NAMES, slab, ROWS, 60).count == 8
    assert store.exists([*NAMES[:5], b"absent", NAMES[5]], 60).count == 5
    slab.view[:] = 0
    done = store.get(NAMES, slab, ROWS[::-1], 60)
    assert (done.count, done.reason) == (8, "")
    assert np.array_equal(slab.view[::-1], sent)
    missing = store.get([NAMES[0], b"absent", NAMES[1]], slab, ROWS[:3], 60)
    assert (missing.count, missing.reason) == (1, "absent")
    assert store.delete(NAMES[:2], 60).count == 2
    called = {call for call, _ in watched.calls}
    assert ("prefetch" in called) == features.get("prefetch", False)
    assert bool(watched.slabs) == features.get("rdma", False)
    lends = features.get("zero_copy", False)
    assert bool(called & {"acquire", "release", "alloc", "seal"}) == lends
    assert bool(called & {"mget", "mput"}) == (features.get("mput_mget", False) and not lends)
    assert bool(called & {"get", "put"}) == (not features.get("mput_mget") and not lends)
    assert len(watched.threads) == 1
    assert threading.get_ident() not in watched.threads
    assert watched.lent == {}


def test_no_call_is_larger_than_a_batch(host: Any) -> None:
    """And none is made for a single block where the store can batch."""
    store, watched, slab = host(op_batch=3, mput_mget=True)
    store.put(NAMES, slab, ROWS, 60)
    store.get(NAMES, slab, ROWS, 60)
    assert [call for call in watched.calls if call[0] in ("mput", "mget")] == [
        ("mput", 3), ("mput", 3), ("mput", 2), ("mget", 3), ("mget", 3), ("mget", 2)
    ]  # fmt: skip


def test_the_loop_is_entered_once_for_a_batch(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks it has."""
    store, _, slab = host()
    entered: Counter[str] = Counter()
    enter = store._loop.enter
    monkeypatch.setattr(store._loop, "enter", lambda coroutine: (entered.update(["enter"]), enter(coroutine)))
    store.put(NAMES, slab, ROWS, 60)
    store.get(NAMES, slab, ROWS, 60)
    store.exists(NAMES, 60)
    assert entered["enter"] == 3
    assert store.get([], slab, ROWS[:0], 60).count == 0
    assert entered["enter"] == 3


def test_a_value_is_one_region_or_with_gdr_header_and_payload(host: Any) -> None:
    """The whole slot image; from a device, its header lies in host memory."""
    store, watched, slab = host(gdr_put=True, gdr_get=True)
    store.put(NAMES[:1], slab, ROWS[:1], 60)
    (whole,) = watched.regions
    assert isinstance(whole, MemoryRegion)
    assert whole.length == SPEC.slot_bytes
    device = DeviceSlab(2, SPEC.slot_bytes - SPEC.header_bytes)
    device.view[1] = 7
    store.put(NAMES[1:2], device, ROWS[1:2], 60, (slab, ROWS[2:3]))
    header, payload = watched.regions[-1]
    assert (header.length, payload.length) == (SPEC.header_bytes, device.slot_bytes)
    assert watched.values[NAMES[1]] == slab.view[2, : SPEC.header_bytes].tobytes() + bytes([7]) * device.slot_bytes
    assert store.takes_device_memory("put")
    assert store.takes_device_memory("get")
    device.close()


def test_a_refused_loan_ends_the_run_and_nothing_stays_lent(host: Any) -> None:
    """Zero copy: what was lent and not used goes back."""
    store, watched, slab = host(zero_copy=True)
    done = store.put([NAMES[0], b"refused", NAMES[1]], slab, ROWS[:3], 60)
    assert (done.count, done.reason) == (1, "full")
    assert set(watched.values) == {NAMES[0]}
    assert watched.lent == {}


# -- connectors that do what no documentation allows ------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["exists", "get", "put", "delete"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration])
def test_what_would_end_the_program_ends_one_call(
    host: Any, monkeypatch: pytest.MonkeyPatch, verb: str, error: type[BaseException]
) -> None:
    """A client that calls exit must not take along the loop that every other call needs."""
    store, watched, slab = host()
    watched.values.update({name: bytes(SPEC.slot_bytes) for name in NAMES})

    def leave(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(watched, verb, leave)
    memory = (slab, ROWS) if verb in ("get", "put") else ()
    done = getattr(store, verb)(NAMES, *memory, 60)
    assert (done.done, done.count, done.reason) == (True, 0, "error")
    monkeypatch.undo()
    assert store.exists(NAMES, 60).count == 8


def test_calls_that_have_begun_end_before_the_batch_does(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a later call of the batch fails where it is made: their memory is in use until they have ended."""
    store, watched, slab = host(op_batch=8)
    futures: list[Future[Status[Any]]] = []
    begun = threading.Event()

    def get(key: bytes, mr: Any) -> Any:
        if len(futures) == 2:
            begun.set()
            raise OSError("no more")
        futures.append(Future())
        return asyncio.wrap_future(futures[-1])

    monkeypatch.setattr(watched, "get", get)
    done = store.get(NAMES[:3], slab, ROWS[:3], 0.001)
    assert begun.wait(60)
    assert not done.wait(0)
    for future in futures:
        future.set_result(Status())
    assert done.wait(60)
    assert (done.count, done.reason, done.detail) == (2, "error", "OSError: no more")


def test_a_failed_call_is_told_once_a_minute(
    host: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes a connector must see what is wrong with it."""
    store, watched, _ = host()

    async def exists(key: bytes) -> Any:
        return True

    monkeypatch.setattr(watched, "exists", exists)
    for _ in range(3):
        store.exists(NAMES, 60)
    assert [record.getMessage() for record in caplog.records] == ["connector WATCHED: a call failed: bool: True"]


def test_a_connector_that_cannot_be_made_is_a_failure_to_open() -> None:
    """With a sentence that says which one, and why."""
    store = RemoteStore(lambda executor: 1 // 0, RemoteSettings(name="BROKEN"))  # type: ignore[arg-type, return-value]
    with pytest.raises(StoreError, match=r"connector BROKEN could not be opened \(ZeroDivisionError"):
        store.open(SPEC, [], 8)
    store.close()


def test_describing_a_store_starts_nothing() -> None:
    """No thread and no connector before open(); a store that was never opened refuses and closes."""
    before = threading.active_count()
    store = RemoteStore(lambda executor: pytest.fail("made too early"), RemoteSettings(name="X"))
    assert threading.active_count() == before
    assert store.exists(NAMES, 1).reason == "closed"
    store.close()


class Counting(Watched, OptionsConnector):
    """Looks up batches, and answers as often as a test says."""

    batched_lookups = True
    answers = 0

    async def mexists(self, keys: Sequence[bytes]) -> Sequence[Status[Any]]:
        return [Status()] * self.answers


@pytest.mark.parametrize(("answers", "count"), [(0, 0), (2, 2), (3, 8), (4, 8)])
def test_an_answer_that_is_missing_is_a_failure_and_one_too_many_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, answers: int, count: int
) -> None:
    """Those of later calls must not take the place of the missing one."""
    monkeypatch.setattr(Counting, "answers", answers)
    store = RemoteStore(lambda _: Counting(ConnectorFeature()), RemoteSettings(name="COUNTING", op_batch=3))
    slab = Slab(8, SPEC.slot_bytes, huge_pages=False)
    store.open(SPEC, [slab], 8)
    try:
        done = store.exists(NAMES, 60)
        assert (done.count, done.reason) == (count, "" if count == len(NAMES) else "error")
    finally:
        store.close()
        slab.close()


def test_a_closed_store_refuses_and_leaves_no_thread(host: Any) -> None:
    """Its loop and its threads have ended."""
    store, _, slab = host()
    store.close()
    assert store.put(NAMES, slab, ROWS, 60).reason == "closed"
    assert not store._loop._thread.is_alive()


# -- breaker and threads ----------------------------------------------------------------------------------------------


def test_failures_in_a_row_open_the_breaker() -> None:
    """One success begins the count anew; trials wait longer each time, up to a bound."""
    breaker = Breaker(failures=3, cooldown_s=1.0, longest_s=3.0)
    assert [breaker.failed(), breaker.failed(), breaker.succeeded()] == [False, False, False]
    assert [breaker.failed(), breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True, False]
    assert breaker.is_open
    assert [breaker.next_trial_s() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert breaker.succeeded()
    assert not breaker.is_open
    assert breaker.next_trial_s() == 1.0
    assert breaker.openings == 1


def test_a_caller_without_time_says_nothing_about_the_store(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one who leaves before the store could answer, until it is known what came of the call."""
    store, watched, slab = host()
    for _ in range(2 * store.breaker.failures):
        done = store.get(NAMES, slab, ROWS, 0.0)
        assert (done.done, done.count, done.reason) == (True, 0, "timeout")
    assert watched.calls == []

    def left_early(answer: Status[Any]) -> None:
        future: Future[Status[Any]] = Future()
        monkeypatch.setattr(watched, "exists", lambda _: asyncio.wrap_future(future))
        done = store.exists(NAMES[:1], 0.001)
        assert not done.done
        assert not store.breaker.is_open
        future.set_result(answer)
        assert done.wait(60)

    for answer in (Status(), Status(StatusCodes.ERROR)):
        for _ in range(store.breaker.failures):
            left_early(answer)
    until(lambda: store.breaker.openings == 1, "the last failure is counted")


def test_the_executor_runs_jobs_on_daemon_threads() -> None:
    """At most so many at once; results and exceptions come back; what hangs keeps nothing alive."""
    executor = DaemonExecutor(2, "test")
    gate, running = threading.Event(), threading.Semaphore(0)

    def job(n: int) -> int:
        running.release()
        gate.wait()
        return n

    futures = [executor.submit(job, n) for n in range(5)]
    assert running.acquire(timeout=60)
    assert running.acquire(timeout=60)
    named = [t for t in threading.enumerate() if t.name.startswith("test-")]
    assert len(named) == 2
    assert all(t.daemon for t in named)
    gate.set()
    assert [f.result(60) for f in futures] == list(range(5))
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 // 0).result(60)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(job, 1)
    assert not any(t.is_alive() for t in named)
