"""Regions whose engine blocks are packed: whole blocks are moved as they lie, and any other order is a conversion.

Inside an engine block and head, vLLM's CPU backend keeps the keys transposed: [D][n], and then the values [n][D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec, Layout
from ..errors import LayoutError
from .region import BlockPositions, Pieces, Region

if TYPE_CHECKING:
    import torch


class PackedRegion(Region):
    """The KV cache of vLLM's CPU backend: one tensor [blocks, heads, n, 2 * head_dim] per layer, each block whole.

    *tensors* may hold some of the heads of *spec*, from *first_head* on: the shard of one rank.  The ranks' shards of a
    payload lie between each other, so that a payload is the same whatever the number of ranks.

    Raises LayoutError for another shape, dtype or stride, for engine blocks that have no named packing or that do not
    divide the storage block, and for heads that the spec does not have.
    """

    def __init__(self, spec: BlockSpec, tensors: Sequence[torch.Tensor], *, first_head: int = 0) -> None:
        if len(tensors) != spec.num_layers:
            raise LayoutError(f"{len(tensors)} tensors for {spec.num_layers} layers; pass one per layer")
        heads, tokens = _geometry(spec, tensors)
        tag = Layout.vllm_cpu(tokens)
        if tag is None or not tag.fits(spec):
            raise LayoutError(
                f"engine blocks of {tokens} tokens cannot be kept in storage blocks of {spec.block_tokens}; "
                "use --block-size 32, 64, 128 or 256, and a multiple of it as block_tokens"
            )
        if first_head < 0 or first_head + heads > spec.num_kv_heads:
            raise LayoutError(f"heads {first_head} to {first_head + heads - 1} are not among {spec.num_kv_heads}")
        self.spec = spec
        self.tag = tag
        self.part_tokens = tokens
        self.parts = spec.block_tokens // tokens
        self.heads = slice(first_head, first_head + heads)
        self.device = "cpu"
        self.writable = True
        self._tensors = list(tensors)
        self._limit_a, self._limit_b = int(tensors[0].shape[0]), 1
        self._pieces = {}

    def positions(self, block_ids: npt.ArrayLike) -> BlockPositions:
        """Positions of storage blocks made of engine blocks *block_ids*: int [n, m], or [n] where m is 1."""
        a = np.ascontiguousarray(block_ids, np.int64)
        a = a.reshape(-1, self.parts) if a.ndim < 2 else a
        return BlockPositions(a, np.zeros(a.shape, np.int64))

    def _cut(self, tag: Layout) -> Pieces:
        """One piece for each layer and engine block, for payloads in the region's own order."""
        if tag != self.tag:
            raise LayoutError(f"payload order {tag!r} is not {self.tag!r}, in which these blocks lie; convert it")
        head = 2 * self.part_tokens * self.spec.head_dim * self.spec.dtype.itemsize
        layer, part = (x.reshape(-1) for x in np.indices((self.spec.num_layers, self.parts)))
        base = np.array([t.data_ptr() for t in self._tensors], np.uint64)[layer]
        stride = np.array([t.stride(0) * t.element_size() for t in self._tensors], np.uint64)[layer]
        offset = ((layer * self.parts + part) * self.spec.num_kv_heads + self.heads.start) * head
        size = np.full(len(base), (self.heads.stop - self.heads.start) * head, np.uint64)
        uniform = bool((stride == stride[0]).all())
        return Pieces(part, base, stride, np.zeros_like(stride), offset.astype(np.uint64), size, uniform)


def _geometry(spec: BlockSpec, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(heads, tokens of an engine block) of all tensors; LayoutError when one is not like the others."""
    want = tensors[0].shape
    for layer, t in enumerate(tensors):
        if t.dim() != 4 or t.shape != want or t.shape[3] != 2 * spec.head_dim:
            raise LayoutError(
                f"layer {layer}: shape {tuple(t.shape)} is not [blocks, heads, tokens, {2 * spec.head_dim}] as layer 0"
            )
        raw = t.element_size() == 1 == spec.dtype.itemsize  # fp8 is held as plain bytes
        if str(t.dtype) != f"torch.{spec.dtype.value}" and not raw:
            raise LayoutError(f"layer {layer}: dtype is {t.dtype}, the block spec says {spec.dtype.value}")
        if t.device.type != "cpu" or (len(t) and not t[0].is_contiguous()):
            raise LayoutError(
                f"layer {layer}: blocks must be whole pieces of host memory; only vLLM's CPU backend packs"
            )
    return int(want[1]), int(want[2])
