"""A disk whose policy admits nothing more: counted, and what it holds stays; with a level between, it is asked too."""

from __future__ import annotations

from tests.engine.test_admission import Doorman
from tests.faults.conftest import DiskOpener
from tests.faults.harness import SEGMENT_SLOTS, tokens_of

from kvcache_factory import HybridPolicy


def test_a_full_disk_asks_whether_newcomers_are_worth_it(over: DiskOpener) -> None:
    """One segment of blocks fits; what is refused is counted, and nobody leaves for it."""
    policy = HybridPolicy([Doorman(2, target="disk")])
    cache = over(disk_mb=1.1, manager_options={"eviction_policy": policy})
    blocks = 0
    for number in range(SEGMENT_SLOTS // 4):
        blocks += cache.save(tokens_of(number, 4))
    assert cache.counted("stored") == {"": blocks}
    assert cache.counted("not_stored") == {}
    cache.save(tokens_of(1000, 8))
    assert cache.counted("stored") == {"": blocks + 2}
    assert cache.counted("not_stored") == {"not_admitted": 6}
    assert cache.counted("evicted") == {"capacity": 2}
    cache.forget_above()
    assert cache.load(tokens_of(1000, 8)) == 2


def test_the_disk_is_offered_what_memory_refuses(over: DiskOpener) -> None:
    """Images are sealed on their way: a new process reads them."""
    policy = HybridPolicy([Doorman(3, target="cpu")])
    cache = over(dram=8, manager_options={"eviction_policy": policy})
    cache.save(tokens_of(1, 8))
    assert cache.save(tokens_of(2, 8)) == 3
    assert cache.counted("not_stored", "cpu") == {"not_admitted": 5}
    assert cache.counted("stored") == {"": 16}
    cache.manager.close()
    again = over()
    assert again.load(tokens_of(2, 8)) == 8
    assert again.load(tokens_of(1, 8)) == 8


def test_what_two_levels_refuse_reaches_the_third(over: DiskOpener) -> None:
    """Device and memory are full of something else; the disk takes it all."""
    policy = HybridPolicy([Doorman(2, target="gpu"), Doorman(3, target="cpu")])
    cache = over(kind="three", device=8, dram=8, manager_options={"eviction_policy": policy})
    cache.save(tokens_of(1, 8))
    assert cache.save(tokens_of(2, 8)) == 2
    assert cache.counted("stored") == {"": 16}
    assert cache.counted("not_stored", "gpu") == {"not_admitted": 6}
    assert sum(cache.counted("not_stored", "cpu").values()) >= 3
    assert cache.load(tokens_of(2, 8)) == 8


def test_only_what_is_hot_goes_to_a_disk_that_wants_only_that(over: DiskOpener) -> None:
    """What memory refuses has not been hit."""
    policy = HybridPolicy([Doorman(0, target="cpu")])
    cache = over(dram=8, ingestion="hot", manager_options={"eviction_policy": policy})
    cache.save(tokens_of(1, 8))
    cache.save(tokens_of(2, 8))
    assert cache.counted("stored") == {}
