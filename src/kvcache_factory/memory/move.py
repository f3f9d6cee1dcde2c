"""Gather blocks from engine tensors into slots, scatter them back, and copy slots between slabs.

Host to host is one batched copy over descriptors.  Between a device and pinned host slots the driver takes the batch
where its pieces are large.  Small ones are copied by one kernel where it passes its self-test, with whole blocks to
slots elsewhere, and otherwise through torch, one per block, layer, and keys or values.  Where one side is packed and
the other is not, blocks pass through some memory in the region's own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..block.spec import PAGE, Layout, round_up
from ..errors import LayoutError
from . import dma, launch
from .beside import beside_compute
from .device import DeviceSlab, slot_bytes, typed_block
from .order import reorder
from .region import Addresses, BlockPositions, Region
from .slab import Slab
from .transfer import copy_batch

AnySlab = Slab | DeviceSlab
Rows = npt.NDArray[np.int64]

_STAGING_BYTES = 8 << 20  # what stays in a cache between the two copies of a conversion


class _Job(NamedTuple):
    """Blocks at *positions* of a region and *slots* of a slab, whose payloads are in order *tag* from an offset on."""

    region: Region
    positions: BlockPositions
    slab: AnySlab
    slots: npt.ArrayLike
    payload_offset: int
    tag: Layout
    into_slots: bool

    def describe(self) -> tuple[Addresses, Addresses, Addresses]:
        """(addresses in the slab, addresses in the region, sizes), each uint64 [n * k], bytes."""
        outside, offsets, sizes = self.region.describe(self.positions, self.tag)
        slab = self.slab
        if isinstance(slab, DeviceSlab) and slab.device == self.region.device:
            start = slab.address_on_device(self.slots)
        else:
            start = slab.address(self.slots)
        start += np.uint64(self.payload_offset)
        assert len(start) == len(outside), "one slot per block"
        inside = start[:, None] + offsets
        size = np.empty_like(inside)
        size[:] = sizes
        return inside.reshape(-1), outside.reshape(-1), size.reshape(-1)

    def aimed(self, inside: Addresses, outside: Addresses) -> tuple[Addresses, Addresses]:
        """(to, from)."""
        return (inside, outside) if self.into_slots else (outside, inside)

    def parts(self, staging: AnySlab) -> Iterator[tuple[_Job, Rows]]:
        """The job, cut into as many blocks as *staging* has slots, each with as many of these."""
        for first in range(0, len(self.positions), staging.slots):
            some = slice(first, first + staging.slots)
            slots = np.atleast_1d(self.slots)[some]
            yield self._replace(positions=self.positions[some], slots=slots), np.arange(len(slots))

    @property
    def staging_slots(self) -> int:
        """Blocks that pass through memory beside at once."""
        return max(min(_STAGING_BYTES // self.region.spec.payload_bytes, len(self.positions)), 1)


def gather(
    region: Region, positions: BlockPositions, slab: AnySlab, slots: npt.ArrayLike, payload_offset: int, tag: Layout
) -> None:
    """Copy n blocks out of a region into *slots* (int [n]) of a slab, as payloads in order *tag*.

    *payload_offset*: bytes from the start of a slot to its payload.  Raises LayoutError for positions out of range and
    for an order that such blocks cannot have.
    """
    _move(_Job(region, positions, slab, slots, payload_offset, tag, into_slots=True))


def scatter(
    region: Region, positions: BlockPositions, slab: AnySlab, slots: npt.ArrayLike, payload_offset: int, tag: Layout
) -> None:
    """Copy payloads of order *tag* from *slots* (int [n]) into n blocks of a region; the inverse of :func:`gather`.

    Raises LayoutError for positions out of range and for tensors that share memory between elements.
    """
    if not region.writable:
        raise LayoutError("the tensors are expanded: several elements share memory; call .contiguous() before loading")
    _move(_Job(region, positions, slab, slots, payload_offset, tag, into_slots=False))


def _move(job: _Job) -> None:
    """Choose the way between these tensors and these slots; it is the same in both directions."""
    region, slab = job.region, job.slab
    if _staged(job):
        way = _by_reordering
    elif not region.on_host and launch.serves(region.device):
        way = _by_kernel
    elif region.on_host and slab.device == "cpu":
        inside, outside, size = job.describe()
        copy_batch(*job.aimed(inside, outside), size)
        return
    else:
        way = _by_torch
    with beside_compute(region.device, slab.device):
        if way is _by_reordering or not _in_large_pieces(job):
            way(job)


def _in_large_pieces(job: _Job) -> bool:
    """Hand all pieces to the driver at once, where it serves, the slots are pinned, and no piece is small.

    Pieces are joined within a block only: headers lie between the payloads of slots, so none reaches over the end of
    what was pinned in one call.
    """
    device, slab = job.region.device, job.slab
    if job.region.on_host or not isinstance(slab, Slab) or slab.pinned < 1 or not dma.serves(device):
        return False
    inside, outside, size = dma.joined(*job.describe())
    if not len(size) or size.min() < dma.WORTHWHILE:
        return False
    return dma.copy_batch(*job.aimed(inside, outside), size, device, stable=not job.into_slots)


def copy_slots(
    src: AnySlab,
    src_slots: npt.ArrayLike,
    dst: AnySlab,
    dst_slots: npt.ArrayLike,
    nbytes: int,
    src_offset: int = 0,
    dst_offset: int = 0,
) -> None:
    """Copy *nbytes* bytes of each slot of *src_slots* to the slot of *dst_slots* beside it (both int [n]).

    Slots are read and written from their offsets in bytes on: a device slot has no header, a host slot may have one.
    """
    assert nbytes + src_offset <= src.slot_bytes, "more bytes than a source slot has"
    assert nbytes + dst_offset <= dst.slot_bytes, "more bytes than a destination slot has"
    pairs = np.atleast_1d(src_slots), np.atleast_1d(dst_slots)
    assert len(pairs[0]) == len(pairs[1]), "one destination per source"
    if src.device == dst.device == "cpu":
        size = np.full(len(pairs[0]), nbytes, np.uint64)
        copy_batch(dst.address(pairs[1]) + np.uint64(dst_offset), src.address(pairs[0]) + np.uint64(src_offset), size)
        return
    for here, there in ((src, dst), (dst, src)):
        if isinstance(here, Slab) and there.device.startswith("cuda"):
            here.pin_in_background()
    with beside_compute(src.device, dst.device):
        if _at_once(src, pairs[0], dst, pairs[1], nbytes, (src_offset, dst_offset)):
            return
        for s, d in zip(pairs[0].tolist(), pairs[1].tolist(), strict=True):
            source = slot_bytes(src, s)[src_offset : src_offset + nbytes]
            slot_bytes(dst, d)[dst_offset : dst_offset + nbytes].copy_(source, non_blocking=True)
        _settle(src.device, dst.device)


def _at_once(
    src: AnySlab,
    src_slots: npt.ArrayLike,
    dst: AnySlab,
    dst_slots: npt.ArrayLike,
    nbytes: int,
    offsets: tuple[int, int],
) -> bool:
    """Hand slots of a device and of pinned host memory to the driver in one batch, where it serves."""
    host, device = (src, dst) if isinstance(src, Slab) else (dst, src)
    if not isinstance(host, Slab) or host.pinned < 1 or not dma.serves(device.device):
        return False
    source, target = (
        (slab.address_on_device(slots) if isinstance(slab, DeviceSlab) else slab.address(slots)) + np.uint64(offset)
        for slab, slots, offset in ((src, src_slots, offsets[0]), (dst, dst_slots, offsets[1]))
    )
    return dma.copy_batch(target, source, np.full(len(source), nbytes, np.uint64), device.device, stable=host is src)


def _by_kernel(job: _Job) -> None:
    """Move blocks of a device's tensors by one launch; to slots elsewhere they pass through payloads beside them."""
    region, slab, size = job.region, job.slab, job.region.spec.payload_bytes
    assert len(np.atleast_1d(job.slots)) == len(job.positions), "one slot per block"
    if isinstance(slab, DeviceSlab) and slab.device == region.device:
        inside, outside, sizes = job.describe()
        launch.copy_batch(*job.aimed(inside, outside), sizes, region.device)
        _settle(region.device)
        return
    staging = _beside(region, job.staging_slots)
    try:
        for part, rows in job.parts(staging):
            beside = part._replace(slab=staging, slots=rows, payload_offset=0)
            if job.into_slots:
                _by_kernel(beside)
                copy_slots(staging, rows, slab, part.slots, size, dst_offset=job.payload_offset)
            else:
                copy_slots(slab, part.slots, staging, rows, size, src_offset=job.payload_offset)
                _by_kernel(beside)
    finally:
        staging.close()


