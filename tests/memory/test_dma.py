"""The driver's batched copy, over a stand-in that is called as the driver is.  Nothing here ran on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.block.spec import BlockSpec, KVDtype, Layout
from kvcache_factory.memory import DeviceSlab, PagedRegion, Slab, beside, dma, gather, launch, move, scatter

DEVICE = "cuda:0"
STREAM = 0x5EED
SPEC = BlockSpec(KVDtype.F32, num_layers=2, num_kv_heads=4, head_dim=64, block_tokens=32)  # pieces of 32 KiB
SMALL = BlockSpec(KVDtype.BF16, num_layers=2, num_kv_heads=4, head_dim=64, block_tokens=32)  # pieces of 16 KiB


class Driver:
    """Stands in for libcuda: finds one function, which copies as it is asked to, or refuses."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.orders: list[int] = []
        self.status = 0
        self.finds = True
        self._call = dma.Call(self._copy)

    def cuGetProcAddress_v2(self, name: bytes, found: Any, version: int, flags: Any, status: Any) -> int:
        assert (name, version, flags.value) == (b"cuMemcpyBatchAsync", 12080, 0)
        if not self.finds:
            return 500
        found._obj.value = ctypes.cast(self._call, ctypes.c_void_p).value
        return 0

    def _copy(self, *asked: Any) -> int:
        dsts, srcs, sizes, count, attributes, firsts, rules, failed, stream = asked
        assert (rules, stream) == (1, STREAM)
        assert (ctypes.c_size_t * 1).from_address(firsts)[0] == 0
        (ctypes.c_size_t * 1).from_address(failed)[0] = 0
        if self.status:
            return self.status
        self.orders.append(dma.Attributes.from_address(attributes).order)
        self.batches.append(count)
        columns = ((ctypes.c_uint64 * count).from_address(column) for column in (dsts, srcs, sizes))
        for dst, src, size in zip(*columns, strict=True):
            ctypes.memmove(dst, src, size)
        return 0


class Stream:
    cuda_stream = STREAM

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> Any:
        return self

    def synchronize(self) -> None: ...


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        yield

    side = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(beside, "_streams", {})
    monkeypatch.setattr(dma, "_driver", lambda: made)
    monkeypatch.setattr(dma, "_serves", {DEVICE: True})
    monkeypatch.setattr(launch, "_serves", {DEVICE: False})
    dma._entry.cache_clear()
    yield made
    dma._entry.cache_clear()


class Pinned(Slab):
    """Host memory that CUDA knows."""

    share = 1.0

    def pin_in_background(self) -> None: ...

    @property
    def pinned(self) -> float:
        return self.share


def region_on_device(spec: BlockSpec) -> PagedRegion:
    torch.manual_seed(0)
    shape = (2, 6, spec.block_tokens, spec.num_kv_heads, spec.head_dim)
    tensors = [torch.randn(shape).to(getattr(torch, spec.dtype.value)) for _ in range(spec.num_layers)]
    region = PagedRegion.from_tensors(tensors, spec)
    region.device = DEVICE
    return region


def test_large_pieces_go_to_pinned_slots_and_back_in_one_call_each(driver: Driver) -> None:
    """What is read from the engine is read in its turn; what is leased in a slot may be read at any time."""
    region, slab = region_on_device(SPEC), Pinned(3, SPEC.slot_bytes)
    before = [t.clone() for pair in region._views for t in pair]
    at = region.positions([5, 1])
    gather(region, at, slab, [2, 0], SPEC.header_bytes, Layout.LCND)
    for pair in region._views:
        for tensor in pair:
            tensor[[5, 1]] = 0
    scatter(region, at, slab, [2, 0], SPEC.header_bytes, Layout.LCND)
    assert all(torch.equal(a, b) for a, b in zip(before, (t for p in region._views for t in p), strict=True))
    assert driver.batches == [2 * 4, 2 * 4]
    assert driver.orders == [1, 3]


@pytest.mark.parametrize("why", ["small", "not pinned", "refused"])
def test_what_the_driver_does_not_take_goes_the_other_way(driver: Driver, why: str) -> None:
    """And arrives all the same; a driver that refused is not asked again."""
    spec = SMALL if why == "small" else SPEC
    region, slab = region_on_device(spec), Pinned(3, spec.slot_bytes)
    slab.share = 0.5 if why == "not pinned" else 1.0
    driver.status = 1 if why == "refused" else 0
    gather(region, region.positions([4]), slab, [1], spec.header_bytes, Layout.LCND)
    payload = slab.view[1, spec.header_bytes :][: spec.payload_bytes].view(np.uint8)
    want = torch.stack([torch.stack([k[4], v[4]]) for k, v in ((p[0], p[1]) for p in region._views)])
    assert payload.tobytes() == want.contiguous().view(torch.uint8).numpy().tobytes()
    assert driver.batches == []
    assert dma.serves(DEVICE) == (why != "refused")


def test_slots_of_a_device_and_of_the_host_change_places_in_one_call(driver: Driver) -> None:
    """Payloads without their headers, in both directions."""
    device, host = DeviceSlab(4, SPEC.payload_bytes), Pinned(4, SPEC.slot_bytes)
    device.device = DEVICE
    rng = np.random.default_rng(0)
    host.view[:] = rng.integers(0, 256, host.view.shape, dtype=np.uint8)
    move.copy_slots(host, [0, 3], device, [2, 1], SPEC.payload_bytes, src_offset=SPEC.header_bytes)
    move.copy_slots(device, [2, 1], host, [1, 2], SPEC.payload_bytes, dst_offset=SPEC.header_bytes)
    start = SPEC.header_bytes
    for here, there in ((0, 1), (3, 2)):
        end = start + SPEC.payload_bytes
        assert np.array_equal(host.view[here, start:end], host.view[there, start:end])
    assert driver.batches == [2, 2]
    assert driver.orders == [3, 1]


def test_the_self_test_decides(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that copies serves; one that is too old, refuses, or copies nothing does not, and nothing fails."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))

    def answer() -> bool:
        dma._serves.clear()
        dma._entry.cache_clear()
        return dma.serves(DEVICE)

    assert answer()
    assert driver.batches == [5, 5]
    driver.status = 1
    assert not answer()
    driver.status = 0
    driver.finds = False
    assert not answer()
    driver.finds = True
    monkeypatch.setattr(ctypes, "memmove", lambda *asked: None)
    assert not answer()


def test_without_a_driver_nothing_is_asked_of_it() -> None:
    """On the host, and on machines without CUDA."""
    assert not dma.serves("cpu")


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=12))
def test_neighbours_are_joined_and_no_byte_is_lost(pieces: list[tuple[int, bool]]) -> None:
    """Pieces that follow one another on both sides become one; all others stay as they are."""
    size = np.array([n for n, _ in pieces], np.uint64)
    gaps = np.array([gap for _, gap in pieces], np.uint64)
    src = np.cumsum(size) - size
    dst = src + np.cumsum(gaps)
    there, here, length = dma.joined(dst, src, size)
    whole, apart = (
        {(d + i, s + i) for d, s, n in zip(*(c.tolist() for c in columns), strict=True) for i in range(n)}
        for columns in ((there, here, length), (dst, src, size))
    )
    assert whole == apart
    assert len(length) == (1 + int(gaps[1:].sum()) if pieces else 0)
