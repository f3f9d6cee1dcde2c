"""A remote store that fails in every way: the engine goes on, nothing wrong comes back, no buffer is lost or reused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.remote_harness import SHARE, SPEC, TOKENS, RemoteCache, caches

from kvcache_factory.connector.mock import MockConnector, MockOptions
from kvcache_factory.engine.ledger import Event
from kvcache_factory.engine.remote import RemoteLevel
from kvcache_factory.engine.tree import PENDING
from kvcache_factory.errors import StoreError
from kvcache_factory.status import Status, StatusCodes
from kvcache_factory.store.breaker import Breaker
from kvcache_factory.store.remote import RemoteStore
from kvcache_factory.testing import Answer, Fail, FaultyConnector, Flip, Hang, sized_level

HASTY = {"max_wait_s": 0.2}


@pytest.fixture
def opened() -> Iterator[Callable[..., RemoteCache]]:
    """Opens caches, checks and closes them."""
    with caches() as make:
        yield make


def faulty(schedule: Any = None, **flags: bool) -> FaultyConnector:
    """MOCK with faults; all of them see the same values."""
    return FaultyConnector(MockConnector(MockOptions(share=SHARE, **flags)), schedule)


def hosting(connector: FaultyConnector, breaker: Breaker | None = None, **settings: float) -> Any:
    """Have a level host *connector*."""

    def prepare(level: RemoteLevel) -> None:
        store = level.store
        assert isinstance(store, RemoteStore)
        store._make = lambda executor: connector
        store.breaker = breaker or Breaker(failures=10**9)
        store.settings = msgspec.structs.replace(store.settings, **settings)

    return {"prepare": prepare}


def until(happened: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def always(op: str, fault: Any) -> Any:
    """Every call of *op* has this fault."""
    return lambda called, call: fault if called == op else None


WRONG = {
    "raises": Fail(ConnectionError),
    "error": Answer(Status(StatusCodes.ERROR, "no")),
    "timeout": Answer(Status(StatusCodes.TIMEOUT)),
    "denied": Answer(Status(StatusCodes.DENIED)),
    "full": Answer(Status(StatusCodes.OUT_OF_MEMORY)),
    "nothing": Answer(None),
    "nonsense": Answer(7),
    "a_list": Answer([Status()]),
}


@pytest.mark.parametrize("fault", list(WRONG.values()), ids=list(WRONG))
@pytest.mark.parametrize("op", ["exists", "get", "put", "mget", "mput"])
def test_whatever_a_connector_does_is_a_miss(opened: Any, op: str, fault: Any) -> None:
    """Counted, and the blocks in memory are served as before; when it has come to itself, so does the level."""
    flags = {"use_mput_mget": op in ("mget", "mput")}
    first = opened(ingestion="all", **hosting(faulty(always(op, fault), **flags)))
    assert first.save(TOKENS) == 8
    first.settled()
    assert first.load(TOKENS) == [0] * 8
    written = op not in ("put", "mput")
    assert bool(first.there()) == written or op == "mput"
    connector = faulty(always(op, fault), **flags)
    second = opened(**hosting(connector))
    second.fetch()
    got = second.load(TOKENS)
    assert got == [0] * len(got)
    assert len(got) <= 1 or not written
    assert second.total(Event.MISS) == 8 - len(got)
    connector.schedule = lambda op, call: None
    second.save(TOKENS)
    second.fetch()
    assert second.load(TOKENS) == [0] * 8


@pytest.mark.parametrize("extra", [-1, 1, 3])
@pytest.mark.parametrize("op", ["mget", "mput"])
def test_lists_of_a_wrong_length_are_not_believed_further_than_they_go(opened: Any, op: str, extra: int) -> None:
    """A batch call that answers for fewer or more than it was asked."""
    fault = Answer([Status()] * (8 + extra))
    first = opened(ingestion="all", **hosting(faulty(always(op, fault), use_mput_mget=True)))
    first.save(TOKENS)
    first.settled()
    second = opened(**hosting(faulty(always(op, fault), use_mput_mget=True)))
    second.fetch()
    assert second.load(TOKENS) == []  # what claims to be read was not; proving finds that out


def test_it_dies_in_the_middle(opened: Any) -> None:
    """The batches before are there, both ways."""
    connector = faulty()
    first = opened(ingestion="all", op_batch=2, **hosting(connector))
    connector.schedule = lambda op, call: Fail(ConnectionError) if op == "put" and call >= 5 else None
    first.save(TOKENS)
    assert len(first.settled()) == 5
    assert first.total(Event.STORED) == 5
    assert first.total(Event.NOT_STORED) == 3
    connector = faulty(lambda op, call: Fail(ConnectionError) if op == "get" and call >= 3 else None)
    second = opened(op_batch=2, **hosting(connector))
    second.fetch()
    assert second.load(TOKENS) == [0] * 3


def test_a_read_that_hangs_ends_in_time_and_keeps_its_slots(opened: Any) -> None:
    """The look-up ends with its deadline; what the read fills is nobody else's until the read has ended."""
    opened(ingestion="all").save(TOKENS)
    connector = faulty(always("get", Hang()))
    cache = opened(sized_level(16, SPEC), **HASTY, **hosting(connector))
    cache.fetch()
    assert cache.total(Event.MISS, "timeout") == 8
    index = cache.manager._chain.tiers[0].index
    landing = np.flatnonzero(index.state == PENDING)
    assert len(landing) == 8
    others = list(range(500, 532))
    for first in range(0, 40, 8):
        cache.save([1000 + first + i for i in range(32)])
    cache.save(others)
    assert (index.state[landing] == PENDING).all()
    assert cache.manager.state()["remote"]["abandoned_blocks"] == 8
    connector.let_go()
    until(lambda: not (index.state == PENDING).any())
    assert cache.load(others) == [0] * 8
    until(lambda: cache.manager.state()["remote"]["abandoned_blocks"] == 0)
    cache.fetch()
    assert cache.load(TOKENS) == [0] * 8


