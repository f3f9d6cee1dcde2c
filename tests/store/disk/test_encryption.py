"""An encrypted directory: warm for those with the key, nothing but misses for those without, and never wrong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.harness import DiskCache, files, find, flip, image_offsets, open_cache_over, tokens_of

from kvcache_factory.block.envelope import unpack_header
from kvcache_factory.engine import lasting
from kvcache_factory.errors import ConfigError, StoreError
from kvcache_factory.store.disk import DiskStore
from kvcache_factory.testing.engines import block_images

KEY, OTHER_KEY = bytes(range(100, 132)), bytes(range(50, 82))
BLOCKS = 12
OpenCache = Callable[..., DiskCache]


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, str]:
    """Files with two keys."""
    places = {}
    for name, key in (("right", KEY), ("wrong", OTHER_KEY)):
        path = tmp_path / name
        path.write_bytes(key)
        path.chmod(0o600)
        places[name] = str(path)
    return places


@pytest.fixture
def open_cache(tmp_path: Path, key_files: dict[str, str]) -> Iterator[OpenCache]:
    """Opens caches on one directory with the key of a name, or none; closes what is still open."""
    opened: list[DiskCache] = []

    def one(key: str | None = "right", **options: Any) -> DiskCache:
        place = {"key_file": key_files[key]} if key else {}
        opened.append(open_cache_over(tmp_path / "cache", **place, **options))
        return opened[-1]

    yield one
    for cache in opened:
        cache.manager.close()


def stored_before(open_cache: OpenCache, key: str | None = "right", conversation: int = 1) -> None:
    """An earlier process that stored a conversation and ended."""
    cache = open_cache(key)
    assert cache.save(tokens_of(conversation, BLOCKS)) == BLOCKS
    assert cache.counted("stored") == {"": BLOCKS}
    cache.manager.close()


@pytest.mark.parametrize("kind", ["cpu", "gpu", "three"])
def test_the_next_process_with_the_key_is_warm(open_cache: OpenCache, kind: str) -> None:
    """Stored, ended, started again: every block is loaded, byte for byte, whatever level is above the disk."""
    cache = open_cache(kind=kind, device=16)
    assert cache.save(tokens_of(1, BLOCKS)) == BLOCKS
    cache.manager.close()
    again = open_cache(kind=kind, device=16)
    assert again.load(tokens_of(1, BLOCKS)) == BLOCKS
    assert again.counted("loaded")[""] > 0
    assert again.counted("load_failed") == {}
    assert again.errors() == {}


def test_the_key_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process has it in a file, the next in a variable: it is the same key."""
    monkeypatch.setenv("CACHE_KEY", KEY.hex())
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    for place, found in ({"key_env": "CACHE_KEY"}, 0), ({"key_file": str(tmp_path / "key")}, BLOCKS):
        cache = open_cache_over(tmp_path / "cache", **place)
        assert cache.load(tokens_of(1, BLOCKS)) == found
        cache.save(tokens_of(1, BLOCKS))
        cache.manager.close()


