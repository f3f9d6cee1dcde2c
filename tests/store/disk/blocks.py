"""Blocks that prove themselves: everything about block *n* follows from its number, its payload included."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvcache_factory.block.envelope import Header, HeaderError, checksum, pack_header, unpack_header
from kvcache_factory.block.spec import BlockSpec, KVDtype
from kvcache_factory.errors import StoreError
from kvcache_factory.memory.slab import Slab
from kvcache_factory.store.base import Entries, Slots
from kvcache_factory.store.disk import DiskStore

SPEC = BlockSpec(KVDtype.F16, num_layers=1, num_kv_heads=2, head_dim=32, block_tokens=16)
LARGER = BlockSpec(KVDtype.F16, num_layers=3, num_kv_heads=2, head_dim=32, block_tokens=16)
IDENTITY = b"identity of test"
SEGMENT = 256 << 10
"""Bytes of a segment: about thirty blocks."""


def key_of(number: int) -> bytes:
    """The key of block *number*; its parent is the block before it."""
    return number.to_bytes(8, "little") + b"a key of"


def payload_of(number: int, size: int) -> bytes:
    """The payload of block *number*."""
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.uint64(number * 0x2545F4914F6CDD1D % 2**64)).tobytes()


def fill(slab: Slab, rows: Iterable[int], numbers: Iterable[int], spec: BlockSpec = SPEC) -> None:
    """Put the images of blocks *numbers* into *rows*."""
    for row, number in zip(rows, numbers, strict=True):
        image, payload = memoryview(slab.view[row]), payload_of(number, spec.payload_bytes)
        image[spec.header_bytes : spec.header_bytes + len(payload)] = payload
        header = Header(
            identity_digest=IDENTITY,
            key=key_of(number),
            parent_key=key_of(number - 1) if number else bytes(16),
            tokens=np.arange(number, number + spec.block_tokens).astype(np.uint32),
            payload_bytes=spec.payload_bytes,
            payload_checksum=checksum(payload),
            layout="LCHND",
        )
        pack_header(header, spec.header_bytes, image)


def proven(slab: Slab, row: int, spec: BlockSpec = SPEC) -> int | None:
    """The number of the block whose image is in *row*; None when header and checksums do not prove one.

    Fails the test when they prove an image whose payload is another's: the one thing that must never be.
    """
    image = memoryview(slab.view[row])
    try:
        header = unpack_header(image)
    except HeaderError:
        return None
    payload = image[spec.header_bytes : spec.header_bytes + spec.payload_bytes]
    if header.payload_bytes != spec.payload_bytes or checksum(payload) != header.payload_checksum:
        return None
    number = int.from_bytes(header.key[:8], "little")
    assert bytes(payload) == payload_of(number, spec.payload_bytes), "a payload was proven that is another block's"
    return number


def rows(*numbers: int) -> Slots:
    """Row numbers as the store takes them."""
    return np.array(numbers, np.int32)


def span(start: int, stop: int) -> Slots:
    """The row numbers from *start* to before *stop*."""
    return np.arange(start, stop, dtype=np.int32)


def numbers_in(entries: Entries) -> list[int]:
    """The block numbers of entries."""
    return [int(key[0]) for key in entries.keys]


def disk_usage(path: Path) -> int:
    """Bytes of all files of a directory, in which others may be at work."""
    total = 0
    with os.scandir(path) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
    return total


def open_store(path: Path, *, segments: int = 8, spec: BlockSpec = SPEC, **options: object) -> DiskStore:
    """An open store with room for *segments* segments, not yet scanned."""
    store = DiskStore(path, segments * SEGMENT, SEGMENT, **options)  # type: ignore[arg-type]
    store.open(spec, 0)
    return store


class Cache:
    """The least that an index does: which row holds which block, saved and loaded through one slab."""

    def __init__(self, store: DiskStore, spec: BlockSpec = SPEC, slots: int = 64) -> None:
        self.store, self.spec = store, spec
        self.slab = Slab(slots, spec.slot_bytes, huge_pages=False)
        self.number_of: dict[int, int] = {}
        self._next = 0
        self.found = self.enter(store.scan())

    def new_rows(self, count: int) -> Slots:
        """Rows that were never used."""
        self._next += count
        return span(self._next - count, self._next)

    def enter(self, entries: Entries) -> int:
        """Give entries their rows; returns how many were bound."""
        new = self.new_rows(len(entries))
        bound = self.store.bind(new, entries.places)
        self.number_of.update(
            (row, number)
            for row, number, here in zip(new.tolist(), numbers_in(entries), bound.tolist(), strict=True)
            if here
        )
        return int(bound.sum())

    def save(self, *numbers: int) -> Slots:
        """Write blocks; returns the rows of those that were."""
        source = span(0, len(numbers))
        fill(self.slab, source.tolist(), numbers, self.spec)
        new = self.new_rows(len(numbers))
        done = self.store.write(new, self.slab, source, 0, depths=np.array(numbers, np.int32))
        self.number_of.update(zip(new[:done].tolist(), numbers, strict=False))
        return new[:done]

    def save_until_refused(self, numbers: Iterable[int], *, freeing: bool = False) -> StoreError:
        """Write blocks one by one until the store refuses one; returns why.  *freeing* frees each again."""
        try:
            for number in numbers:
                written = self.save(number)
                if freeing:
                    self.free(written)
        except StoreError as error:
            return error
        raise AssertionError("nothing was refused")

    def load(self, wanted: Slots) -> list[int | None]:
        """Read rows one batch at a time; the proven number of each, None where there is none."""
        found: list[int | None] = []
        for start in range(0, len(wanted), self.slab.slots):
            part = wanted[start : start + self.slab.slots]
            while len(part):
                target = span(0, len(part))
                self.slab.view[target, :4096] = 0
                done = self.store.read(part, self.slab, target, 0)
                found += [proven(self.slab, row, self.spec) for row in range(done)]
                if done < len(part):
                    found.append(None)
                part = part[done + 1 :]
        return found

    def check(self) -> int:
        """Read everything back; returns how many blocks do not prove to be what they should."""
        all_rows = np.array(sorted(self.number_of), np.int32)
        return sum(
            self.number_of[row] != number for row, number in zip(all_rows.tolist(), self.load(all_rows), strict=True)
        )

    def free(self, gone: Slots) -> None:
        """Free rows."""
        self.store.free(gone)
        for row in gone.tolist():
            self.number_of.pop(row, None)

    def refresh(self) -> list[int]:
        """Take in what others did; returns the rows that are gone."""
        changes = self.store.refresh()
        for row in changes.gone.tolist():
            self.number_of.pop(row, None)
        self.enter(changes.fresh)
        return changes.gone.tolist()

    def close(self) -> None:
        """Close store and slab."""
        self.store.close()
        self.slab.close()