def test_a_write_that_hangs_holds_its_source(opened: Any) -> None:
    """The engine has gone on long ago; the blocks stay until the write has ended, and can leave then."""
    connector = faulty(always("put", Hang()))
    cache = opened(ingestion="all", **HASTY, **hosting(connector))
    assert cache.save(TOKENS) == 8
    assert cache.manager.wait(60)
    assert cache.total(Event.NOT_STORED, "timeout") == 8
    assert cache.manager.evict(8) == 0
    connector.let_go()
    until(lambda: cache.manager.state()["remote"]["operations_in_flight"] == 0)
    assert cache.manager.evict(8) == 8


def test_a_save_that_drives_blocks_out_does_not_wait_for_the_store(opened: Any) -> None:
    """EVICTED, and every write hangs: what leaves waits in slots of its own, and memory takes what is new."""
    connector = faulty(always("put", Hang()))
    cache = opened(sized_level(8, SPEC), ingestion="evicted", **HASTY, **hosting(connector))
    for n in range(3):
        assert cache.save([1000 * n + i for i in range(32)]) == 8
        assert cache.manager.wait(60)
    assert cache.total(Event.NOT_STORED, "timeout") >= 8
    assert cache.total(Event.NOT_STORED, "transit_full") == 0
    connector.let_go()
    until(lambda: cache.manager.state()["remote"]["operations_in_flight"] == 0)


def test_a_late_write_of_what_was_purged_does_not_stay(opened: Any) -> None:
    """Given up by its deadline, dropped with its session, and only then written: it is deleted again."""
    connector = faulty(always("put", Hang()))
    cache = opened(ingestion="all", **HASTY, **hosting(connector))
    cache.manager.create_session("secret")
    cache.save(TOKENS, session="secret")
    assert cache.manager.wait(60)
    cache.manager.destroy_session("secret", purge=True)
    assert cache.settled() == {}
    connector.let_go()
    until(lambda: cache.manager.state()["remote"]["operations_in_flight"] == 0)
    until(lambda: cache.settled() == {})
    assert connector.calls["delete"] > 8
    until(lambda: cache.manager._chain.tiers[0].index.used == 0)


def test_too_many_that_hang_put_the_level_out_of_service(opened: Any) -> None:
    """At the cap nothing more is handed to the connector; when the calls have ended, it is in service again."""
    connector = faulty(always("put", Hang()))
    cache = opened(ingestion="all", **HASTY, **hosting(connector))
    conversations = [[1000 * n + i for i in range(32)] for n in range(4)]
    for tokens in conversations:
        cache.save(tokens)
        assert cache.manager.wait(60)
    state = cache.manager.state()["remote"]
    assert state["out_of_service"]
    assert 8 < state["abandoned_blocks"] <= 16
    assert cache.total(Event.NOT_STORED, "out_of_service") == 16
    connector.let_go()
    until(lambda: not cache.manager.state()["remote"]["out_of_service"])
    cache.save(TOKENS)
    cache.settled()
    assert cache.total(Event.STORED) == 8


def test_the_breaker_opens_and_closes_by_itself(opened: Any) -> None:
    """A dead server is not asked any more, and found again without anybody asking."""
    opened(ingestion="all").save(TOKENS)
    connector = faulty()
    cache = opened(**hosting(connector, Breaker(failures=3, cooldown_s=0.01, longest_s=0.05)))
    connector.dead = True
    for n in range(3):
        cache.fetch([1000 * n + i for i in range(32)])
    assert cache.manager.state()["remote"]["breaker"] == "open"
    before = cache.total(Event.MISS, "breaker_open")
    cache.fetch()
    assert cache.total(Event.MISS, "breaker_open") == before + 8
    connector.dead = False
    until(lambda: cache.manager.state()["remote"]["breaker"] == "closed")
    cache.fetch()
    assert cache.load(TOKENS) == [0] * 8
    assert connector.calls["open"] >= 1


