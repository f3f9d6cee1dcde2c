"""What a disk store does for one process: rows in, rows out, and room that is accounted for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.store.disk.blocks import (
    LARGER,
    SEGMENT,
    SPEC,
    Cache,
    disk_usage,
    fill,
    numbers_in,
    open_store,
    payload_of,
    proven,
    rows,
    span,
)

from kvcache_factory.errors import CapacityError, ConfigError, StoreError
from kvcache_factory.memory.slab import Slab
from kvcache_factory.store.disk import DiskStore, log
from kvcache_factory.store.disk.aio import SlotFile
from kvcache_factory.store.disk.freeing import Freeing
from kvcache_factory.store.disk.segment import Segment

Opened = Callable[..., Cache]


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_what_is_written_is_read_back(opened: Opened, direct: str) -> None:
    """Blocks go through the disk whole, past the page cache and through it."""
    cache = opened(direct=direct)
    cache.save(*range(50))
    assert len(cache.number_of) == 50
    assert cache.check() == 0


def test_what_was_written_is_there_after_a_restart(opened: Opened) -> None:
    """A store that is opened again finds every block, with what its writer said about it."""
    first = opened()
    first.save(*range(40))
    first.close()
    second = open_store(first.store.directory.path)
    entries = second.scan()
    second.close()
    assert sorted(numbers_in(entries)) == list(range(40))
    assert sorted(entries.depth.tolist()) == list(range(40))
    assert entries.owned.all()
    assert set(entries.layout.tolist()) == {1}
    assert set(entries.fidelity.tolist()) == {0}
    assert {bytes(i.tobytes()) for i in entries.identities} == {b"identity of test"}
    assert (entries.parents[entries.depth > 0, 0] == entries.keys[entries.depth > 0, 0] - 1).all()


def test_the_last_write_of_a_row_wins_and_the_place_of_the_first_is_free_again(opened: Opened) -> None:
    """A row names one block, so that writing it again takes no second place."""
    cache = opened()
    fill(cache.slab, [0, 1], [7, 8])
    cache.store.write(rows(3), cache.slab, rows(0), 0)
    before = cache.store.room()
    cache.store.write(rows(3), cache.slab, rows(1), 0)
    assert cache.store.room() == before
    assert cache.load(rows(3)) == [8]


def test_a_row_without_a_place_ends_the_run_that_is_read(opened: Opened) -> None:
    """What is returned is a leading run; a row that was never written is no error, and neither is an empty batch."""
    cache = opened()
    written = cache.save(1, 2, 3)
    cache.free(written[1:2])
    assert cache.store.read(written, cache.slab, span(0, 3), 0) == 1
    assert cache.store.read(rows(999_999), cache.slab, rows(0), 0) == 0
    assert cache.store.read(rows(), cache.slab, rows(), 0) == 0
    assert cache.store.write(rows(), cache.slab, rows(), 0) == 0
    assert cache.store.present(np.append(written, np.int32(10**6))).tolist() == [True, False, True, False]


def test_images_may_lie_behind_an_offset(opened: Opened) -> None:
    """An offset says where the images begin in slots that are larger than they are."""
    cache = opened()
    wide = Slab(2, SPEC.slot_bytes + 4096, huge_pages=False)
    narrow = Slab(1, SPEC.slot_bytes, huge_pages=False)
    fill(narrow, [0], [5])
    wide.view[1, 4096:] = narrow.view[0]
    cache.store.write(rows(0), wide, rows(1), 4096)
    cache.store.read(rows(0), wide, rows(0), 4096)
    assert (wide.view[0, 4096:] == narrow.view[0]).all()


def test_neighbours_are_written_by_one_call(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one save lie beside each other, also after others have left holes."""
    calls: list[int] = []
    write = SlotFile.write

    def counted(file: SlotFile, offset: int, buffers: list[memoryview]) -> int:
        calls.append(len(buffers))
        return write(file, offset, buffers)

    cache = opened()
    monkeypatch.setattr(SlotFile, "write", counted)
    first = cache.save(*range(20))
    cache.free(first[[3, 5, 8]])
    cache.save(*range(100, 108))
    assert calls == [20, 8]


