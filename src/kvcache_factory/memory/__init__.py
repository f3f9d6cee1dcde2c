"""Memory and movement: slabs of slots, engine tensors as addresses, and batched copies between them.

Importing this package does not import torch; using a region or a device does.
"""

from .device import DeviceSlab, find_device
from .move import AnySlab, copy_slots, gather, scatter
from .packed import PackedRegion
from .region import PAGED_LAYOUTS, BlockPositions, PagedRegion, Region, SequenceRegion
from .slab import Slab
from .transfer import choose, chosen_path, copy_batch, force, measure

__all__ = [
    "PAGED_LAYOUTS",
    "AnySlab",
    "BlockPositions",
    "DeviceSlab",
    "PackedRegion",
    "PagedRegion",
    "Region",
    "SequenceRegion",
    "Slab",
    "choose",
    "chosen_path",
    "copy_batch",
    "copy_slots",
    "find_device",
    "force",
    "gather",
    "measure",
    "scatter",
]