def test_a_store_that_comes_and_goes_does_not_fill_the_log(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One line for each thing that there is to say, however often the breaker opens."""
    connector = faulty()
    cache = opened(**hosting(connector, Breaker(failures=1, cooldown_s=0.001, longest_s=0.01)))
    for turn in range(3):
        connector.dead = True
        cache.fetch([1000 * turn + i for i in range(32)])
        connector.dead = False
        until(lambda: cache.manager.state()["remote"]["breaker"] == "closed")
    assert cache.manager.state()["remote"]["breaker_openings"] == 3
    said = [record.getMessage() for record in caplog.records if "connector MOCK" in record.getMessage()]
    assert sorted(said) == [
        "connector MOCK: a call failed: ConnectionError: dead (exists 0)",
        "connector MOCK: answers again",
        "connector MOCK: out of order (error); not asked until it answers",
    ]


def test_a_connection_that_is_lost_is_made_anew(opened: Any) -> None:
    """Trials that fail close the connector and open it again."""
    opened(ingestion="all").save(TOKENS)
    connector = faulty()
    cache = opened(**hosting(connector, Breaker(failures=1, cooldown_s=0.01, longest_s=0.05)))
    connector.inner.close()  # every call fails now, and open() mends it
    cache.fetch()
    until(lambda: cache.manager.state()["remote"]["breaker"] == "closed")
    cache.fetch()
    assert cache.load(TOKENS) == [0] * 8


@pytest.mark.parametrize("op", ["exists", "get", "put"])
def test_closing_with_calls_in_flight(opened: Any, op: str) -> None:
    """close() returns within its time whatever hangs; what ends after it harms nothing."""
    opened(ingestion="all").save(TOKENS)
    connector = faulty(always(op, Hang()))
    cache = opened(ingestion="all", **HASTY, **hosting(connector, close_timeout_s=0.1))
    cache.fetch()
    cache.save([7] * 32)
    assert cache.manager.wait(60)
    cache.manager.close()
    connector.let_go()
    until(lambda: cache.level.store.state()["operations_in_flight"] == 0)
    assert cache.load(TOKENS) == []


def test_a_connector_that_does_not_close_does_not_stop_us(opened: Any) -> None:
    """It is left alone after a while, and said so."""
    connector = faulty(always("close", Hang()))
    cache = opened(**hosting(connector, close_timeout_s=0.1))
    cache.manager.close()
    connector.let_go()


@pytest.mark.parametrize("fault", [Fail(ConnectionError), Hang(), Answer(Status(StatusCodes.DENIED, "password"))])
def test_a_connector_that_does_not_open_is_an_error(opened: Any, fault: Any) -> None:
    """What, where and what to do; nothing is left open."""
    connector = faulty(always("open", fault))
    with pytest.raises(StoreError, match=r"connector MOCK could not be opened .*start its server"):
        opened(**hosting(connector, open_timeout_s=0.1))
    if isinstance(fault, Hang):
        connector.let_go()


FAULTS = [
    Fail(ConnectionError),
    Fail(ValueError),
    Answer(None),
    Answer(Status(StatusCodes.NOT_FOUND)),
    Answer(Status()),
    *(Flip(bit, block) for bit, block in ((0, 0), (77, 1), (40_000, 2), (33_000, 0))),
]


@settings(max_examples=60, deadline=None)
@given(
    faults=st.lists(st.sampled_from([None, None, *FAULTS]), min_size=1, max_size=30),
    batches=st.booleans(),
    batch=st.sampled_from([1, 3, 32]),
)
def test_nothing_wrong_ever_comes_back(faults: list[Any], batches: bool, batch: int) -> None:
    """Two managers over one faulty store, any order of faults: blocks are byte for byte right, or missing."""

    def schedule(op: str, call: int) -> Any:
        fault = None if op in ("open", "close") else faults[call % len(faults)]
        return None if isinstance(fault, Flip) and op not in ("get", "mget") else fault

    with caches() as opened:
        connectors = [faulty(schedule, use_mput_mget=batches) for _ in range(2)]
        pair = [opened(ingestion="all", op_batch=batch, **hosting(connector)) for connector in connectors]
        for turn in range(4):
            cache = pair[turn % 2]
            tokens = TOKENS[: 16 * (1 + turn % 2)]
            cache.fetch(tokens)
            got = cache.load(tokens)
            assert got == [0] * len(got)
            cache.save(tokens)
            cache.settled()
            cache.manager.evict(5)