def test_nothing_secret_is_in_any_file(open_cache: OpenCache, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the tokens nor the KV nor the key; what recovery needs, the keys of blocks, is there to be found."""
    caplog.set_level(logging.DEBUG)
    cache = open_cache()
    tokens = tokens_of(1, BLOCKS)
    cache.save(tokens)
    chain = cache.space.chain(tokens)
    payloads = [image.tobytes() for image in block_images(chain, cache.space.spec)]
    cache.manager.close()
    everything = b"".join(path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())
    for number in range(BLOCKS):
        assert chain.token_blocks[number].tobytes() not in everything
        assert payloads[number][:16] not in everything
        assert find(tmp_path / "cache", chain.key_bytes(number))
    for text in (everything, caplog.text.encode()):
        assert KEY not in text
        assert KEY.hex().encode() not in text


def test_without_encryption_the_same_search_finds_everything(open_cache: OpenCache, tmp_path: Path) -> None:
    """The search of the test before is able to find: in a plain directory it does."""
    cache = open_cache(None)
    tokens = tokens_of(1, BLOCKS)
    cache.save(tokens)
    chain = cache.space.chain(tokens)
    assert find(tmp_path / "cache", chain.token_blocks[5].tobytes())
    assert find(tmp_path / "cache", block_images(chain, cache.space.spec)[5].tobytes()[:16])


@pytest.mark.parametrize(("key", "reason"), [("wrong", "wrong_key"), (None, "no_key")])
def test_without_the_right_key_it_is_a_miss(open_cache: OpenCache, key: str | None, reason: str) -> None:
    """Counted under its reason, no error, and no slot is lost: the blocks can be stored again, readable here."""
    stored_before(open_cache)
    cache = open_cache(key)
    assert cache.load(tokens_of(1, BLOCKS)) == 0
    assert cache.counted("load_failed") == {reason: BLOCKS}
    assert cache.errors() == {}
    assert "quarantined" not in cache.store.stats()["reasons"]
    assert cache.save(tokens_of(1, BLOCKS)) == BLOCKS
    cache.manager.close()
    assert open_cache(key).load(tokens_of(1, BLOCKS)) == BLOCKS


def test_what_others_cannot_read_stays_for_those_who_can(open_cache: OpenCache) -> None:
    """While the one who has the key lives, a process without it forgets what it could not read and frees nothing."""
    owner = open_cache()
    owner.save(tokens_of(1, BLOCKS))
    guest = open_cache(None)
    assert guest.load(tokens_of(1, BLOCKS)) == 0
    guest.manager.close()
    owner.forget_above()
    assert owner.load(tokens_of(1, BLOCKS)) == BLOCKS


def test_plain_and_encrypted_blocks_live_in_one_directory(open_cache: OpenCache) -> None:
    """Encryption may be turned on at any time: what is plain stays readable, what is new is not."""
    stored_before(open_cache, None, conversation=1)
    stored_before(open_cache, "right", conversation=2)
    cache = open_cache("right")
    assert cache.load(tokens_of(1, BLOCKS)) == BLOCKS
    assert cache.load(tokens_of(2, BLOCKS)) == BLOCKS
    cache.manager.close()
    cache = open_cache(None)
    assert cache.load(tokens_of(1, BLOCKS)) == BLOCKS
    assert cache.load(tokens_of(2, BLOCKS)) == 0


@pytest.mark.parametrize(
    "offset",
    [0, 9, 17, 25, 33, 49, 65, 97, 105, 129, 161, 192, 201, 209, 221, 237, 245, 300, 470, 513, 600, 4096, 4300],
)
def test_a_flipped_bit_on_the_disk_is_a_miss(open_cache: OpenCache, tmp_path: Path, offset: int) -> None:
    """Header, parameters, tokens or payload of one block: the run ends before it, with a reason, and never wrong."""
    cache = open_cache()
    cache.save(tokens_of(1, BLOCKS))
    key = cache.space.chain(tokens_of(1, BLOCKS)).key_bytes(5)
    cache.manager.close()
    ((file, at),) = image_offsets(tmp_path / "cache", key)
    flip(file, at + offset)
    cache = open_cache()
    assert cache.load(tokens_of(1, BLOCKS)) == 5
    ((reason, blocks),) = cache.counted("load_failed").items()
    assert blocks == BLOCKS - 5
    assert reason == "not_authentic" if offset >= cache.space.spec.header_bytes else reason.startswith("header_")


def test_two_images_that_changed_places_are_misses(open_cache: OpenCache, tmp_path: Path) -> None:
    """A whole intact image in the place of another is refused by its key, encrypted or not."""
    cache = open_cache()
    cache.save(tokens_of(1, BLOCKS))
    chain, size = cache.space.chain(tokens_of(1, BLOCKS)), cache.space.spec.slot_bytes
    cache.manager.close()
    (file, one), (_, two) = (image_offsets(tmp_path / "cache", chain.key_bytes(i))[0] for i in (3, 7))
    data = bytearray(file.read_bytes())
    data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]
    file.write_bytes(data)
    cache = open_cache()
    assert cache.load(tokens_of(1, BLOCKS)) == 3
    assert cache.counted("load_failed") == {"key": BLOCKS - 3}


def test_memory_is_never_encrypted(open_cache: OpenCache) -> None:
    """The slots of DRAM, which are served meanwhile, hold what they held: plain images, before and after a load."""
    cache = open_cache()
    cache.save(tokens_of(1, BLOCKS))
    above = cache.manager._chain.tiers[0]
    chain = cache.space.chain(tokens_of(1, BLOCKS))

    def plain() -> None:
        rows = above.index.rows_of(chain.keys)
        assert (rows >= 0).all()
        images, header_bytes = above.slots.view[rows], cache.space.spec.header_bytes
        for number, image in enumerate(images):
            header = unpack_header(image[:header_bytes].data)
            assert (header.codec, header.codec_params) == ("raw", b"")
            assert np.array_equal(header.tokens, chain.token_blocks[number])

    plain()
    assert cache.load(tokens_of(1, BLOCKS)) == BLOCKS
    cache.forget_above()
    assert cache.load(tokens_of(1, BLOCKS)) == BLOCKS
    plain()


def test_staging_is_bounded(open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the run and however many threads: no more than the staging area is encrypted and unwritten."""
    monkeypatch.setattr(lasting, "STAGING_BYTES", 1)  # the least that there is: eight images
    monkeypatch.setattr(lasting, "STAGED_BYTES", 5 * 8192)
    written: list[int] = []
    real = DiskStore.write

    def write(self: DiskStore, slots: Any, source: Any, *args: Any, **options: Any) -> int:
        assert source.slots == 8
        written.append(len(slots))
        return real(self, slots, source, *args, **options)

    monkeypatch.setattr(DiskStore, "write", write)
    cache = open_cache(dram=128)
    for conversation in range(4):
        chain = cache.space.chain(tokens_of(conversation, 24))
        cache.space.save(chain, cache.engine.region, cache.engine.compute(chain))
    assert cache.manager.wait(60)
    assert sum(written) == 96
    assert max(written) <= 5
    cache.forget_above()
    assert [cache.load(tokens_of(conversation, 24)) for conversation in range(4)] == [24] * 4


def test_nothing_is_staged_without_a_key(open_cache: OpenCache) -> None:
    """Plain images go from the slot to the disk as they are."""
    cache = open_cache(None)
    cache.save(tokens_of(1, BLOCKS))
    assert cache.disk._staging is None


def test_a_disk_that_fails_between_two_parts_keeps_the_first(
    open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is there, what was not is counted, and the staging area is free again."""
    monkeypatch.setattr(lasting, "STAGED_BYTES", 5 * 8192)
    parts: list[int] = []
    real = DiskStore.write

    def write(self: DiskStore, slots: Any, *args: Any, **options: Any) -> int:
        parts.append(len(slots))
        if len(parts) == 2:
            raise StoreError("the disk is full", "enospc")
        return real(self, slots, *args, **options)

    cache = open_cache()
    monkeypatch.setattr(DiskStore, "write", write)
    cache.save(tokens_of(1, BLOCKS))
    assert cache.counted("stored") == {"": parts[0]}
    assert cache.counted("not_stored") == {"copy_failed": BLOCKS - parts[0]}
    cache.forget_above()
    assert cache.load(tokens_of(1, BLOCKS)) == parts[0]
    staging = cache.disk._staging
    assert staging is not None
    assert len(staging.take(10**6)) == staging.memory.slots


def test_threads_store_and_load_at_once(open_cache: OpenCache) -> None:
    """Two engines on one encrypted directory; each finds its own bytes."""
    first, second = open_cache(), open_cache()
    wrong: list[tuple[int, int]] = []

    def work(cache: DiskCache, own: int) -> None:
        for turn in range(6):
            conversation = 10 * own + turn
            cache.save(tokens_of(conversation, 8))
            cache.forget_above()
            if cache.load(tokens_of(conversation, 8)) != 8:
                wrong.append((own, turn))

    threads = [threading.Thread(target=work, args=pair) for pair in ((first, 1), (second, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert first.errors() == second.errors() == {}


@pytest.mark.parametrize("content", [b"too short", b"ab" * 16])
def test_a_bad_key_is_told_at_open(open_cache: OpenCache, key_files: dict[str, str], content: bytes) -> None:
    """The first model cannot be registered, the directory is not made, and a better key can be put in place."""
    place = Path(key_files["right"])
    place.write_bytes(content)
    with pytest.raises(ConfigError, match="64 hex digits") as refused:
        open_cache()
    assert content.decode() not in str(refused.value)
    assert not (place.parent / "cache").exists()
    place.write_bytes(KEY)
    stored_before(open_cache)
    assert files(place.parent / "cache", ".data")