def test_the_budget_is_a_hard_cap_on_the_directory(opened: Opened) -> None:
    """Whatever is written, all files together stay below the budget, and what does not fit is refused with a word."""
    cache = opened(segments=3)
    while room := cache.store.room():
        cache.save(*range(len(cache.number_of), len(cache.number_of) + min(room, 10)))
        assert disk_usage(cache.store.directory.path) <= 3 * SEGMENT
    assert cache.save_until_refused([10_000]).reason == "full"
    assert cache.store.room() == 0
    assert cache.check() == 0


def test_what_was_freed_makes_room_and_nothing_else_is_lost(opened: Opened) -> None:
    """Reused slots hold the new block, and the blocks beside them are as they were; the log is compacted on the way."""
    cache = opened(segments=1)
    capacity = cache.store.room()
    cache.save(*range(capacity))
    chance = np.random.default_rng(1)
    number = capacity
    for _ in range(60):
        leaving = chance.choice(sorted(cache.number_of), 7, replace=False).astype(np.int32)
        cache.free(leaving)
        assert cache.store.room() == 7
        cache.save(*range(number, number + 7))
        number += 7
    assert cache.check() == 0
    cache.close()
    again = opened(segments=1)
    assert again.found == capacity
    assert set(again.number_of.values()) == set(cache.number_of.values())
    assert again.check() == 0
    assert disk_usage(again.store.directory.path) <= SEGMENT