def _beside(region: Region, slots: int) -> DeviceSlab:
    """Payloads on the device of a region."""
    return DeviceSlab(slots, region.spec.payload_bytes, region.device)


def _staged(job: _Job) -> bool:
    """Whether a packing is involved that is not moved as it is from host to host."""
    packed = job.region.tag.packed_tokens or job.tag.packed_tokens
    return bool(packed) and not (job.tag == job.region.tag and job.slab.device == "cpu")


def _by_reordering(job: _Job) -> None:
    """Move blocks through memory that holds a few of them in the region's own order."""
    region, slab, tag = job.region, job.slab, job.tag
    region.check(job.positions)
    spec, own = region.spec, region.tag
    assert len(np.atleast_1d(job.slots)) == len(job.positions), "one slot per block"
    if not tag.fits(spec):
        raise LayoutError(f"a block of {spec.block_tokens} tokens cannot be in order {tag!r}")
    if not len(job.positions):
        return
    staging = Slab(job.staging_slots, round_up(spec.payload_bytes, PAGE), huge_pages=False)
    try:
        for part, rows in job.parts(staging):
            if job.into_slots:
                gather(region, part.positions, staging, rows, 0, own)
            for row, slot in enumerate(np.asarray(part.slots).tolist()):
                payload = _host_bytes(slab, slot)[job.payload_offset :]
                if job.into_slots:
                    reorder(staging.view[row], own, payload, tag, spec, region.heads)
                    _put_back(slab, slot, payload, job.payload_offset)
                else:
                    reorder(payload, tag, staging.view[row], own, spec, region.heads)
            if not job.into_slots:
                scatter(region, part.positions, staging, rows, 0, own)
    finally:
        staging.close()


