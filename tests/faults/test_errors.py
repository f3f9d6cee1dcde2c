"""A disk that fails in every way a system reports: misses and unstored blocks with a reason, and it comes back."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import DiskOpener
from tests.faults.harness import DiskCache, files, tokens_of

from kvcache_factory.manager import CacheManager

CHAIN, OTHER = tokens_of(1, 6), tokens_of(2, 6)


class Sabotage:
    """Stands in front of the system's calls on the files of one directory; :attr:`plan` says which of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan: dict[str, Callable[..., Any]] = {}
        self.calls: dict[str, int] = {}
        for name in ("preadv", "pwritev", "pwrite", "posix_fallocate", "open", "scandir"):
            monkeypatch.setattr(os, name, self._in_front_of(name, getattr(os, name)))

    def _in_front_of(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            planned = self.plan.get(name)
            if planned is None:
                return real(*arguments, **options)
            self.calls[name] = self.calls.get(name, 0) + 1
            return planned(real, *arguments, **options)

        return call


def fails(number: int, *, only: str = "", writing: bool = False) -> Callable[..., Any]:
    """Fails with an error of the system; *only* on paths that end so, *writing*: only where opened to write."""

    def planned(real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        spared = only and not str(arguments[0]).endswith(only)
        spared = spared or (writing and not arguments[1] & (os.O_RDWR | os.O_WRONLY))
        if spared:
            return real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    return planned


def short(real: Callable[..., Any], fd: int, buffers: list[memoryview], offset: int) -> int:
    """Moves less than half of the first page."""
    real(fd, [buffers[0][:4096]], offset)
    return 2000


def half(real: Callable[..., Any], fd: int, buffers: list[memoryview], offset: int) -> int:
    """Moves one page of what was asked for, which is in order."""
    moved: int = real(fd, [buffers[0][:4096]], offset)
    return moved


def nothing(real: Callable[..., Any], fd: int, buffers: list[memoryview], offset: int) -> int:
    """Moves nothing and says so."""
    return 0


class Time:
    """Clocks that tests move."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.wall_ns = 10**18

    def prepare(self, manager: CacheManager) -> None:
        """Have the store of the last tier live by these clocks."""
        store: Any = manager._chain.tiers[-1].store
        store._clock, store._now_ns = lambda: self.seconds, lambda: self.wall_ns


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sabotage]:
    """The system's calls, sound until a test plans otherwise."""
    sabotage = Sabotage(monkeypatch)
    yield sabotage
    sabotage.plan = {}


@pytest.fixture
def now() -> Time:
    """Clocks that stand still until a test moves them."""
    return Time()


def generation_goes_on(cache: DiskCache) -> None:
    """The first tier serves, whatever the disk does."""
    tokens = tokens_of(77, 5)
    assert cache.save(tokens) == 5
    assert cache.load(tokens) == 5
    assert cache.space.drop(cache.space.chain(tokens)) >= 5


def works_again(cache: DiskCache, now: Time) -> None:
    """A second later the disk takes blocks and gives them back."""
    now.seconds += 2
    cache.manager.refresh()
    for tokens in (CHAIN, OTHER):
        cache.save(tokens)
        cache.forget_above()
        cache.save(tokens)
        cache.forget_above()
        assert cache.load(tokens) == 6
        cache.forget_above()


READS = {
    "eio": ("preadv", fails(errno.EIO), "eio"),
    "short": ("preadv", short, "short_read"),
    "end of file": ("preadv", nothing, "short_read"),
    "file gone": ("open", fails(errno.ENOENT, only=".data"), "gone"),
    "stale mount": ("open", fails(errno.ESTALE, only=".data"), "gone"),
    "no permission": ("open", fails(errno.EACCES, only=".data"), "permission"),
    "too many files": ("open", fails(errno.EMFILE, only=".data"), "too_many_files"),
}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("case", READS)
def test_a_read_that_fails_is_a_miss(over: DiskOpener, disk: Sabotage, now: Time, case: str, kind: Any) -> None:
    """Nothing is loaded, a reason is counted, and when the disk is well again so is the cache."""
    call, plan, reason = READS[case]
    cache = over(kind=kind, prepare=now.prepare)
    cache.save(CHAIN)
    cache.forget_above()
    disk.plan = {call: plan}
    assert cache.load(CHAIN) == 0
    assert cache.counted("load_failed") == {reason: 6}
    assert cache.store.stats()["reasons"][reason] >= 1
    generation_goes_on(cache)
    disk.plan = {}
    works_again(cache, now)
    assert "load:" not in str(cache.errors())


def test_a_read_that_fails_on_its_way_says_why(over: DiskOpener, disk: Sabotage) -> None:
    """The blocks before are loaded; the others are counted under what the system said."""
    cache = over()
    cache.save(CHAIN)
    cache.forget_above()

    def worn(real: Callable[..., Any], fd: int, buffers: list[memoryview], offset: int) -> int:
        if disk.calls["preadv"] > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(real(fd, buffers[:2], offset))

    disk.plan = {"preadv": worn}
    assert cache.load(CHAIN) == 2
    assert cache.counted("load_failed") == {"eio": 4}


def test_a_read_that_is_taken_up_again_is_whole(over: DiskOpener, disk: Sabotage) -> None:
    """A system that moves a page at a time is slow, and right."""
    cache = over()
    disk.plan = {"pwritev": half}
    cache.save(CHAIN)
    cache.forget_above()
    disk.plan = {"preadv": half}
    assert cache.load(CHAIN) == 6
    assert disk.calls["preadv"] >= 12
    assert disk.calls["pwritev"] >= 12


WRITES = {
    "disk full": ("pwritev", fails(errno.ENOSPC), "enospc"),
    "quota": ("pwritev", fails(errno.EDQUOT), "enospc"),
    "eio": ("pwritev", fails(errno.EIO), "eio"),
    "short": ("pwritev", short, "eio"),
    "nothing": ("pwritev", nothing, "eio"),
    "read-only": ("open", fails(errno.EROFS, writing=True), "readonly"),
    "no permission": ("open", fails(errno.EACCES, writing=True), "permission"),
    "too many files": ("open", fails(errno.EMFILE), "too_many_files"),
    "log full": ("pwrite", fails(errno.ENOSPC), "enospc"),
    "no room to grow": ("posix_fallocate", fails(errno.ENOSPC), "enospc"),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("case", WRITES)
def test_a_write_that_fails_stores_nothing_below(
    over: DiskOpener, disk: Sabotage, now: Time, case: str, warm: bool
) -> None:
    """What was saved is above, nothing is promised below, a reason is counted, and later it works again."""
    call, plan, reason = WRITES[case]
    cache = over(prepare=now.prepare)
    if warm:
        assert cache.save(CHAIN) == 6
    grows = call == "posix_fallocate" and warm
    disk.plan = {call: plan}
    assert cache.save(OTHER) == 6
    cache.forget_above()
    assert cache.matched(OTHER) == (6 if grows else 0)
    assert cache.load(CHAIN) == (6 if warm and call != "open" else cache.matched(CHAIN))
    if not grows:
        assert cache.store.stats()["reasons"][reason] >= 1
        assert sum(cache.counted("not_stored").get(word, 0) for word in (reason, "full")) >= 6
    generation_goes_on(cache)
    disk.plan = {}
    works_again(cache, now)


def test_a_disk_that_has_failed_is_left_alone_for_a_while(over: DiskOpener, disk: Sabotage, now: Time) -> None:
    """Every write after a failure fails at once, without a call, until a second has passed."""
    cache = over(prepare=now.prepare)
    cache.save(CHAIN)
    disk.plan = {"pwritev": fails(errno.EIO)}
    for conversation in range(10, 20):
        cache.save(tokens_of(conversation, 2))
    assert disk.calls["pwritev"] == 1
    now.seconds += 2
    cache.save(tokens_of(30, 2))
    assert disk.calls["pwritev"] == 2


def test_a_directory_that_is_deleted_while_running(over: DiskOpener, now: Time) -> None:
    """All that was there is a miss, nothing breaks, and the cache begins anew in a directory of the same name."""
    cache = over(prepare=now.prepare)
    cache.save(CHAIN)
    cache.save(OTHER)
    cache.forget_above()
    shutil.rmtree(over.path)
    assert cache.load(CHAIN) == 0
    assert cache.counted("load_failed") == {"gone": 6}
    generation_goes_on(cache)
    cache.manager.refresh()
    assert cache.matched(OTHER) == 0
    works_again(cache, now)
    assert files(over.path, ".data")


def test_a_directory_that_is_deleted_while_blocks_are_leased(over: DiskOpener, now: Time) -> None:
    """Blocks that a request holds are lost with the rest, and the request gives back what it held."""
    cache = over(prepare=now.prepare)
    cache.save(CHAIN)
    cache.forget_above()
    chain = cache.space.chain(CHAIN)
    match = cache.space.match(chain, "held")
    assert match.blocks == 6
    shutil.rmtree(over.path)
    cache.manager.refresh()
    assert cache.matched(CHAIN) == 0
    assert cache.space.load(match, cache.engine.region, cache.engine.positions(6)) == 0
    assert cache.space.release("held")
    works_again(cache, now)


def test_files_that_are_deleted_one_by_one(over: DiskOpener, now: Time) -> None:
    """A data file or a log that vanishes takes its blocks along and nothing else."""
    for suffix in (".data", ".log"):
        cache = over(prepare=now.prepare)
        cache.save(CHAIN)
        cache.forget_above()
        for file in files(over.path, suffix):
            file.unlink()
        cache.manager.refresh()
        assert cache.load(CHAIN) in (0, 6)
        generation_goes_on(cache)
        works_again(cache, now)
        cache.manager.close()


def test_another_directory_in_its_place(over: DiskOpener, now: Time, tmp_path: Path) -> None:
    """Somebody else's files where the directory was: they stay as they are."""
    cache = over(prepare=now.prepare)
    cache.save(CHAIN)
    over.path.rename(tmp_path / "moved")
    over.path.mkdir()
    (over.path / "thesis.tex").write_text("mine")
    cache.forget_above()
    cache.load(CHAIN)
    now.seconds += 2
    cache.manager.refresh()
    for conversation in range(5, 60):
        cache.save(tokens_of(conversation, 12))
    generation_goes_on(cache)
    assert {p.name for p in over.path.iterdir()} == {"thesis.tex"}


def test_a_clock_that_is_moved_back(over: DiskOpener) -> None:
    """The wall clock orders entries and decides nothing else: blocks are found whatever it says."""
    now = Time()
    for wall_ns in (10**18, 10**17, 5, -(10**15), 10**18):
        now.wall_ns = wall_ns
        cache = over(prepare=now.prepare)
        for conversation in range(4):
            now.wall_ns -= 10**12
            tokens = tokens_of(conversation, 6)
            cache.save(tokens)
            cache.forget_above()
            assert cache.load(tokens) == 6
            cache.space.drop(cache.space.chain(tokens), 3)
            cache.save(tokens)
        cache.manager.close()
    cache = over(prepare=now.prepare)
    assert [cache.load(tokens_of(conversation, 6)) for conversation in range(4)] == [6] * 4


def test_a_directory_that_cannot_be_listed(over: DiskOpener, disk: Sabotage, now: Time) -> None:
    """While nobody can look, what is known stays known."""
    cache = over(prepare=now.prepare)
    cache.save(CHAIN)
    cache.forget_above()
    disk.plan = {"scandir": fails(errno.EIO)}
    cache.manager.refresh()
    assert cache.load(CHAIN) == 6
    generation_goes_on(cache)
    disk.plan = {}
    works_again(cache, now)
