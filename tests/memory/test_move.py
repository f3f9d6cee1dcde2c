"""Slots on any torch device wear the face of a slab, and blocks move between all kinds of slabs."""

from typing import Any

import numpy as np
import pytest
import torch

from kvcache_factory.block.spec import PLAIN_LAYOUTS, BlockSpec, KVDtype, Layout
from kvcache_factory.errors import CapacityError, ClosedError, DeviceError
from kvcache_factory.memory import DeviceSlab, PagedRegion, Slab, copy_slots, gather, move, scatter

SPEC = BlockSpec(KVDtype.BF16, num_layers=2, num_kv_heads=3, head_dim=8, block_tokens=8)


def region() -> PagedRegion:
    torch.manual_seed(0)
    return PagedRegion.from_tensors([torch.randn(2, 6, 4, 3, 8).bfloat16() for _ in range(2)], SPEC)


@pytest.mark.parametrize("tag", list(PLAIN_LAYOUTS))
def test_the_torch_path_agrees_with_the_descriptors(path: str, tag: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that are not host memory are filled by torch; the bytes are the same, both ways."""
    engine, slots = region(), [2, 0]
    at = engine.positions([[5, 1], [0, 3]])
    host, device = Slab(3, SPEC.slot_bytes), DeviceSlab(3, SPEC.payload_bytes)
    gather(engine, at, host, slots, SPEC.header_bytes, tag)
    monkeypatch.setattr(device, "device", "elsewhere:0")
    gather(engine, at, device, slots, 0, tag)
    images = host.view[:, SPEC.header_bytes : SPEC.header_bytes + SPEC.payload_bytes]
    assert np.array_equal(device.view[:, : SPEC.payload_bytes], images)
    before = [t.clone() for pair in engine._views for t in pair]
    for pair in engine._views:
        for t in pair:
            t[[5, 1, 0, 3]] = 0
    scatter(engine, at, device, slots, 0, tag)
    assert all(torch.equal(a, b) for a, b in zip(before, (t for p in engine._views for t in p), strict=True))


def test_a_typed_block_shows_a_payload_in_either_order(path: str) -> None:
    """block() is a view [L, 2, N, H, D] or [L, 2, H, N, D] of the slot."""
    engine, slab = region(), DeviceSlab(2, SPEC.payload_bytes)
    gather(engine, engine.positions([[5, 1], [0, 3]]), slab, [0, 1], 0, Layout.LCHND)
    want = torch.cat([engine._views[1][0][5, 0], engine._views[1][0][1, 0]])
    assert torch.equal(slab.block(0, SPEC, Layout.LCHND)[1, 0].transpose(0, 1), want)
    assert slab.block(0, SPEC, Layout.LCND).shape == (2, 2, 8, 3, 8)
    slab.block(1, SPEC, Layout.LCND).zero_()
    assert not slab.view[1, : SPEC.payload_bytes].any()


@pytest.mark.parametrize("by_torch", [False, True])
def test_slots_are_copied_between_slabs_with_and_without_headers(
    path: str, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host slot's payload goes into a device slot, and nothing else moves."""
    host, device = Slab(3, SPEC.slot_bytes), DeviceSlab(4, SPEC.payload_bytes)
    host.view[:] = np.random.default_rng(0).integers(0, 256, host.view.shape)
    if by_torch:
        monkeypatch.setattr(device, "device", "elsewhere:0")
    copy_slots(host, [2, 0], device, [1, 3], SPEC.payload_bytes, src_offset=SPEC.header_bytes)
    images = host.view[:, SPEC.header_bytes : SPEC.header_bytes + SPEC.payload_bytes]
    assert np.array_equal(device.view[[1, 3], : SPEC.payload_bytes], images[[2, 0]])
    assert not device.view[[0, 2]].any()


def test_moving_nothing_is_fine(path: str) -> None:
    """A batch of no blocks is a batch."""
    engine, slab = region(), Slab(1, SPEC.slot_bytes)
    gather(engine, engine.positions(np.empty((0, 2), np.int64)), slab, np.empty(0, np.int64), 0, Layout.LCND)
    assert not slab.view.any()


@pytest.mark.parametrize("name", ["cuda:99", "no-such-device", "meta", ""])
def test_a_device_that_is_not_there_is_named_in_the_error(name: str) -> None:
    """Whatever torch raises, the caller sees one typed error with the name."""
    with pytest.raises(DeviceError, match=f"'{name}'"):
        DeviceSlab(1, 64, name)


@pytest.mark.parametrize(("slots", "size"), [(0, 64), (2, 0), (-1, 64)])
def test_a_device_slab_without_room_is_refused(slots: int, size: int) -> None:
    """The same rule as for host slabs."""
    with pytest.raises(CapacityError):
        DeviceSlab(slots, size)


def test_memory_that_a_device_refuses_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory on a device says how much was asked for."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    from kvcache_factory.memory import device

    with pytest.raises(CapacityError, match=r"1\.00 GiB \(out of memory\)"):
        device._allocate(1024, 1 << 20, torch.device("cpu"))


def test_a_closed_device_slab_says_so() -> None:
    """close() is idempotent, on the host and elsewhere."""
    host = DeviceSlab(2, 64)
    host.close()
    host.close()
    with pytest.raises(ClosedError):
        _ = host.view


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tag", list(PLAIN_LAYOUTS))
def test_blocks_survive_the_way_to_a_gpu_and_back(tag: Layout) -> None:
    """Host to device slab, device to host slab, back into zeroed tensors on the device: the same bits."""
    cpu = region()
    engine = PagedRegion.from_tensors([torch.stack([k[:, 0], v[:, 0]]).cuda() for k, v in cpu._views], SPEC)
    at, first, second = engine.positions([[5, 1], [0, 3]]), DeviceSlab(3, SPEC.payload_bytes, "cuda"), None
    gather(engine, at, first, [2, 0], 0, tag)
    second = Slab(3, SPEC.slot_bytes)
    copy_slots(first, [2, 0], second, [0, 1], SPEC.payload_bytes, dst_offset=SPEC.header_bytes)
    before = [t.clone() for pair in engine._views for t in pair]
    for pair in engine._views:
        for t in pair:
            t[[5, 1, 0, 3]] = 0
    move.scatter(engine, at, second, [0, 1], SPEC.header_bytes, tag)
    assert all(torch.equal(a, b) for a, b in zip(before, (t for p in engine._views for t in p), strict=True))
