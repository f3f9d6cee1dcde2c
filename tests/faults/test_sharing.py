"""Several managers over one directory: each sees what the others store, and takes over what the dead leave."""

from __future__ import annotations

import numpy as np
import pytest
from tests.faults.conftest import DiskOpener
from tests.faults.harness import DiskCache, Gate, Kind, files, in_background, tokens_of, used_bytes
from tests.faults.worker import Child, children, work

from kvcache_factory.store.disk import directory, log, segment
from kvcache_factory.store.disk.directory import Holder

CHAIN = tokens_of(1, 6)


def die(cache: DiskCache) -> None:
    """What the end of a process does to its locks."""
    pool = cache.store._open
    holders: list[Holder] = [pool.presence, *pool.segments.values()]
    for holder in holders:
        holder.let_go()


@pytest.mark.parametrize("kind", ["cpu", "gpu", "three"])
def test_one_sees_what_the_other_stores(over: DiskOpener, kind: Kind) -> None:
    """After a refresh; look-ups start one by themselves."""
    first, second = over(kind=kind), over(kind=kind)
    first.save(CHAIN)
    second.manager.refresh()
    assert second.load(CHAIN) == 6
    second.forget_above()
    assert second.save(CHAIN) == 6
    assert second.counted("stored") == {}, "stored twice"


def test_a_look_up_starts_a_look(over: DiskOpener) -> None:
    """Nobody has to ask for it."""
    first, second = over(), over()
    first.save(CHAIN)
    second.disk._clock = lambda: 1e9
    assert second.matched(CHAIN) in (0, 6)
    assert second.manager.wait(60)
    assert second.matched(CHAIN) == 6


def test_blocks_of_the_dead_are_taken_over(over: DiskOpener) -> None:
    """Before, they are readable and not ours to evict; after, they are."""
    second = over()
    with children() as started:
        child = Child(work, over.path, 0, 5, 10, disk_mb=4, dram=16)
        started.append(child)
        assert child.answer() == "ready"
        second.manager.refresh()
        assert second.disk.index.used > 0
        assert second.disk.evict(1000).shape[0] == 0
        child.kill()
    second.manager.refresh()
    held = second.disk.index.used
    assert held > 0
    assert second.disk.index.pins.sum() == 0
    gone = second.disk.evict(1000)
    second.disk.count_evicted(gone, None)
    assert len(gone) == held


def test_two_heirs_share_without_conflict(over: DiskOpener) -> None:
    """Each segment goes to one of those who look; all read it."""
    dead = over()
    for n in range(20):
        dead.save(tokens_of(n, 12))
    heirs = [over(), over()]
    die(dead)
    for heir in heirs:
        heir.manager.refresh()
    owners = [{s.number for s in heir.store._open.own()} for heir in heirs]
    assert not owners[0] & owners[1]
    assert len(owners[0] | owners[1]) == len(files(over.path, ".data"))
    for heir in heirs:
        assert [heir.load(tokens_of(n, 12)) for n in range(20)] == [12] * 20


def test_a_live_owner_keeps_its_segments(over: DiskOpener) -> None:
    """Whoever opens the directory next reads and does not take."""
    first = over()
    first.save(CHAIN)
    second = over()
    assert second.load(CHAIN) == 6
    assert second.store._open.own() == []
    assert len(first.store._open.own()) == 1
    second.save(tokens_of(2, 6))
    assert len(second.store._open.own()) == 1


def test_what_one_evicts_takes_along_what_another_has_built_on_it(over: DiskOpener) -> None:
    """The contents that each process sees are closed under prefix."""
    first, second = over(), over()
    first.save(CHAIN[:12])
    second.manager.refresh()
    second.save(CHAIN)
    assert second.counted("stored") == {"": 3}
    second.forget_above()
    assert second.load(CHAIN) == 6
    second.forget_above()
    first.space.drop(first.space.chain(CHAIN))
    second.manager.refresh()
    assert second.matched(CHAIN) == 0
    assert second.disk.index.used == 0
    assert second.save(CHAIN) == 6
    second.forget_above()
    assert second.load(CHAIN) == 6


