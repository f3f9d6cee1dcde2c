"""A disk that is full, failing, read-only, or gone: a word for it, no hang, and it works again when the disk does."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.disk.blocks import SPEC, Cache, open_store, rows, span

from kvcache_factory.errors import ConfigError, KVCacheError, StoreError

Opened = Callable[..., Cache]

REASONS = {
    errno.EIO: "eio",
    errno.ENOSPC: "enospc",
    errno.EDQUOT: "enospc",
    errno.EROFS: "readonly",
    errno.EACCES: "permission",
    errno.ENOENT: "gone",
    errno.ESTALE: "gone",
    errno.ENXIO: "io_error",
}


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Time for the pauses after failures."""
    return Clock()


def failing(code: int, calls: list[str]) -> Callable[..., int]:
    """A system call that always fails."""

    def call(*_: object) -> int:
        calls.append("called")
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("call", ["pwritev", "pwrite"])
@pytest.mark.parametrize("code", REASONS)
def test_a_write_that_fails_is_named_paused_and_tried_again(
    opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    """Data or log: the error says why, nothing is asked of the disk for a second, then all is as before."""
    cache = opened(clock=clock)
    cache.save(1, 2)
    room = cache.store.room()
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code, calls))
        with pytest.raises(StoreError) as first:
            cache.save(3)
        assert first.value.reason == REASONS[code]
        asked = len(calls)
        with pytest.raises(StoreError) as second:
            cache.save(3)
        assert (second.value.reason, len(calls)) == (REASONS[code], asked)
    clock.now += 1.0
    assert cache.store.room() >= room - (code == errno.EIO)
    assert len(cache.save(3, 4)) == 2
    assert cache.check() == 0
    assert cache.store.stats()["reasons"][REASONS[code]] == 1
    cache.close()
    assert sorted(opened().number_of.values()) == [1, 2, 3, 4]


