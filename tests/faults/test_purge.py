"""destroy_session(purge=True): nothing of a session can be found or read any more, whatever was on its way."""

from __future__ import annotations

from typing import Any

import pytest
from tests.faults.conftest import DiskOpener
from tests.faults.harness import DiskCache, Gate, Kind, files, find, in_background, tokens_of

SECRET = tokens_of(4242, 6)
PUBLIC = tokens_of(1, 3)


def traces(cache: DiskCache) -> int:
    """How often tokens or payloads of ``SECRET`` are in the data files."""
    chain = cache.space.chain(SECRET)
    cache.engine.compute(chain)
    path = cache.store.directory.path
    count = 0
    for i in range(chain.num_blocks):
        payload = cache.engine._block(i)[0, 0, :, 0].tobytes()
        parts = (chain.token_blocks[i].tobytes(), cache.engine._block(i)[0, 0, 0, 0].tobytes(), payload)
        count += sum(len(find(path, part)) for part in parts)
    return count


def expect_no_trace(over: DiskOpener, cache: DiskCache) -> None:
    """Nothing is matched, here or by whoever opens the directory next, and nothing is in the files."""
    assert cache.manager.wait(60)
    assert traces(cache) == 0
    assert cache.matched(SECRET) == 0
    fresh = over()
    assert fresh.matched(SECRET) == 0
    fresh.manager.close()
    assert cache.manager.check() == []


@pytest.mark.parametrize("kind", ["cpu", "gpu", "three"])
def test_what_rests_is_overwritten(over: DiskOpener, kind: Kind) -> None:
    """Blocks that only the session used are gone from every level, blocks of others stay."""
    cache = over(kind=kind)
    cache.manager.create_session("mine")
    cache.save(PUBLIC)
    cache.save(SECRET, session="mine")
    assert traces(cache) > 0
    assert cache.manager.destroy_session("mine", purge=True)
    expect_no_trace(over, cache)
    assert cache.load(PUBLIC) == 3


def test_what_another_session_uses_stays(over: DiskOpener) -> None:
    """A shared beginning is kept until the last session lets it go."""
    cache = over()
    for name in ("mine", "yours"):
        cache.manager.create_session(name)
    cache.save(SECRET, session="mine")
    assert cache.space.match(cache.space.chain(SECRET[:8]), "r", session="yours").blocks == 2
    cache.space.release("r")
    cache.manager.destroy_session("mine", purge=True)
    assert cache.matched(SECRET) == 2
    cache.manager.destroy_session("yours", purge=True)
    expect_no_trace(over, cache)


WRITING: dict[str, Any] = {
    "before it is reserved": lambda c: Gate(c.manager._chain.tiers[0], "reserve"),
    "before the copy": lambda c: Gate(c.manager._chain.mover, "gather"),
    "after the copy": lambda c: Gate(c.manager._chain.mover, "gather", "after"),
    "before it is reserved below": lambda c: Gate(c.disk, "reserve"),
    "after it is reserved below": lambda c: Gate(c.disk, "reserve", "after"),
    "before it is written": lambda c: Gate(c.store, "write"),
    "after it is written": lambda c: Gate(c.store, "write", "after"),
    "before it is visible": lambda c: Gate(c.disk.index, "commit"),
    "after it is visible": lambda c: Gate(c.disk.index, "commit", "after"),
    "before it is visible above": lambda c: Gate(c.manager._chain.tiers[0].index, "commit"),
    "after it is visible above": lambda c: Gate(c.manager._chain.tiers[0].index, "commit", "after"),
}


@pytest.mark.parametrize("kind", ["cpu", "gpu", "three"])
@pytest.mark.parametrize("moment", WRITING)
def test_what_is_being_written_is_not_stored(over: DiskOpener, moment: str, kind: Kind) -> None:
    """The session ends while its blocks are on their way down, at every step of that way."""
    cache = over(kind=kind)
    cache.manager.create_session("mine")
    gate = WRITING[moment](cache)
    chain = cache.space.chain(SECRET)
    positions = cache.engine.compute(chain)
    saved = in_background(lambda: cache.space.save(chain, cache.engine.region, positions, session="mine"))
    gate.wait()
    assert cache.manager.destroy_session("mine", purge=True)
    gate.open()
    saved()
    expect_no_trace(over, cache)


READING: dict[str, Any] = {
    "before it is read": lambda c: Gate(c.store, "read"),
    "after it is read": lambda c: Gate(c.store, "read", "after"),
    "before it is visible above": lambda c: Gate(c.manager._chain.tiers[-2].index, "commit"),
    "after it is visible above": lambda c: Gate(c.manager._chain.tiers[-2].index, "commit", "after"),
    "before it is copied": lambda c: Gate(c.manager._chain.mover, "scatter"),
    "after it is copied": lambda c: Gate(c.manager._chain.mover, "scatter", "after"),
}


