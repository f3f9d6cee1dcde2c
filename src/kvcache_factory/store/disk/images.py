"""What a log says about slot images, read from their own headers."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from ...block.spec import PAGE, Layout
from ..base import SlotMemory, Slots
from . import log

# Offsets in the header, which docs/format.md fixes.
_FIDELITY = slice(28, 30)
_DIGESTS = slice(32, 96)
_LAYOUT = slice(128, 160)
OTHER_LAYOUT = 255


class Images:
    """Slot images in host memory: n slots that each hold one from *offset* bytes on."""

    def __init__(self, memory: SlotMemory, slots: Slots, offset: int) -> None:
        assert memory.device == "cpu", "images are read into and written from host memory"
        assert offset % PAGE == 0, "images begin at a page"
        self._bytes = memory.view[:, offset:]
        self._slots = slots

    def views(self, start: int, count: int, size: int) -> list[memoryview]:
        """*count* images from number *start* on, the first *size* bytes of each."""
        assert size <= self._bytes.shape[1], "the slots are smaller than the images"
        return [memoryview(self._bytes[slot])[:size] for slot in self._slots[start : start + count].tolist()]

    def headers(self, part: slice) -> npt.NDArray[np.uint8]:
        """Copies of the first bytes of some images, as far as a log tells of them."""
        return self._bytes[self._slots[part], : _LAYOUT.stop]


def describe(headers: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64], now_ns: int) -> log.Records:
    """PUT records for images, of which *headers* are the first bytes, that rest in *slots* now."""
    records = log.make(log.Kind.PUT, slots)
    records["fidelity"] = headers[:, _FIDELITY.start]
    digests = np.ascontiguousarray(headers[:, _DIGESTS]).view("<u8").reshape(-1, 4, 2)
    for i, name in enumerate(("identity", "key", "parent", "extras")):
        records[name] = digests[:, i]
    names = np.ascontiguousarray(headers[:, _LAYOUT]).view("S32").reshape(-1)
    records["layout"] = OTHER_LAYOUT
    for layout in Layout:
        records["layout"][names == layout.value.encode()] = layout.code
    records["time_ns"] = now_ns
    records["depth"] = -1
    return records


def zeros(size: int) -> memoryview:
    """*size* zero bytes, aligned for direct I/O, that cost no memory until somebody writes to them."""
    return memoryview(mmap.mmap(-1, size))