@pytest.mark.parametrize("code", REASONS)
def test_a_read_that_fails_is_a_miss_with_a_reason(opened: Opened, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The reason is said and counted; what is there is read again when the disk does its work."""
    cache = opened()
    written = cache.save(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(code, []))
        with pytest.raises(StoreError) as failed:
            cache.store.read(written, cache.slab, rows(0, 1), 0)
        assert failed.value.reason == REASONS[code]
        assert cache.store.stats()["reasons"] == {REASONS[code]: 1}
    assert cache.load(written) == [1, 2]


def test_a_bad_place_on_the_disk_is_not_tried_again(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that gave EIO is left alone: the next write goes elsewhere."""
    clock = Clock()
    cache = opened(clock=clock)
    cache.save(1)
    write = os.pwritev

    def bad_place(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == SPEC.slot_bytes:
            raise OSError(errno.EIO, "bad sector")
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", bad_place)
    with pytest.raises(StoreError):
        cache.save(2, 3)
    clock.now += 1.0
    assert len(cache.save(2, 3)) == 2
    assert cache.check() == 0


def test_short_transfers_are_taken_up_where_they_stopped(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may move less than it was asked to, and stop in the middle of a page."""
    cache = opened(direct="never")
    write, read = os.pwritev, os.preadv

    def little(buffers: list[memoryview]) -> list[memoryview]:
        return [buffers[0][:5000]]

    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, little(buffers), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, little(buffers), offset))
    cache.save(*range(12))
    assert cache.check() == 0


def test_a_write_that_fails_half_way_keeps_the_leading_blocks(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is there and counted; what was not is not."""
    cache = opened()
    write, left = os.pwritev, [3]

    def until_full(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "no space")
        part = buffers[: left[0]]
        left[0] -= len(part)
        return write(fd, part, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", until_full)
        assert len(cache.save(*range(8))) == 3
    assert cache.check() == 0
    assert cache.store.stats()["reasons"] == {"enospc": 1}
    cache.close()
    assert sorted(opened().number_of.values()) == [0, 1, 2], "no record speaks of what was not written"


def test_writing_nothing_without_a_reason_is_an_error(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that says that it wrote zero bytes must not be asked for ever."""
    cache = opened()
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StoreError) as error:
        cache.save(1)
    assert error.value.reason == "eio"


def test_a_full_disk_stops_growth_and_not_the_reuse_of_slots(
    opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new segment for a second; blocks that leave make room meanwhile."""
    cache = opened(clock=clock)
    written = cache.save(*range(28))
    calls: list[str] = []
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC, calls))
    for _ in range(3):
        assert cache.save_until_refused([100]).reason == "enospc"
    assert len(calls) == 1, "a disk that is full is not asked again at once"
    assert cache.store.room() == 0
    cache.free(written[:2])
    assert cache.store.room() == 2
    assert len(cache.save(100, 101, 102)) == 2
    assert cache.check() == 0
    assert len(list(cache.store.directory.path.glob("*.data"))) == 1, "nothing half made is left"
    monkeypatch.undo()
    clock.now += 1.0
    assert len(cache.save(102)) == 1


def test_a_file_system_that_cannot_reserve_space_is_used_without(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files get their size and no space ahead of time."""
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP, []))
    cache = opened()
    cache.save(*range(40))
    assert cache.check() == 0


def test_without_vectored_calls_blocks_move_one_by_one(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems without preadv and pwritev, and without O_DIRECT, get the same blocks."""
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "pwritev")
    cache = opened(direct="never")
    cache.save(*range(40))
    assert cache.check() == 0


def test_a_freed_block_that_the_log_cannot_record_is_freed_all_the_same(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """free() never raises; a stale record costs its readers a miss."""
    cache = opened(segments=1)
    written = cache.save(*range(cache.store.room()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.EIO, []))
        cache.free(written[:3])
    assert cache.store.room() == 3
    cache.save(100, 101, 102)
    cache.close()
    again = opened(segments=1)
    assert again.check() == 0


def test_a_compaction_that_fails_leaves_the_log_as_it_was(
    opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write that needed it fails with a reason; the blocks that are there stay."""
    cache = opened(segments=2, clock=clock)
    cache.save(*range(10))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC, []))
        assert cache.save_until_refused(range(100, 300), freeing=True).reason == "enospc"
    assert not list(cache.store.directory.path.glob("*.new"))
    assert cache.check() == 0
    clock.now += 1.0
    cache.save(500)
    cache.close()
    assert sorted(n for n in opened(segments=2).number_of.values() if n < 100 or n == 500) == [*range(10), 500]


def test_a_directory_that_is_deleted_is_gone_and_comes_back(opened: Opened, clock: Clock, directory: Path) -> None:
    """Everything is a miss at once, nothing hangs, and a second later the store begins anew."""
    cache = opened(clock=clock)
    written = cache.save(*range(10))
    shutil.rmtree(directory)
    with pytest.raises(StoreError, match="gone"):
        cache.store.read(written, cache.slab, span(0, 10), 0)
    with pytest.raises(StoreError) as gone:
        cache.save(100)
    assert gone.value.reason == "gone"
    assert sorted(cache.refresh()) == sorted(written.tolist())
    cache.store.free(written)
    assert cache.store.erase(written) == 0
    clock.now += 1.0
    assert len(cache.save(100, 101)) == 2
    assert cache.check() == 0
    assert directory.stat().st_mode & 0o777 == 0o700
    cache.close()
    assert sorted(opened().number_of.values()) == [100, 101]


def test_a_directory_that_became_another_programs_is_not_written_to(
    opened: Opened, clock: Clock, directory: Path
) -> None:
    """What was deleted may have been replaced: the marker is asked for again before anything is made there."""
    cache = opened(clock=clock)
    cache.save(1)
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "photos").write_bytes(b"")
    cache.refresh()
    with pytest.raises(KVCacheError, match="something else"):
        cache.save(2)
    assert [file.name for file in directory.iterdir()] == ["photos"]


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """And so is one below a file."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"is a file.*give the disk tier a directory"):
            open_store(path)


@pytest.mark.parametrize(("code", "words"), [(errno.EACCES, "no permission"), (errno.EROFS, "read-only")])
def test_a_directory_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    """The error says what is wrong and what to do about it."""
    monkeypatch.setattr(os, "mkdir", failing(code, []))
    with pytest.raises(ConfigError, match=f"{words}.*choose another directory"):
        open_store(tmp_path / "new")


def test_a_disk_that_fails_at_open_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that is nobody's setting has its own type, and a reason."""
    monkeypatch.setattr(os, "mkdir", failing(errno.EIO, []))
    with pytest.raises(StoreError) as error:
        open_store(tmp_path / "new")
    assert error.value.reason == "eio"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, where this machine lets us mount one."""
    where = tmp_path / "mount"
    where.mkdir()
    mount = shutil.which("mount")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(where)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system takes rights that this user does not have")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_disk_that_is_really_full(opened: Opened, clock: Clock, small_disk: Path) -> None:
    """The budget is more than the disk: what fits is kept, the rest is refused, and reuse goes on."""
    cache = opened(small_disk / "cache", segments=8, clock=clock)
    assert cache.save_until_refused(range(1000)).reason == "enospc"
    assert len(cache.number_of) > 28
    assert cache.check() == 0
    cache.free(rows(0, 1, 2))
    assert len(cache.save(5000, 5001, 5002)) == 3
    assert cache.check() == 0


def test_a_disk_that_is_mounted_read_only_is_refused_at_open(opened: Opened, small_disk: Path) -> None:
    """The error names the cause; mounted for writing again, everything is there."""
    cache = opened(small_disk / "cache", segments=3)
    cache.save(*range(10))
    cache.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ConfigError, match="read-only"):
        open_store(small_disk / "cache", segments=3)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    again = opened(small_disk / "cache", segments=3)
    assert again.found == 10
    assert again.check() == 0
