"""Slots on any torch device: payloads only, headers stay with the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec, Layout, round_up
from ..errors import CapacityError, ClosedError, DeviceError
from .slab import Slab

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 256


class DeviceSlab:
    """*slots* payloads of *payload_bytes* bytes on one torch device; the face of :class:`Slab`.

    On "cpu" the memory is a :class:`Slab`.  Raises DeviceError when the device is not there, CapacityError when a size
    is not positive or the device refuses the memory.
    """

    def __init__(self, slots: int, payload_bytes: int, device: str = "cpu") -> None:
        self.slots = slots
        self.slot_bytes = round_up(payload_bytes, _ALIGNMENT)
        self._host: Slab | None = None
        self._bytes: torch.Tensor | None = None
        where = find_device(device)
        self.device = str(where)
        if slots <= 0 or payload_bytes <= 0 or where.type == "cpu":
            self._host = Slab(slots, self.slot_bytes)
        else:
            self._bytes = _allocate(slots, self.slot_bytes, where)
        self.huge_pages = bool(self._host and self._host.huge_pages)

    def address(self, slots: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Address of each slot in bytes; only where the device is the host."""
        assert self._host is not None, f"slots on {self.device} have no host address"
        return self._host.address(slots)

    def address_on_device(self, slots: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Address of each slot in bytes, as the device sees it."""
        if self._host is not None:
            return self._host.address(slots)
        if self._bytes is None:
            raise ClosedError("the slab is closed")
        return np.uint64(self._bytes.data_ptr()) + np.asarray(slots).astype(np.uint64) * np.uint64(self.slot_bytes)

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """uint8 [slots, slot_bytes]; only where the device is the host."""
        assert self._host is not None, f"slots on {self.device} have no host view"
        return self._host.view

    def bytes_of(self, slot: int) -> torch.Tensor:
        """One slot as a uint8 tensor [slot_bytes] on the device."""
        if self._host is not None:
            return slot_bytes(self._host, slot)
        if self._bytes is None:
            raise ClosedError("the slab is closed")
        return self._bytes[slot]

    def block(self, slot: int, spec: BlockSpec, tag: Layout) -> torch.Tensor:
        """One payload, typed: [L, 2, N, H, D] for LCND, [L, 2, H, N, D] for LCHND; a view."""
        return typed_block(self.bytes_of(slot), 0, spec, tag)

    def prefault_in_background(self) -> None:
        """Touch host memory ahead of use; device memory is there from the start."""
        if self._host is not None:
            self._host.prefault_in_background()

    def usage(self) -> tuple[int, int]:
        """Bytes in use on the device by everything in this process, and their peak; of these slots on the host."""
        if self._host is not None:
            return self.slots * self.slot_bytes, self.slots * self.slot_bytes
        import torch

        if torch.device(self.device).type != "cuda":
            size = 0 if self._bytes is None else self._bytes.numel()
            return size, size
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)

    @property
    def prefaulted(self) -> float:
        """Share of the memory, 0 to 1, that has been touched."""
        return self._host.prefaulted if self._host is not None else 1.0

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._bytes = None
        if self._host is not None:
            self._host.close()


def find_device(device: str) -> torch.device:
    """The torch device of this name; DeviceError when this machine does not have it."""
    import torch

    try:
        found = torch.device(device)
        torch.empty(1, dtype=torch.uint8, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError) as error:
        raise DeviceError(
            f"device {device!r} is not available here ({str(error).splitlines()[0]}); "
            "use a device that torch sees, or 'cpu'"
        ) from error
    if found.type == "meta":
        raise DeviceError("device 'meta' holds no bytes; use a device that torch sees, or 'cpu'")
    return found


def _allocate(slots: int, slot_size: int, device: torch.device) -> torch.Tensor:
    import torch

    try:
        return torch.empty((slots, slot_size), dtype=torch.uint8, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        size = slots * slot_size / 2**30
        raise CapacityError(f"{device} refused {size:.2f} GiB ({reason}); use a smaller size_gb") from error


def slot_bytes(slab: Slab | DeviceSlab, slot: int) -> torch.Tensor:
    """One slot of any slab as a uint8 tensor [slot_bytes], without a copy."""
    import torch

    return slab.bytes_of(slot) if isinstance(slab, DeviceSlab) else torch.from_numpy(slab.view[slot])


def typed_block(data: torch.Tensor, payload_offset: int, spec: BlockSpec, tag: Layout) -> torch.Tensor:
    """A payload inside uint8 *data*, typed: [L, 2, N, H, D] for LCND, [L, 2, H, N, D] for LCHND; a view."""
    import torch

    inner = (spec.block_tokens, spec.num_kv_heads) if tag == Layout.LCND else (spec.num_kv_heads, spec.block_tokens)
    payload = data[payload_offset : payload_offset + spec.payload_bytes].view(getattr(torch, spec.dtype.value))
    return payload.view(spec.num_layers, 2, *inner, spec.head_dim)


def empty_blocks(count: int, spec: BlockSpec, device: str) -> torch.Tensor:
    """Room for *count* blocks: a tensor [count, L, 2, N, H, D] whose content is undefined."""
    import torch

    shape = (count, spec.num_layers, 2, spec.block_tokens, spec.num_kv_heads, spec.head_dim)
    return torch.empty(shape, dtype=getattr(torch, spec.dtype.value), device=device)
