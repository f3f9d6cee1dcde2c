"""Several processes on one directory: each writes its own, all read everything, the living take over from the dead."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.store.disk.blocks import SEGMENT, Cache, disk_usage, rows

from kvcache_factory.errors import StoreError
from kvcache_factory.store.disk import directory as directories
from kvcache_factory.store.disk import segment
from kvcache_factory.store.disk.directory import Directory

Opened = Callable[..., Cache]


def test_a_second_process_reads_what_the_first_writes(opened: Opened) -> None:
    """New blocks are found by a look at the other's log, and can be read but not freed."""
    writer = opened()
    reader = opened()
    assert reader.found == 0
    mine = writer.save(*range(10))
    assert reader.refresh() == []
    assert sorted(reader.number_of.values()) == list(range(10))
    assert reader.check() == 0
    theirs = np.array(sorted(reader.number_of), np.int32)
    assert not reader.store.owned(theirs).any()
    assert writer.store.owned(mine).all()
    room = reader.store.room()
    reader.free(theirs[:1])
    assert reader.store.room() == room
    assert writer.check() == 0


def test_what_the_owner_frees_or_replaces_is_reported_gone(opened: Opened) -> None:
    """Rows of a freed block come back as gone; a slot that holds another block now is both gone and fresh."""
    writer = opened(segments=2)
    mine = writer.save(*range(writer.store.room() // 2))
    reader = opened(segments=2)
    assert reader.found == len(mine)
    writer.free(mine[:4])
    writer.save(1000, 1001)
    gone = reader.refresh()
    assert len(gone) == 4
    assert reader.store.present(np.array(gone, np.int32)).tolist() == [False] * 4
    assert {1000, 1001} <= set(reader.number_of.values())
    assert not {0, 1, 2, 3} & set(reader.number_of.values())
    assert reader.check() == 0


def test_a_compacted_log_changes_nothing_for_readers(opened: Opened) -> None:
    """A log that is another file now is read anew: what is still there keeps its row, the rest is gone or fresh."""
    writer = opened(segments=2)
    kept = writer.save(*range(10))
    reader = opened(segments=2)
    before = dict(reader.number_of)
    log_path = next(writer.store.directory.path.glob("*.log"))
    inode, number = log_path.stat().st_ino, 100
    while log_path.stat().st_ino == inode:
        writer.free(writer.save(number))
        number += 1
    writer.save(5000)
    assert reader.refresh() == []
    assert {row: reader.number_of[row] for row in before} == before
    assert sorted(reader.number_of.values()) == [*range(10), 5000]
    assert reader.check() == 0
    writer.free(kept)
    assert len(reader.refresh()) == 10


def test_the_segments_of_a_dead_process_are_taken_over(opened: Opened, workers: object, directory: Path) -> None:
    """A process that is killed loses nothing: another one owns its blocks at the next look, and can free them."""
    victim = workers.start(directory, 3, 8, 40)  # type: ignore[attr-defined]
    cache = opened()
    assert cache.found == 40
    everything = np.array(sorted(cache.number_of), np.int32)
    assert not cache.store.owned(everything).any()
    assert victim.pid in cache.store.live_processes()
    workers.kill(victim)  # type: ignore[attr-defined]
    changes = cache.store.refresh()
    assert sorted(changes.adopted.tolist()) == everything.tolist()
    assert len(changes.gone) == len(changes.fresh) == 0
    assert cache.store.owned(everything).all()
    assert cache.store.live_processes() == [os.getpid()]
    assert cache.check() == 0
    room = cache.store.room()
    cache.free(everything)
    assert cache.store.room() == room + 40
    cache.save(*range(20))
    assert cache.check() == 0


def test_a_dead_process_is_taken_over_at_open_too(opened: Opened, workers: object, directory: Path) -> None:
    """What is found at open belongs to the one who opens, when nobody else is alive."""
    workers.kill(workers.start(directory, 3, 8, 40))  # type: ignore[attr-defined]
    cache = opened()
    assert cache.found == 40
    assert cache.store.owned(np.array(sorted(cache.number_of), np.int32)).all()
    assert cache.check() == 0
    assert len(list(directory.glob("process-*"))) == 1


def test_only_one_of_many_takes_over(opened: Opened, workers: object, directory: Path) -> None:
    """Two that look at once do not both own a segment: slots would be given twice."""
    victim = workers.start(directory, 3, 8, 40)  # type: ignore[attr-defined]
    one, two = opened(), opened()
    workers.kill(victim)  # type: ignore[attr-defined]
    one.refresh()
    two.refresh()
    assert one.store.owned(np.array(sorted(one.number_of), np.int32)).all()
    assert not two.store.owned(np.array(sorted(two.number_of), np.int32)).any()


def test_a_segment_whose_log_was_compacted_belongs_to_its_owner(opened: Opened) -> None:
    """The lock is on the log that is there now, whoever still has the old one open."""
    writer = opened(segments=2)
    log_path = next(iter([*writer.store.directory.path.glob("*.log")]), None)
    assert log_path is None
    writer.save(1)
    log_path = next(writer.store.directory.path.glob("*.log"))
    old = os.open(log_path, os.O_RDWR)
    inode, number = log_path.stat().st_ino, 10
    while log_path.stat().st_ino == inode:
        writer.free(writer.save(number))
        number += 1
    assert directories.try_lock(old), "the old file is nobody's any more"
    assert not directories.is_still(old, log_path)
    reader = opened(segments=2)
    assert not reader.store.owned(np.array(sorted(reader.number_of), np.int32)).any()
    os.close(old)


def test_a_log_that_is_replaced_while_it_is_looked_at_is_not_taken_over(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner compacts between our opening the log and our asking for its lock: the old file's lock means nothing."""
    writer = opened(segments=2)
    writer.save(1)
    log_path = next(writer.store.directory.path.glob("*.log"))
    inode = log_path.stat().st_ino
    open_log = segment._open_log

    def slow_open(path: Path) -> tuple[int, bool]:
        opened_log = open_log(path)
        number = 10
        while log_path.stat().st_ino == inode:
            writer.free(writer.save(number))
            number += 1
        return opened_log

    monkeypatch.setattr(segment, "_open_log", slow_open)
    reader = opened(segments=2)
    assert log_path.stat().st_ino != inode
    assert not reader.store.owned(np.array(sorted(reader.number_of), np.int32)).any()
    assert reader.store.stats()["owned_segments"] == 0


def test_a_full_disk_does_not_hide_what_others_have_stored(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not being able to write down how we stand must not lose what a look has found."""
    writer, reader = opened(), opened()
    writer.save(1, 2)
    reader.store._open._starved = True
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
        reader.refresh()
    assert sorted(reader.number_of.values()) == [1, 2]


def test_the_budget_holds_over_all_processes_together(opened: Opened) -> None:
    """Two writers that take turns never exceed the cap, and the second gets what the first has left."""
    one, two = opened(segments=4), opened(segments=4)
    number = 0
    full = set()
    while len(full) < 2:
        for cache in (one, two):
            try:
                cache.save(*range(number, number + 9))
            except StoreError:
                full.add(id(cache))
            number += 9
            assert disk_usage(one.store.directory.path) <= 4 * SEGMENT
    assert one.check() == two.check() == 0
    assert min(len(one.number_of), len(two.number_of)) > 9


def test_who_has_more_than_its_share_gives_a_segment_to_who_has_none(opened: Opened) -> None:
    """The first comer fills the budget; the second says that it is short, and gets room, segment by segment."""
    ticks = iter(range(10**6))
    first = opened(segments=4, now_ns=lambda: next(ticks))
    while first.store.room():
        first.save(len(first.number_of))
    second = opened(segments=4)
    first.refresh()
    assert len(first.store.surplus()) == 0, "nobody has asked for anything"
    with pytest.raises(StoreError):
        second.save(5000)
    for expected in (1, 2):
        second.refresh()
        first.refresh()
        leaving = first.store.surplus()
        assert len(leaving) > 0
        assert max(first.number_of[row] for row in leaving.tolist()) < min(
            number for row, number in first.number_of.items() if row not in leaving
        ), "the oldest go first"
        first.free(leaving)
        assert len(first.store.surplus()) == 0 or expected == 1
        second.refresh()
        while second.store.room():
            second.save(5000 + len(second.number_of))
        with pytest.raises(StoreError):
            second.save(9999)
    second.refresh()
    first.refresh()
    assert len(first.store.surplus()) == 0, "each has its share now"
    assert first.check() == second.check() == 0
    assert second.store.stats()["owned_segments"] == 2


def test_a_directory_that_is_over_budget_is_brought_back_by_its_owners(opened: Opened) -> None:
    """A process with a smaller budget than another makes room from its own, never from what others own."""
    big = opened(segments=6)
    while big.store.room():
        big.save(len(big.number_of))
    small = opened(segments=2)
    assert len(small.store.surplus()) == 0
    assert small.store.room() == 0
    big.close()
    small.refresh()
    for _ in range(4):
        leaving = small.store.surplus()
        assert len(leaving) > 0
        small.free(leaving)
    assert len(small.store.surplus()) == 0
    assert disk_usage(small.store.directory.path) <= 2 * SEGMENT
    assert small.check() == 0


def test_a_process_that_keeps_the_lock_is_waited_for_and_then_reported(
    opened: Opened, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a segment waits for the directory's lock, but not for ever."""
    cache = opened()
    monkeypatch.setattr(directories, "_LOCK_WAIT_S", 0.02)
    with Directory(directory).locked(), pytest.raises(StoreError) as busy:
        cache.save(1)
    assert busy.value.reason == "busy"


def _die_in_child(cache: Cache) -> None:
    os._exit(0 if not cache.store._open.own() else 1)


def test_a_forked_child_does_not_keep_its_parents_segments_alive(opened: Opened) -> None:
    """File locks are inherited: a child that lives on must not make a dead parent look alive."""
    cache = opened()
    cache.save(1)
    child = multiprocessing.get_context("fork").Process(target=_die_in_child, args=(cache,))
    child.start()
    child.join()
    assert child.exitcode == 0, "the child must have let go of the lock"
    reader = opened()
    assert not reader.store.owned(np.array(sorted(reader.number_of), np.int32)).any(), "the parent still has it"


def test_what_a_dead_process_left_half_made_is_swept_away(opened: Opened, directory: Path) -> None:
    """Data without a log, and logs that were never finished, count against the budget of nobody."""
    opened().close()
    for name in ("0000abcd.data", "0000abcd.log.new", "0000abce.log.new"):
        (directory / name).write_bytes(bytes(5000))
    opened()
    assert not list(directory.glob("0000abc*"))


def test_an_unfinished_compaction_goes_with_its_owner(opened: Opened, directory: Path) -> None:
    """The next owner removes the half of a log that the last one died over."""
    first = opened()
    first.save(1)
    first.close()
    log_path = next(directory.glob("*.log"))
    unfinished = directories.unfinished_log(log_path)
    unfinished.write_bytes(b"half a log")
    cache = opened()
    assert cache.found == 1
    assert not unfinished.exists()


def test_segments_of_removed_files_are_gone_with_all_their_rows(opened: Opened, directory: Path) -> None:
    """Somebody who deletes a segment's files makes misses, for the owner and for the readers."""
    writer = opened()
    mine = writer.save(*range(5))
    reader = opened()
    for file in directory.glob("*.log"):
        file.unlink()
    assert len(reader.refresh()) == 5
    assert sorted(writer.refresh()) == sorted(mine.tolist())
    assert writer.store.read(mine, writer.slab, rows(0, 1, 2, 3, 4), 0) == 0
    assert len(writer.save(*range(100, 105))) == 5
    assert writer.check() == 0