def _host_bytes(slab: AnySlab, slot: int) -> npt.NDArray[np.uint8]:
    """A slot's bytes in host memory: the slot itself, or a copy of one on a device."""
    found: npt.NDArray[np.uint8] = slab.view[slot] if slab.device == "cpu" else slot_bytes(slab, slot).cpu().numpy()
    return found


def _put_back(slab: AnySlab, slot: int, payload: npt.NDArray[np.uint8], payload_offset: int) -> None:
    """Write a copy that :func:`_host_bytes` made back to its slot on a device."""
    if slab.device != "cpu":
        import torch

        slot_bytes(slab, slot)[payload_offset:].copy_(torch.from_numpy(payload))


def _by_torch(job: _Job) -> None:
    region, slab = job.region, job.slab
    region.check(job.positions)
    for i, slot in enumerate(np.atleast_1d(job.slots).tolist()):
        block = typed_block(slot_bytes(slab, slot), job.payload_offset, region.spec, job.tag)
        by_token = block if job.tag == Layout.LCND else block.transpose(2, 3)
        for layer, c, tokens, tensor in region.block_views(job.positions, i):
            part = by_token[layer, c, tokens]
            if job.into_slots:
                part.copy_(tensor)
            else:
                tensor.copy_(part)
    _settle(region.device, slab.device)


def _settle(*devices: str) -> None:
    """Wait until queued copies have ended, where no stream of their own does: others may use slot or tensor next."""
    import torch

    for kind in {d.partition(":")[0] for d in devices} - {"cpu", "cuda"}:
        synchronize = getattr(getattr(torch, kind, None), "synchronize", None)
        if synchronize is not None:
            synchronize()
