"""Batches in pieces: some are prepared or checked while others are on their way, and nothing else changes by that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.test_remote import NAMES, ROWS, SPEC, Watched

from kvcache_factory.connector import ConnectorFeature, Status, StatusCodes
from kvcache_factory.memory.slab import Slab
from kvcache_factory.store import pieces, remote
from kvcache_factory.store.remote import RemoteSettings, RemoteStore

BATCHED = {"mput_mget": True}
STEP = 2


class Slow(Watched):
    """Answers after whatever a test awaits for a name."""

    def __init__(self, feature: ConnectorFeature) -> None:
        super().__init__(feature)
        self.gates: dict[bytes, threading.Event] = {}
        self.began: dict[bytes, threading.Event] = {name: threading.Event() for name in NAMES}
        self.refused: set[bytes] = set()

    async def wait_for(self, key: bytes) -> None:
        self.began[key].set()
        if key in self.gates:
            assert await asyncio.to_thread(self.gates[key].wait, 60), "nobody worked on the other piece meanwhile"

    async def put(self, key: bytes, mr: Any) -> Status[Any]:
        await self.wait_for(key)
        return Status(StatusCodes.OUT_OF_MEMORY) if key in self.refused else await super().put(key, mr)

    async def get(self, key: bytes, mr: Any) -> Status[Any]:
        await self.wait_for(key)
        return await super().get(key, mr)

    async def mput(self, keys: Any, mrs: Any) -> Any:
        self.note("mput", len(keys))
        return [await self.put(key, mr) for key, mr in zip(keys, mrs, strict=True)]

    async def mget(self, keys: Any, mrs: Any) -> Any:
        self.note("mget", len(keys))
        return [await self.get(key, mr) for key, mr in zip(keys, mrs, strict=True)]


@contextmanager
def opened(features: dict[str, bool], step: int = STEP) -> Iterator[tuple[RemoteStore, Slow, Slab]]:
    """A store that works in pieces of some blocks."""
    slow = Slow(ConnectorFeature(**features))
    store = RemoteStore(lambda executor: slow, RemoteSettings(name="SLOW", piece_bytes=step * SPEC.slot_bytes))
    slab = Slab(8, SPEC.slot_bytes, huge_pages=False)
    slab.view[:] = 0
    store.open(SPEC, [slab], 8)
    try:
        yield store, slow, slab
    finally:
        for gate in slow.gates.values():
            gate.set()
        store.close()
        slab.close()


@pytest.mark.parametrize("features", [{}, BATCHED], ids=str)
def test_the_next_piece_is_prepared_while_one_is_put(features: dict[str, bool]) -> None:
    """The first ends only after the second was prepared, and the second is prepared only after the first began."""
    with opened(features) as (store, slow, slab):
        gate = slow.gates[NAMES[0]] = threading.Event()

        def prepare(part: slice) -> None:
            if part.start == STEP:
                assert slow.began[NAMES[0]].wait(60)
                gate.set()
            slab.view[part] = np.arange(1, 9)[part, None]

        assert store.put(NAMES, slab, ROWS, 60, prepare=prepare).count == 8
        assert [set(slow.values[name]) for name in NAMES] == [{number} for number in range(1, 9)]


@pytest.mark.parametrize("features", [{}, BATCHED], ids=str)
def test_a_piece_is_checked_while_the_next_is_got(features: dict[str, bool]) -> None:
    """The second ends only after the first was checked."""
    with opened(features) as (store, slow, slab):
        slow.values.update({name: bytes([7]) * SPEC.slot_bytes for name in NAMES})
        gate = slow.gates[NAMES[STEP]] = threading.Event()
        seen: list[int] = []

        def check(part: slice) -> None:
            assert (slab.view[part] == 7).all()
            seen.extend(range(part.start, part.stop))
            if len(seen) == STEP:
                gate.set()

        assert store.get(NAMES, slab, ROWS, 60, check=check).count == 8
        assert seen == list(range(8))


@settings(max_examples=60, deadline=None)
@given(
    features=st.sampled_from([{}, BATCHED, {"zero_copy": True}]),
    step=st.integers(1, 9),
    blocks=st.integers(0, 8),
    missing=st.integers(0, 8),
)
def test_the_leading_run_holds_wherever_a_piece_fails(
    features: dict[str, bool], step: int, blocks: int, missing: int
) -> None:
    """What is not there ends the run; exactly the blocks before it are counted and checked, in order, once each."""
    with opened(features, step) as (store, slow, slab):
        slow.values.update({name: bytes([7]) * SPEC.slot_bytes for i, name in enumerate(NAMES) if i != missing})
        seen: list[int] = []
        done = store.get(
            NAMES[:blocks], slab, ROWS[:blocks], 60, check=lambda part: seen.extend(range(part.start, part.stop))
        )
        good = min(blocks, missing)
        assert (done.done, done.count, done.reason) == (True, good, "absent" if missing < blocks else "")
        assert seen == list(range(good))
        assert store.state()["operations_in_flight"] == 0


def test_behind_a_piece_that_fails_none_is_put() -> None:
    """Full in the second piece: the first and the beginning of the second are counted, the third is never sent."""
    with opened(BATCHED) as (store, slow, slab):
        slow.refused = {NAMES[3]}
        done = store.put(NAMES, slab, ROWS, 60, prepare=lambda part: None)
        assert (done.count, done.reason) == (3, "full")
        assert slow.values.keys() == set(NAMES[:3])
        assert not slow.began[NAMES[4]].is_set()


def test_a_call_that_raises_takes_nothing_from_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a batch as one of a block: what came before counts, and is used."""
    with opened(BATCHED) as (store, slow, slab):

        def failing(call: Any) -> Any:
            async def batch(keys: Any, mrs: Any) -> Any:
                if NAMES[4] in keys:
                    raise OSError("the server is away")
                return await call(keys, mrs)

            return batch

        monkeypatch.setattr(slow, "mput", failing(slow.mput))
        monkeypatch.setattr(slow, "mget", failing(slow.mget))
        said = (4, "error", "OSError: the server is away")
        done = store.put(NAMES, slab, ROWS, 60, prepare=lambda part: None)
        assert (done.count, done.reason, done.detail) == said
        seen: list[int] = []
        done = store.get(NAMES, slab, ROWS, 60, check=lambda part: seen.extend(range(part.start, part.stop)))
        assert (done.count, done.reason, done.detail) == said
        assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("features", [{}, BATCHED], ids=str)
