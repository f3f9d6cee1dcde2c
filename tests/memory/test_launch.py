"""Batched copies on a device: the kernel in Triton's interpreter, and the way blocks take when it serves."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.block.spec import PLAIN_LAYOUTS, BlockSpec, KVDtype, Layout
from kvcache_factory.memory import DeviceSlab, PagedRegion, Slab, gather, launch, move, scatter, transfer

interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1; `make test` runs this file with both",
)
SPEC = BlockSpec(KVDtype.BF16, num_layers=2, num_kv_heads=3, head_dim=8, block_tokens=8)
ELSEWHERE = "elsewhere:0"


@interpreted
def test_the_self_test_passes() -> None:
    """What decides on a device whether the kernel serves, decides rightly where it can be run."""
    assert launch.self_test("cpu")


@interpreted
@given(data=st.data())
def test_the_kernel_copies_what_the_host_path_copies(data: st.DataObject) -> None:
    """Any sizes at any alignments: every byte of the pieces, and no other."""
    grain = data.draw(st.sampled_from([1, 2, 4, 8]))
    sizes = [grain * n for n in data.draw(st.lists(st.integers(0, 1200), min_size=1, max_size=6))]
    gaps = [grain * n for n in data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))]
    source = np.random.default_rng(len(sizes)).integers(0, 256, sum(sizes) + sum(gaps) + 64).astype(np.uint8)
    starts = np.cumsum([gaps[0], *(s + g for s, g in zip(sizes[:-1], gaps[1:], strict=True))]).astype(np.uint64)
    results = []
    for copy in (transfer.copy_batch, lambda d, s, n: launch.copy_batch(d, s, n, "cpu")):
        target = np.zeros_like(source)
        there, here = (starts + np.uint64(x.ctypes.data) for x in (target, source))
        copy(there, here, np.array(sizes, np.uint64))
        results.append(target)
    assert np.array_equal(*results)


def on_another_device(monkeypatch: pytest.MonkeyPatch) -> PagedRegion:
    """A region that says it is elsewhere, with a kernel that serves there; its memory is the host's all the same."""

    def beside(region: PagedRegion, slots: int) -> DeviceSlab:
        slab = DeviceSlab(slots, region.spec.payload_bytes)
        slab.device = region.device
        return slab

    def host_copy(dst: Any, src: Any, size: Any, device: str) -> None:
        assert device == ELSEWHERE
        transfer.copy_batch(dst, src, size)

    torch.manual_seed(0)
    region = PagedRegion.from_tensors([torch.randn(2, 6, 4, 3, 8).bfloat16() for _ in range(2)], SPEC)
    region.device = ELSEWHERE
    monkeypatch.setattr(launch, "serves", lambda device: device == ELSEWHERE)
    monkeypatch.setattr(launch, "copy_batch", host_copy)
    monkeypatch.setattr(move, "_beside", beside)
    return region


@pytest.mark.parametrize("tag", PLAIN_LAYOUTS)
@pytest.mark.parametrize("staging", [1, 8 << 20])
@pytest.mark.parametrize("beside", [True, False])
def test_blocks_go_by_the_kernel_to_slots_beside_the_tensors_and_to_the_host(
    tag: Layout, staging: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payload is the one that torch copies, and scattering it restores the tensors."""
    region = on_another_device(monkeypatch)
    monkeypatch.setattr(move, "_STAGING_BYTES", staging)
    at, slots = region.positions([[5, 1], [0, 3]]), [2, 0]
    plain = Slab(3, SPEC.slot_bytes)
    move._by_torch(move._Job(region, at, plain, slots, SPEC.header_bytes, tag, into_slots=True))
    target: Any = Slab(3, SPEC.slot_bytes)
    offset = SPEC.header_bytes
    if beside:
        target, offset = DeviceSlab(3, SPEC.payload_bytes), 0
        target.device = ELSEWHERE
    gather(region, at, target, slots, offset, tag)
    want = plain.view[:, SPEC.header_bytes : SPEC.header_bytes + SPEC.payload_bytes]
    assert np.array_equal(target.view[:, offset : offset + SPEC.payload_bytes], want)
    before = [t.clone() for pair in region._views for t in pair]
    for pair in region._views:
        for t in pair:
            t[[5, 1, 0, 3]] = 0
    scatter(region, at, target, slots, offset, tag)
    assert all(torch.equal(a, b) for a, b in zip(before, (t for p in region._views for t in p), strict=True))


def test_without_triton_or_with_a_wrong_kernel_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package, no device, or bytes that differ: the kernel does not serve, and nothing is raised."""
    monkeypatch.setattr(launch, "_serves", {})
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvcache_factory.memory.kernels", raising=False)
    assert not launch.serves("cuda:0")
    assert not launch.serves("xpu:0")
    monkeypatch.setattr(launch, "_serves", {})
    monkeypatch.setattr(launch, "self_test", lambda device: False)
    assert not launch.serves("cuda:0")
    monkeypatch.setattr(launch, "_serves", {})
    monkeypatch.setattr(launch, "self_test", lambda device: True)
    assert launch.serves("cuda:0")


def test_copying_nothing_launches_nothing() -> None:
    """Empty batches and pieces without bytes need no kernel."""
    nothing = np.empty(0, np.uint64)
    if importlib.util.find_spec("triton") is not None:
        launch.copy_batch(nothing, nothing, nothing, "cpu")
        launch.copy_batch(*(np.zeros(2, np.uint64) for _ in range(3)), device="cpu")
    assert [launch._word(n) for n in (8, 12, 6, 3)] == [8, 4, 2, 1]