def test_what_another_has_built_on_keeps_its_parent_here(over: DiskOpener) -> None:
    """Once seen, a block under another process's block is not evicted before it."""
    first, second = over(), over()
    first.save(CHAIN[:12])
    second.manager.refresh()
    second.save(CHAIN)
    first.manager.refresh()
    assert len(first.disk.evict(100)) == 0
    assert first.load(CHAIN) == 6


def test_a_slot_that_the_owner_uses_anew_is_a_miss_elsewhere(over: DiskOpener) -> None:
    """A reader that has not looked since reads another block, sees it, and says so."""
    first, second = over(disk_mb=1), over(disk_mb=1)
    first.save(CHAIN)
    second.manager.refresh()
    second.disk._clock = lambda: 0.0
    for n in range(2, 20):
        first.save(tokens_of(n, 12))
    assert second.load(CHAIN) == 0
    assert second.counted("load_failed") == {"key": 6}
    second.manager.refresh()
    assert second.load(tokens_of(19, 12)) == 12


def test_a_starved_process_gets_its_share(over: DiskOpener) -> None:
    """One that has filled the budget gives a segment up to one that comes later."""
    first = over(disk_mb=4)
    for n in range(60):
        first.save(tokens_of(n, 12))
    second = over(disk_mb=4)
    for turn in range(8):
        second.save(tokens_of(1000 + turn, 12))
        second.manager.refresh()
        first.manager.refresh()
        first.save(tokens_of(2000 + turn, 2))
    second.forget_above()
    assert len(second.store._open.own()) >= 1
    assert second.load(tokens_of(1007, 12)) == 12
    assert first.counted("evicted")["fair_share"] > 0


def test_two_that_grow_at_once_keep_the_budget(over: DiskOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is about to make the last segment holds the lock; the other does without."""
    monkeypatch.setattr(directory, "_LOCK_WAIT_S", 0.05)
    first, second = over(disk_mb=1), over(disk_mb=1)
    monkeypatch.setattr(segment, "create", segment.create)  # so that the gate goes with the test
    gate = Gate(segment, "create")
    saved = in_background(lambda: first.save(CHAIN))
    gate.wait()
    second.save(tokens_of(2, 6))
    gate.open()
    assert saved() == 6
    assert used_bytes(over.path) <= 1 << 20
    assert len(files(over.path, ".data")) == 1
    assert second.counted("not_stored") == {"busy": 6}


def test_what_was_known_of_the_directory_does_not_decide(over: DiskOpener) -> None:
    """Room that was there at the last look is counted anew before it is taken."""
    first, second = over(disk_mb=1), over(disk_mb=1)
    first.save(CHAIN)
    second.save(tokens_of(2, 6))
    assert used_bytes(over.path) <= 1 << 20
    assert len(files(over.path, ".data")) == 1
    assert second.counted("not_stored") == {"full": 6}


def test_restart_is_warm(over: DiskOpener) -> None:
    """Closed and opened ten times: nothing is lost, nothing is stored twice."""
    for turn in range(10):
        cache = over()
        assert [cache.load(tokens_of(n, 6)) for n in range(turn)] == [6] * turn
        cache.save(tokens_of(turn, 6))
        assert cache.counted("stored") == {"": 6}
        cache.manager.close()


def test_a_log_cannot_say_who_we_are(over: DiskOpener) -> None:
    """A record with the root of a model and the digest of another does not spoil what that model stores."""
    first = over()
    first.save(CHAIN)
    first.manager.close()
    [path] = files(over.path, ".log")
    image = bytearray(path.read_bytes())
    records = np.frombuffer(image, log.RECORD, 7, 64)
    records["identity"][1:] = 7
    path.write_bytes(bytes(image[:64]) + log.seal(records.copy(), int(path.stem, 16)).tobytes() + image[64 + 7 * 88 :])
    cache = over()
    tokens = tokens_of(2, 6)
    cache.save(tokens)
    cache.forget_above()
    assert cache.load(tokens) == 6