def test_a_piece_that_cannot_be_prepared_is_not_put(features: dict[str, bool]) -> None:
    """Nor any behind it; that says nothing against the server."""
    with opened(features) as (store, slow, slab):

        def prepare(part: slice) -> None:
            if part.start:
                raise ValueError("broken")

        for _ in range(20):
            done = store.put(NAMES, slab, ROWS, 60, prepare=prepare)
            assert (done.done, done.count, done.reason, done.detail) == (True, 2, "not_ready", "ValueError: broken")
        assert slow.values.keys() == set(NAMES[:STEP])
        assert store.state()["breaker"] == "closed"


def test_a_check_that_fails_leaves_the_store_in_order() -> None:
    """The batch ends all the same, and its memory with it."""
    with opened(BATCHED) as (store, slow, slab):
        slow.values.update({name: bytes(SPEC.slot_bytes) for name in NAMES})
        done = store.get(NAMES, slab, ROWS, 60, check=lambda part: 1 // 0)
        assert (done.done, done.count) == (True, 8)
        assert store.state()["operations_in_flight"] == 0


@pytest.mark.parametrize("features", [{}, BATCHED], ids=str)
def test_behind_a_check_that_fails_nothing_is_checked(features: dict[str, bool]) -> None:
    """Whoever checks notes good blocks in a row: one that is left out would give its place to another."""
    with opened(features) as (store, slow, slab):
        slow.values.update({name: bytes(SPEC.slot_bytes) for name in NAMES})
        gate = slow.gates[NAMES[2 * STEP]] = threading.Event()
        seen: list[int] = []

        def check(part: slice) -> None:
            seen.append(part.start)
            gate.set()
            raise ValueError("broken")

        assert store.get(NAMES, slab, ROWS, 60, check=check).count == 8
        assert seen == [0]


# -- deadlines inside a batch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [{}, BATCHED], ids=str)
def test_when_time_is_up_no_piece_is_prepared_any_more(
    features: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was prepared goes out, the rest ends as late; nothing is written to the slots behind the caller's back."""
    now_s = [0.0]
    for module in (pieces, remote):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with opened(features) as (store, slow, slab):
        prepared: list[slice] = []

        def prepare(part: slice) -> None:
            prepared.append(part)
            now_s[0] += 40

        done = store.put(NAMES, slab, ROWS, 60, prepare=prepare)
        assert done.wait(60)
        assert (done.count, done.reason) == (2 * STEP, "timeout")
        assert prepared == [slice(0, 2), slice(2, 4)]
        assert slow.values.keys() == set(NAMES[: 2 * STEP])
        assert store.put(NAMES[4:], slab, ROWS[4:], 0, prepare=prepare).wait(60)
        assert len(prepared) == 2


@pytest.mark.parametrize("features", [{}, BATCHED], ids=str)
def test_a_late_batch_keeps_its_memory_and_is_not_checked_any_more(features: dict[str, bool]) -> None:
    """A piece hangs: the caller leaves with what was checked, and the rest comes without anybody looking at it."""
    with opened(features) as (store, slow, slab):
        slow.values.update({name: bytes(SPEC.slot_bytes) for name in NAMES})
        gate = slow.gates[NAMES[3]] = threading.Event()
        seen: list[int] = []
        done = store.get(NAMES, slab, ROWS, 0.3, check=lambda part: seen.extend(range(part.start, part.stop)))
        assert not done.done
        assert store.state()["abandoned_blocks"] == 8
        assert all(number < 3 for number in seen)
        before = list(seen)
        gate.set()
        assert done.wait(60)
        assert done.count == 8
        assert seen == before
        assert store.state()["abandoned_blocks"] == 0


@pytest.mark.parametrize("features", [{}, BATCHED], ids=str)
def test_slow_preparing_is_not_held_against_the_store(
    features: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec that takes longer than the deadline must not stop reads, nor hide that a store does not answer."""
    now_s = [0.0]
    for module in (pieces, remote):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with opened(features, step=8) as (store, slow, slab):

        def prepare(part: slice) -> None:
            now_s[0] += 100

        for _ in range(20):
            assert store.put(NAMES, slab, ROWS, 60, prepare=prepare).wait(60)
        assert store.state()["breaker"] == "closed"
        slow.gates[NAMES[0]] = threading.Event()
        for _ in range(store.breaker.failures):
            gate = slow.gates[NAMES[1]] = threading.Event()
            slow_to_prepare = store.put(NAMES[1:2], slab, ROWS[1:2], 60, prepare=prepare)
            assert not slow_to_prepare.done
            gate.set()
            assert slow_to_prepare.wait(60)
            assert store.state()["breaker"] == "closed"
            late = store.get(NAMES[:1], slab, ROWS[:1], store.settings.fair_s)
            assert not late.done
        assert store.state()["breaker"] == "open"


def test_when_time_is_up_nothing_is_checked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over when one piece is checked; two more have come then, and the last hangs."""
    now_s = [0.0]
    for module in (pieces, remote):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with opened(BATCHED) as (store, slow, slab):
        slow.values.update({name: bytes(SPEC.slot_bytes) for name in NAMES})
        gate = slow.gates[NAMES[STEP]] = threading.Event()
        slow.gates[NAMES[3 * STEP]] = threading.Event()
        seen: list[int] = []

        def check(part: slice) -> None:
            seen.extend(range(part.start, part.stop))
            gate.set()
            assert slow.began[NAMES[3 * STEP]].wait(60)
            now_s[0] += 60

        assert not store.get(NAMES, slab, ROWS, 60, check=check).done
        assert seen == list(range(STEP))
