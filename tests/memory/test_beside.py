"""Copies beside a CUDA device's work, over a stand-in that notes the order of calls.  Nothing here ran on a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvcache_factory.block.spec import BlockSpec, KVDtype, Layout
from kvcache_factory.memory import DeviceSlab, PagedRegion, Slab, beside, gather, launch, move, scatter, transfer

DEVICE = "cuda:0"
SPEC = BlockSpec(KVDtype.BF16, num_layers=2, num_kv_heads=3, head_dim=8, block_tokens=8)


class Stream:
    """As much of a stream as is used; *said* is what all of them were told, in order."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Any:
        self.said.append(f"event after {self.name}")
        return self

    def synchronize(self) -> None:
        self.said.append("host waits for the event")


class Cuda:
    """Stands in for ``torch.cuda``: streams, and a registry of host memory that can refuse."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = Stream("compute", self.said)
        self.registered: dict[int, int] = {}
        self.refuses_at = 1 << 60

    def current_stream(self, device: str) -> Stream:
        assert device == DEVICE
        return self.current

    def new_stream(self, device: str) -> Stream:
        assert device == DEVICE
        return Stream("side", self.said)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.registered) == self.refuses_at:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "Stream", made.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(beside, "_streams", {})
    return made


ORDER = ["side waits for compute", "copies", "event after side", "host waits for the event"]


def test_copies_wait_for_the_engine_and_the_host_for_the_copies_alone(cuda: Cuda) -> None:
    """A part inside another is waited for with it, and an error does not leave copies behind."""
    with beside.beside_compute("cpu", DEVICE), beside.beside_compute(DEVICE):
        cuda.said.append("copies")
    assert cuda.said == ORDER
    cuda.said.clear()
    with pytest.raises(OSError, match="planted"), beside.beside_compute(DEVICE):
        raise OSError("planted")
    assert cuda.said == [ORDER[0], *ORDER[2:]]


def test_on_the_host_nothing_is_queued(cuda: Cuda) -> None:
    """Host copies end before they return."""
    with beside.beside_compute("cpu", "cpu"):
        cuda.said.append("copies")
    assert cuda.said == ["copies"]


@pytest.mark.parametrize("kernel", [True, False])
def test_blocks_travel_on_the_side_stream_and_come_back(
    cuda: Cuda, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To host memory and back, by the kernel and by torch: one wait each way, and the host memory gets pinned."""

    def slots_beside(region: PagedRegion, slots: int) -> DeviceSlab:
        slab = DeviceSlab(slots, region.spec.payload_bytes)
        slab.device = region.device
        return slab

    def host_copy(dst: Any, src: Any, size: Any, device: str) -> None:
        assert cuda.current.name == "side"
        transfer.copy_batch(dst, src, size)

    monkeypatch.setattr(launch, "serves", lambda device: kernel)
    monkeypatch.setattr(launch, "copy_batch", host_copy)
    monkeypatch.setattr(move, "_beside", slots_beside)
    torch.manual_seed(0)
    region = PagedRegion.from_tensors([torch.randn(2, 6, 8, 3, 8).bfloat16() for _ in range(2)], SPEC)
    region.device = DEVICE
    before = [t.clone() for pair in region._views for t in pair]
    slab, at = Slab(3, SPEC.slot_bytes), region.positions([5, 1])
    gather(region, at, slab, [2, 0], SPEC.header_bytes, Layout.LCND)
    assert cuda.said == [ORDER[0], *ORDER[2:]]
    for pair in region._views:
        for tensor in pair:
            tensor[[5, 1]] = 0
    scatter(region, at, slab, [2, 0], SPEC.header_bytes, Layout.LCND)
    assert cuda.said == 2 * [ORDER[0], *ORDER[2:]]
    assert all(torch.equal(a, b) for a, b in zip(before, (t for p in region._views for t in p), strict=True))
    if kernel:
        assert slab._pin is not None
        slab._pin.wait()
        assert slab.pinned == 1.0
    slab.close()
    assert cuda.registered == {}


def test_pieces_end_where_slots_do_and_all_are_given_back(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is registered once; closing, and forgetting the slab, give it back."""
    monkeypatch.setattr(beside, "PIN_BYTES", 10_000)
    slab = Slab(5, 4096)
    slab.pin_in_background()
    slab.pin_in_background()
    assert slab._pin is not None
    slab._pin.wait()
    base = slab.base
    assert cuda.registered == {base: 8192, base + 8192: 8192, base + 16384: 4096}
    assert slab.pinned == 1.0
    del slab
    gc.collect()
    assert cuda.registered == {}


def test_a_system_that_refuses_keeps_what_it_gave_and_copies_go_on(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Locked memory is limited: one warning, and the slots are as usable as before."""
    monkeypatch.setattr(beside, "PIN_BYTES", 4096)
    cuda.refuses_at = 2
    slab = Slab(4, 4096)
    slab.pin_in_background()
    assert slab._pin is not None
    slab._pin.wait()
    assert slab.pinned == 0.5
    assert "refuses to pin" in caplog.text
    slab.view[3] = 7
    assert np.all(slab.view[3] == 7)
    slab.close()
    slab.close()
    assert cuda.registered == {}


def test_without_cuda_nothing_is_pinned_and_nothing_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on this machine: torch was built without it."""

    def absent() -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "cudart", absent)
    slab = Slab(2, 4096)
    slab.pin_in_background()
    assert slab._pin is not None
    slab._pin.wait()
    assert slab.pinned == 0.0
    slab.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvcache-factory-pin"]
