"""Planted collisions: a hash never decides alone, whatever builder made the key."""

import hashlib
from collections.abc import Callable

import pytest

from kvcache_factory.block import key
from kvcache_factory.block.key import KEY_BUILDERS, MediaSpan
from kvcache_factory.engine.ledger import MANAGER, Event
from kvcache_factory.testing import Opener, SmallCache

A = list(range(12))
B = [*range(8), 91, 92, 93, 94]
"""Two prompts of three blocks that differ in the last."""


def misses(cache: SmallCache, reason: str) -> int:
    """Blocks counted as missed for *reason*."""
    return cache.manager._ledger.total(Event.MISS, MANAGER, reason).blocks


@pytest.fixture(params=KEY_BUILDERS)
def builder(request: pytest.FixtureRequest) -> str:
    """Each way of making keys."""
    return str(request.param)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Replaces the hash behind every key by one that keeps so many bits."""

    def replace(bits: int) -> None:
        def weak(data: bytes) -> bytes:
            number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) % (1 << bits)
            return number.to_bytes(16, "little")

        monkeypatch.setattr(key, "hash128", weak)

    return replace


def collide(cache: SmallCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last block of B get the key of the last block of A."""
    wanted, given = (cache.space.chain(tokens).key_bytes(2) for tokens in (A, B))
    real = key.hash128
    monkeypatch.setattr(key, "hash128", lambda data: wanted if real(data) == given else real(data))
    assert cache.space.chain(B).key_bytes(2) == wanted


def test_a_collision_is_a_counted_miss(open_cache: Opener, builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B finds A's block under its key, sees that the record differs, and computes its own."""
    cache = open_cache(16, key_builder=builder)
    collide(cache, monkeypatch)
    assert cache.save(A) == 3
    assert cache.load(B) == [0, 0]
    assert misses(cache, "record_differs") == 1
    assert cache.load(A) == [0, 0, 0]


def test_a_save_replaces_a_resident_whose_record_differs(
    open_cache: Opener, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer gets the key; the one before becomes a miss and never the newcomer's bytes."""
    cache = open_cache(16, key_builder=builder)
    collide(cache, monkeypatch)
    cache.save([*A, 1, 2, 3, 4])
    assert cache.save(B) == 1
    assert cache.load(B) == [0, 0, 0]
    assert cache.load([*A, 1, 2, 3, 4]) == [0, 0]
    assert cache.manager._ledger.total(Event.DROPPED, "cpu", "replaced").blocks == 2
    assert cache.save(A) == 1
    assert cache.load(A) == [0, 0, 0]


def test_a_collision_in_every_tier_is_a_miss(open_cache: Opener, builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier below verifies as well, and write-behind replaces there too."""
    cache = open_cache(16, 16, key_builder=builder)
    collide(cache, monkeypatch)
    cache.save(A)
    cache.manager.wait()
    assert cache.load(B) == [0, 0]
    cache.save(B)
    cache.manager.wait()
    cache.manager.evict(16)
    assert cache.load(B) == [0, 0, 0]
    assert cache.load(A) == [0, 0]


def test_pictures_that_collide_are_told_apart(
    open_cache: Opener, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens stand for two pictures: the digest of the extras is part of the record."""
    cache = open_cache(16, key_builder=builder)
    one, two = (cache.space.chain(A, [MediaSpan(8, 4, bytes([n]) * 32)]) for n in (1, 2))
    wanted, given, real = one.key_bytes(2), two.key_bytes(2), key.hash128
    monkeypatch.setattr(key, "hash128", lambda data: wanted if real(data) == given else real(data))
    two = cache.space.chain(A, [MediaSpan(8, 4, b"\2" * 32)])
    cache.space.save(one, cache.engine.region, cache.engine.compute(one))
    assert two.key_bytes(2) == wanted
    assert cache.space.match(two, "two").blocks == 2
    cache.space.release("two")
    assert misses(cache, "record_differs") == 1


@pytest.mark.parametrize("bits", [0, 1, 2, 4])
@pytest.mark.parametrize("levels", [(12,), (12, 24)])
def test_nothing_is_ever_served_under_a_hash_that_keeps_next_to_nothing(
    open_cache: Opener, builder: str, plant: Callable[[int], None], bits: int, levels: tuple[int, ...]
) -> None:
    """With 1 to 16 keys in all everything collides, also within a chain: right bytes or a miss, and a sound tree."""
    plant(bits)
    cache = open_cache(*levels, key_builder=builder)
    cache.manager.create_session("s")
    prompts = [[*range(4 * start, 4 * start + 12)] for start in range(6)] + [A, B, [7] * 24]
    with cache.manager.use_session("s"):
        for turn, tokens in enumerate([*prompts, *reversed(prompts)]):
            cache.save(tokens)
            cache.manager.wait()
            assert None not in cache.load(tokens)
            assert None not in cache.load(prompts[turn % len(prompts)])
            assert cache.manager.check() == []
    assert cache.manager._ledger.total(Event.ERROR).times == 0
    cache.manager.destroy_session("s")


def test_a_key_that_repeats_within_its_chain_spares_the_beginning(
    open_cache: Opener, builder: str, plant: Callable[[int], None]
) -> None:
    """If every key is the same, only the first block can be kept; saving again must not drive it out for the second."""
    plant(0)
    cache = open_cache(16, key_builder=builder)
    assert cache.save(A) == 1
    assert cache.save(A) == 0
    assert cache.load(A) == [0]
    assert cache.manager._ledger.total(Event.NOT_STORED, "cpu", "key_repeats").blocks == 4