@pytest.mark.parametrize("kind", ["cpu", "gpu", "three"])
@pytest.mark.parametrize("moment", READING)
def test_what_is_being_read_does_not_come_back(over: DiskOpener, moment: str, kind: Kind) -> None:
    """The session ends while its blocks are on their way up: they do not stay above."""
    if kind == "gpu" and "visible" in moment:
        kind = "cpu"  # what is read for a device is not kept there
    cache = over(kind=kind)
    cache.manager.create_session("mine")
    cache.save(SECRET, session="mine")
    cache.forget_above()
    gate = READING[moment](cache)
    loaded = in_background(lambda: cache.load(SECRET))
    gate.wait()
    assert cache.manager.destroy_session("mine", purge=True)
    gate.open()
    assert loaded() in (0, 6)
    expect_no_trace(over, cache)


def test_the_look_from_above_is_not_too_early(over: DiskOpener) -> None:
    """Blocks that come up between the look at the level above and the look at the disk are seen by a second look."""
    cache = over()
    cache.manager.create_session("mine")
    cache.save(SECRET, session="mine")
    cache.forget_above()
    reading, dropping = Gate(cache.store, "read"), Gate(cache.disk, "drop_unshared")
    loaded = in_background(lambda: cache.load(SECRET))
    reading.wait()
    destroyed = in_background(lambda: cache.manager.destroy_session("mine", purge=True))
    dropping.wait()
    reading.open()
    loaded()
    dropping.open()
    assert destroyed()
    expect_no_trace(over, cache)


@pytest.mark.parametrize("end", ["release", "lost", "load"])
def test_what_a_request_holds_goes_with_the_request(over: DiskOpener, end: str) -> None:
    """A lease keeps the bytes until it is given back, or until the next request of that name; a load leaves none."""
    cache = over()
    cache.manager.create_session("mine")
    cache.save(SECRET, session="mine")
    cache.forget_above()
    chain = cache.space.chain(SECRET)
    match = cache.space.match(chain, "held")
    assert match.blocks == 6
    cache.manager.destroy_session("mine", purge=True)
    assert cache.matched(SECRET) == 0
    if end == "load":
        assert cache.space.load(match, cache.engine.region, cache.engine.positions(6)) == 6
        assert cache.engine.versions(chain, 6) == [0] * 6
        assert cache.matched(SECRET) == 0
    if end != "lost":
        assert cache.space.release("held")
    else:
        cache.space.match(cache.space.chain(PUBLIC), "held")
    expect_no_trace(over, cache)


def test_not_for_a_moment(over: DiskOpener) -> None:
    """Blocks of a session that has ended never become visible, also while their save goes on."""
    cache = over()
    cache.manager.create_session("mine")
    index, flow = cache.manager._chain.tiers[0].index, cache.manager._chain.flow
    before, after = Gate(index, "commit"), Gate(flow, "stored")
    saved = in_background(lambda: cache.begin_save(SECRET, session="mine"))
    before.wait()
    cache.manager.destroy_session("mine", purge=True)
    before.open()
    after.wait()
    assert cache.matched(SECRET) == 0
    after.open()
    saved()
    expect_no_trace(over, cache)


def test_what_a_late_read_held_goes_with_the_read(over: DiskOpener) -> None:
    """Nobody waits for it any more: when it ends, the bytes are overwritten."""
    cache = over()
    cache.manager.create_session("mine")
    cache.save(SECRET, session="mine")
    cache.forget_above()
    gate = Gate(cache.store, "read")
    assert cache.load_in_vain(SECRET) == 0
    cache.manager.destroy_session("mine", purge=True)
    gate.open()
    expect_no_trace(over, cache)


def test_a_queue_of_writes_is_purged_too(over: DiskOpener) -> None:
    """Jobs that have not begun find nothing to copy."""
    cache = over(manager_options={"io_threads": 1})
    cache.manager.create_session("mine")
    gate = Gate(cache.store, "write")
    for tokens in (PUBLIC, SECRET):
        cache.begin_save(tokens, session="mine" if tokens is SECRET else None)
    gate.wait()
    cache.manager.destroy_session("mine", purge=True)
    gate.open()
    expect_no_trace(over, cache)
    cache.forget_above()
    assert cache.load(PUBLIC) == 3


def test_purging_does_not_tear_holes(over: DiskOpener) -> None:
    """After a purge the places are used again, and the directory is whole."""
    cache = over()
    for turn in range(8):
        cache.manager.create_session("mine")
        cache.save(SECRET, session="mine")
        cache.manager.destroy_session("mine", purge=True)
        cache.save(tokens_of(turn, 12))
    expect_no_trace(over, cache)
    cache.forget_above()
    assert [cache.load(tokens_of(turn, 12)) for turn in range(8)] == [12] * 8
    assert len(files(over.path, ".data")) == 1