def test_a_slot_is_not_reused_while_it_is_read(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is freed while a read of it is under way keeps its place until the read has ended."""
    cache = opened(segments=1)
    capacity = cache.store.room()
    written = cache.save(*range(capacity))
    read = SlotFile.read
    seen: list[int] = []

    def interrupted(file: SlotFile, offset: int, buffers: list[memoryview]) -> int:
        cache.free(written[:4])
        seen.append(cache.store.room())
        return read(file, offset, buffers)

    monkeypatch.setattr(SlotFile, "read", interrupted)
    target = span(0, 3)
    assert cache.store.read(written[:3], cache.slab, target, 0) == 3
    assert [proven(cache.slab, row) for row in target.tolist()] == [0, 1, 2]
    assert seen == [1]
    assert cache.store.room() == 4


def test_where_a_block_was_is_overwritten_once_nobody_reads_it(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is written again while a read of it is under way: the read is whole, and then the bytes are gone."""
    cache = opened()
    written = cache.save(1, 2)
    room = cache.store.room()
    read = SlotFile.read

    def interrupted(file: SlotFile, offset: int, buffers: list[memoryview]) -> int:
        monkeypatch.setattr(SlotFile, "read", read)
        fill(cache.slab, [40], [7])
        assert cache.store.write(written[:1], cache.slab, rows(40), 0) == 1
        assert cache.store.room() == room - 1
        return read(file, offset, buffers)

    monkeypatch.setattr(SlotFile, "read", interrupted)
    assert cache.store.read(written, cache.slab, span(0, 2), 0) == 2
    assert [proven(cache.slab, row) for row in (0, 1)] == [1, 2]
    assert cache.store.room() == room
    data = next(cache.store.directory.path.glob("*.data"))
    assert payload_mark(1) not in data.read_bytes()
    assert cache.load(written[:1]) == [7]
    fill(cache.slab, [40], [8])
    assert cache.store.write(written[1:], cache.slab, rows(40), 0) == 1
    assert payload_mark(2) not in data.read_bytes()


def test_a_place_is_given_up_in_the_log_before_it_is_overwritten(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who dies in between leaves one block of a key behind, and that is the one written last."""
    cache = opened()
    written = cache.save(1)
    path = cache.store.directory.path
    monkeypatch.setattr(Freeing, "_overwrite", lambda *_, **__: pytest.fail("not yet"))
    append = Segment.append

    def dying(one: Segment, records: Any) -> None:
        append(one, records)
        if records["kind"][0] == log.Kind.FREE:
            raise KeyboardInterrupt

    monkeypatch.setattr(Segment, "append", dying)
    fill(cache.slab, [40], [1])
    with pytest.raises(KeyboardInterrupt):
        cache.store.write(written, cache.slab, rows(40), 0)
    monkeypatch.undo()
    cache.close()
    again = opened(path)
    assert list(again.number_of.values()) == [1]
    assert again.check() == 0


def test_entries_that_the_index_does_not_want_make_room(opened: Opened) -> None:
    """Binding an entry to row -1 frees it, in this run and for the next."""
    first = opened()
    first.save(*range(10))
    first.close()
    store = open_store(first.store.directory.path)
    entries = store.scan()
    room = store.room()
    wanted = np.where(entries.keys[:, 0] % 2 == 0, span(0, 10), -1).astype(np.int32)
    assert store.bind(wanted, entries.places).tolist() == (wanted >= 0).tolist()
    assert store.room() == room + 5
    store.close()
    assert sorted(opened().number_of.values()) == [0, 2, 4, 6, 8]


def test_erasing_leaves_no_byte_of_a_block(opened: Opened) -> None:
    """Purged blocks are zeros on the disk, not merely forgotten; their neighbours stay."""
    cache = opened()
    written = cache.save(1, 2, 3, 4)
    data = next(cache.store.directory.path.glob("*.data"))
    assert data.read_bytes().count(b"a key of") == 8
    assert cache.store.erase(written[1:3]) == 2
    del cache.number_of[int(written[1])], cache.number_of[int(written[2])]
    content = data.read_bytes()
    assert content.count(b"a key of") == 4
    for number in (2, 3):
        assert payload_mark(number) not in content
    assert payload_mark(1) in content
    assert cache.check() == 0
    cache.close()
    assert sorted(opened().number_of.values()) == [1, 4]


def payload_mark(number: int) -> bytes:
    """Bytes that only the payload of block *number* holds."""
    return payload_of(number, SPEC.payload_bytes)[:64]


def test_a_place_in_quarantine_is_not_used_again(opened: Opened) -> None:
    """A slot that gave back something else than was written into it is left alone for this run."""
    cache = opened(segments=1)
    capacity = cache.store.room()
    written = cache.save(*range(capacity))
    cache.store.quarantine(written[:2])
    cache.free(written[2:3])
    assert cache.store.room() == 1
    cache.save(1000)
    assert cache.store.stats()["reasons"]["quarantined"] == 2
    with pytest.raises(StoreError):
        cache.save(1001)


def test_segments_of_another_size_are_reassigned_when_they_are_empty(opened: Opened, directory: Path) -> None:
    """A directory full of blocks of another model gives its room up: fewest blocks first, then the whole segment."""
    old = Cache(open_store(directory, segments=2, spec=LARGER), LARGER)
    while old.store.room():
        old.save(*range(len(old.number_of), len(old.number_of) + 4)[: old.store.room()])
    old.close()
    cache = opened(segments=2)
    assert cache.found == len(old.number_of)
    assert cache.store.room() == 0
    assert not cache.store.reassign()
    leaving = cache.store.fullest_other_class()
    assert 0 < len(leaving) < cache.found
    cache.free(leaving)
    assert cache.store.reassign()
    assert cache.store.room() > 0
    cache.save(1, 2, 3)
    assert disk_usage(directory) <= 2 * SEGMENT
    ours = np.array([row for row in sorted(cache.number_of) if row >= cache.found], np.int32)
    assert cache.load(ours) == [1, 2, 3]


def test_blocks_too_large_for_the_target_are_not_read(opened: Opened, directory: Path) -> None:
    """An image of a larger class never runs over the slot that was offered for it."""
    old = Cache(open_store(directory, spec=LARGER), LARGER)
    old.save(1)
    old.close()
    cache = opened()
    assert cache.store.present(rows(0)).all()
    assert cache.store.read(rows(0), cache.slab, rows(0), 0) == 0


def test_a_smaller_budget_than_before_removes_the_oldest_first(opened: Opened) -> None:
    """What earlier runs left counts: opening with less room keeps the newest segments and stays below the cap."""
    ticks = iter(range(10**6))
    cache = opened(segments=6, now_ns=lambda: next(ticks))
    for number in range(0, 150, 10):
        cache.save(*range(number, number + 10))
    cache.close()
    smaller = opened(segments=2)
    assert disk_usage(cache.store.directory.path) <= 2 * SEGMENT
    assert 0 < smaller.found < 150
    assert 149 in smaller.number_of.values()
    assert 0 not in smaller.number_of.values()
    assert smaller.check() == 0


def test_a_clock_that_moved_backwards_only_changes_the_order(opened: Opened) -> None:
    """Entries of the past and of the future are entries."""
    times = iter([2**62, 5, -7, 2**62 - 1, 0, 1])
    cache = opened(now_ns=lambda: next(times))
    for number in range(4):
        cache.save(number)
    cache.free(rows(1))
    cache.save(4)
    cache.close()
    again = opened()
    assert sorted(again.number_of.values()) == [0, 2, 3, 4]
    assert again.check() == 0


def test_threads_write_and_read_at_once(opened: Opened) -> None:
    """Several I/O threads share one store; each finds its own blocks, and no place is given twice."""
    cache = opened(segments=16)
    failures: list[str] = []

    def work(start: int) -> None:
        slab = Slab(5, SPEC.slot_bytes, huge_pages=False)
        chance = np.random.default_rng(start)
        held: dict[int, int] = {}
        for turn in range(40):
            new = span(start + 5 * turn, start + 5 * turn + 5)
            fill(slab, range(5), new.tolist())
            for row in new[: cache.store.write(new, slab, span(0, 5), 0)].tolist():
                held[row] = row
            back = chance.choice(sorted(held), 5).astype(np.int32)
            count = cache.store.read(back, slab, span(0, 5), 0)
            if [proven(slab, i) for i in range(count)] != back.tolist():
                failures.append(f"thread {start} turn {turn}: {back.tolist()}")
            leaving = chance.choice(sorted(held), 3, replace=False).astype(np.int32)
            cache.store.free(leaving)
            for row in leaving.tolist():
                del held[row]

    threads = [threading.Thread(target=work, args=(10_000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.store.stats()["used_slots"] == 4 * 40 * 2


def test_files_and_directories_are_private_whatever_the_umask(directory: Path) -> None:
    """Prompts are in these files: nobody else reads them."""
    before = os.umask(0)
    try:
        cache = Cache(open_store(directory))
        cache.save(1)
        modes = {file.stat().st_mode & 0o777 for file in directory.iterdir()}
        assert directory.stat().st_mode & 0o777 == 0o700
        assert modes == {0o600}
        os.umask(0o777)
        cache.save(*range(2, 60))
        cache.close()
        assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}
    finally:
        os.umask(before)


def test_nothing_happens_before_open(directory: Path) -> None:
    """A store is a description until it is opened, can be closed at any time, and opens again."""
    store = DiskStore(directory, 8 * SEGMENT, SEGMENT)
    assert store.slot_bytes(SPEC) == SPEC.slot_bytes
    assert store.memory is None
    store.close()
    assert not directory.exists()
    for _ in range(2):
        store.open(SPEC, 10)
        assert store.payload_offset == SPEC.header_bytes
        assert len(store.scan()) == 0
        store.close()
        store.close()


def test_a_budget_below_one_segment_is_refused_with_the_smallest_that_works(directory: Path) -> None:
    """The message names the number of bytes that would do, and that number does."""
    with pytest.raises(CapacityError, match="give it at least") as refused:
        DiskStore(directory, SEGMENT // 2, SEGMENT).open(SPEC, 0)
    smallest = int(str(refused.value).split("give it at least ")[1].split(" bytes")[0].replace(",", ""))
    store = DiskStore(directory, smallest, SEGMENT)
    store.open(SPEC, 0)
    assert store.room() > 0
    store.close()
    for budget in (0, -1):
        with pytest.raises(CapacityError):
            DiskStore(directory, budget).open(SPEC, 0)
    with pytest.raises(ConfigError, match="direct"):
        DiskStore(directory, SEGMENT, direct="sometimes")


def test_large_budgets_make_large_segments(directory: Path) -> None:
    """A terabyte is a few hundred files, not thousands: each costs its owner a file descriptor."""
    store = DiskStore(directory, 1 << 40)
    assert (1 << 40) // store._sizes(SPEC)[0].bytes <= 513
    assert DiskStore(directory, 1 << 30)._sizes(SPEC)[0].bytes <= 256 << 20
