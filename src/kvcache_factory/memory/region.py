"""Engine tensors as addresses: which bytes of memory a storage block's payload is made of.

Whatever the axes of an engine's tensors, an element of block (a, b) lies at
``base[l, c] + a * stride_a + b * stride_b + token * stride_t + head * stride_h``; a region is these five columns.
Comparing them with the order of a payload gives the coarsest pieces that are contiguous on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec, Layout
from ..errors import DeviceError, LayoutError

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

PAGED_LAYOUTS = ("2BNHD", "B2NHD", "2BHND", "B2HND")


@dataclass(frozen=True, slots=True)
class BlockPositions:
    """Where n storage blocks are in a region; a and b are int64 [n, m], m engine blocks per storage block.

    Paged: ``a`` is the engine's block number, ``b`` is not read.  Sequences: ``a`` is the row, ``b`` the first token.
    """

    a: Ints
    b: Ints

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, part: slice) -> BlockPositions:
        return BlockPositions(self.a[part], self.b[part])


class Pieces(NamedTuple):
    """One block's payload in pieces: k columns, in payload order."""

    part: Ints  # which of the m engine blocks
    base: Addresses
    stride_a: Addresses
    stride_b: Addresses
    offset: Addresses  # bytes from the start of the payload
    size: Addresses
    uniform: bool  # stride_a and stride_b are the same for all pieces


class Region:
    """Tensors of one engine, in which blocks are found by position.  Keeps the tensors alive."""

    def __init__(self, spec: BlockSpec, views: Sequence[tuple[torch.Tensor, torch.Tensor]], part_tokens: int) -> None:
        """*views*: (keys, values) of each layer with axes [a, b, token, head, dim] in that order."""
        self.spec = spec
        self.part_tokens = part_tokens
        self.parts = spec.block_tokens // part_tokens
        self.heads = slice(0, spec.num_kv_heads)
        self._views = views
        flat = [t for pair in views for t in pair]
        self.device = str(flat[0].device)
        _check(spec, flat)
        self._base = np.array([t.data_ptr() for t in flat], np.int64)
        self._strides = np.array([t.stride() for t in flat], np.int64) * spec.dtype.itemsize
        shape = flat[0].shape
        self._limit_a, self._limit_b = int(shape[0]), int(shape[1])
        shared = (np.array(shape[:4]) > 1) & (self._strides[:, :4] == 0)
        self.writable = not bool(shared.any())
        self.tag = self._usual_tag
        if spec.num_kv_heads > 1 and part_tokens > 1:
            heads_inside = bool((self._strides[:, 3] <= self._strides[:, 2]).all())
            self.tag = Layout.LCND if heads_inside else Layout.LCHND
        self._pieces: dict[Layout, Pieces] = {}

    _usual_tag = Layout.LCND  # where one head or one token makes both orders the same bytes

    @property
    def on_host(self) -> bool:
        """Whether the tensors lie in memory that the CPU addresses."""
        return self.device == "cpu"

    def describe(self, positions: BlockPositions, tag: Layout) -> tuple[Addresses, Addresses, Addresses]:
        """Where the payloads of n blocks in order *tag* lie: (addresses [n, k], offsets [k], sizes [k]), uint64, bytes.

        Offsets are within the payload.  Pieces are as coarse as both orders allow: down to one head of one token.
        Raises LayoutError when a position is out of range or *tag* is a packing this region cannot express.
        """
        a, b = self.check(positions)
        p = self._pieces.get(tag)
        if p is None:
            p = self._pieces[tag] = self._cut(tag)
        if p.uniform:
            origin = a * p.stride_a[0]
            if self._limit_b > 1:
                origin += b * p.stride_b[0]
            found = (origin if self.parts == 1 else origin.take(p.part, axis=1)) + p.base
        else:
            found = a.take(p.part, axis=1) * p.stride_a + p.base
            if self._limit_b > 1:
                found += b.take(p.part, axis=1) * p.stride_b
        return found, p.offset, p.size

    def check(self, positions: BlockPositions) -> tuple[Addresses, Addresses]:
        """The positions as unsigned numbers; LayoutError unless every one lies inside the tensors."""
        if positions.a.ndim != 2 or positions.a.shape != positions.b.shape or positions.a.shape[1] != self.parts:
            raise LayoutError(
                f"positions must be two [n, {self.parts}] arrays, not {positions.a.shape} and {positions.b.shape}"
            )
        assert positions.a.dtype == positions.b.dtype == np.int64, "positions are int64"
        a, b = positions.a.view(np.uint64), positions.b.view(np.uint64)  # negative numbers become huge ones
        if a.size and a.max() >= self._limit_a:
            raise LayoutError(f"block or row {positions.a.min()}..{positions.a.max()} is not in 0..{self._limit_a - 1}")
        if b.size and self._limit_b > 1 and b.max() >= self._limit_b:
            raise LayoutError(f"start {positions.b.min()}..{positions.b.max()} is not in 0..{self._limit_b - 1}")
        return a, b

    def block_views(self, positions: BlockPositions, i: int) -> Iterator[tuple[int, int, slice, torch.Tensor]]:
        """Tensors of block *i*: (layer, 0 keys | 1 values, its tokens in the block, tensor [tokens, heads, dim])."""
        n = self.part_tokens
        for part in range(self.parts):
            a, b = int(positions.a[i, part]), int(positions.b[i, part]) if self._limit_b > 1 else 0
            for layer, pair in enumerate(self._views):
                for c in (0, 1):
                    yield layer, c, slice(part * n, part * n + n), pair[c][a, b]

    def _cut(self, tag: Layout) -> Pieces:
        """The coarsest pieces of one block that are contiguous in memory and in a payload of order *tag*."""
        s, n = self.spec, self.part_tokens
        cell = s.head_dim * s.dtype.itemsize
        if tag == Layout.LCND:  # (count, column of the stride in memory, stride in the payload), innermost first
            axes = [(s.num_kv_heads, 3, cell), (n, 2, cell * s.num_kv_heads)]
        elif tag == Layout.LCHND:
            axes = [(n, 2, cell), (s.num_kv_heads, 3, cell * s.block_tokens)]
        else:
            raise LayoutError(f"payload order {tag!r} is a packing, which no pieces of this region make up; convert it")
        chunk = cell
        while axes and (axes[0][0] == 1 or (axes[0][2] == chunk and (self._strides[:, axes[0][1]] == chunk).all())):
            chunk *= axes[0][0]
            del axes[0]
        plane = cell * s.num_kv_heads * s.block_tokens
        part_step = cell * n * (s.num_kv_heads if tag == Layout.LCND else 1)
        planes, part = (x.reshape(-1) for x in np.indices((len(self._base), self.parts)))
        base, offset = self._base[planes], planes * plane + part * part_step
        for count, column, step in axes:
            k = np.arange(count)
            base = (base[:, None] + k * self._strides[planes, column][:, None]).reshape(-1)
            offset = (offset[:, None] + k * step).reshape(-1)
            planes, part = np.repeat(planes, count), np.repeat(part, count)
        return _merged(part, base, self._strides[planes, 0], self._strides[planes, 1], offset, chunk)


def _merged(part: Ints, base: Ints, stride_a: Ints, stride_b: Ints, offset: Ints, chunk: int) -> Pieces:
    """Pieces in payload order, neighbours joined where they are neighbours in memory for every position."""
    order = np.argsort(offset, kind="stable")
    part, base, stride_a, stride_b, offset = (x[order] for x in (part, base, stride_a, stride_b, offset))
    joins = (np.diff(base) == chunk) & (np.diff(offset) == chunk)
    for column in (part, stride_a, stride_b):
        joins &= np.diff(column) == 0
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    size = np.diff(np.append(first, len(base))) * chunk
    base_u, a, b, offset_u, size_u = (
        x.astype(np.uint64) for x in (base[first], stride_a[first], stride_b[first], offset[first], size)
    )
    uniform = bool((a == a[0]).all() and (b == b[0]).all())
    return Pieces(part[first], base_u, a, b, offset_u, size_u, uniform)


def _check(spec: BlockSpec, tensors: Sequence[torch.Tensor]) -> None:
    want = tensors[0].shape
    for i, t in enumerate(tensors):
        where = f"layer {i // 2} {'values' if i % 2 else 'keys'}"
        if str(t.dtype) != f"torch.{spec.dtype.value}":
            raise LayoutError(f"{where}: dtype is {t.dtype}, the block spec says {spec.dtype.value}; register its spec")
        if t.shape != want:
            raise LayoutError(f"{where}: the shape differs from layer 0's; only equal layers can share a block")
        if t.stride(-1) != 1 and t.shape[-1] != 1:
            raise LayoutError(f"{where}: head_dim is not contiguous (stride {t.stride(-1)}); call .contiguous() first")
        if str(t.device) != str(tensors[0].device):
            raise DeviceError(f"{where}: is on {t.device}, layer 0 on {tensors[0].device}; a region has one device")
        if t.device.type == "meta" or str(t.layout) != "torch.strided":
            raise LayoutError(f"{where}: a {t.layout} tensor on {t.device} has no addresses; give dense tensors")
    heads, dim = want[-2:]
    if (heads, dim) != (spec.num_kv_heads, spec.head_dim):
        raise LayoutError(
            f"tensors have {heads} heads of {dim}, the block spec says {spec.num_kv_heads} of {spec.head_dim}"
        )


class PagedRegion(Region):
    """A paged KV cache: tensors of engine blocks, found by block number."""

    @classmethod
    def from_tensors(cls, tensors: Sequence[torch.Tensor], spec: BlockSpec, layout: str = "2BNHD") -> PagedRegion:
        """One 5-D tensor per layer; *layout* orders its axes: 2 keys/values, B blocks, N tokens, H heads, D dim.

        N may be smaller than ``spec.block_tokens`` and must divide it.  Raises LayoutError, DeviceError.
        """
        if layout not in PAGED_LAYOUTS:
            raise LayoutError(f"paged layout {layout!r} is not one of {', '.join(PAGED_LAYOUTS)}")
        _count(tensors, spec)
        for layer, t in enumerate(tensors):
            if t.dim() != 5 or t.shape[layout.index("2")] != 2:
                raise LayoutError(f"layer {layer}: shape {tuple(t.shape)} is not {layout}; pass the layout it has")
        ordered = [t.detach().permute([layout.index(x) for x in "2BNHD"]) for t in tensors]
        return cls._paged([(t[0], t[1]) for t in ordered], spec)

    @classmethod
    def from_cross_layer(cls, tensor: torch.Tensor, spec: BlockSpec) -> PagedRegion:
        """All layers in one tensor [B, L, 2, N, H, D]: with N = ``block_tokens`` a block is one piece of memory."""
        if tensor.dim() != 6 or tensor.shape[1] != spec.num_layers or tensor.shape[2] != 2:
            raise LayoutError(f"shape {tuple(tensor.shape)} is not [blocks, {spec.num_layers} layers, 2, N, H, D]")
        t = tensor.detach()
        return cls._paged([(t[:, layer, 0], t[:, layer, 1]) for layer in range(spec.num_layers)], spec)

    @classmethod
    def _paged(cls, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], spec: BlockSpec) -> PagedRegion:
        tokens = int(pairs[0][0].shape[1])
        if not tokens or spec.block_tokens % tokens:
            raise LayoutError(
                f"engine blocks of {tokens} tokens do not divide storage blocks of {spec.block_tokens}; "
                "choose block_tokens as a multiple of the engine's block"
            )
        return cls(spec, [(k.unsqueeze(1), v.unsqueeze(1)) for k, v in pairs], tokens)

    def positions(self, block_ids: npt.ArrayLike) -> BlockPositions:
        """Positions of storage blocks made of engine blocks *block_ids*: int [n, m], or [n] where m is 1."""
        a = np.ascontiguousarray(block_ids, np.int64)
        a = a.reshape(-1, self.parts) if a.ndim < 2 else a
        return BlockPositions(a, np.zeros(a.shape, np.int64))


class SequenceRegion(Region):
    """Sequences as Transformers keeps them: [batch, heads, tokens, dim] for each layer's keys and values."""

    _usual_tag = Layout.LCHND

    @classmethod
    def from_layers(
        cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], spec: BlockSpec
    ) -> SequenceRegion:
        """One 4-D tensor [B, H, T, D] of any strides per layer, keys and values.  Raises LayoutError, DeviceError."""
        _count(keys, spec)
        _count(values, spec)
        for layer, t in enumerate([*keys, *values]):
            if t.dim() != 4 or t.shape[2] < spec.block_tokens:
                raise LayoutError(
                    f"layer {layer % spec.num_layers}: shape {tuple(t.shape)} is not "
                    f"[batch, heads, at least {spec.block_tokens} tokens, dim]"
                )
        # unfold adds, without a copy, an axis of possible starts: [B, H, starts, D, N] -> [B, starts, N, H, D]
        views = [
            tuple(t.detach().unfold(2, spec.block_tokens, 1).permute(0, 2, 4, 1, 3) for t in pair)
            for pair in zip(keys, values, strict=True)
        ]
        return cls(spec, [(k, v) for k, v in views], spec.block_tokens)

    def positions(self, rows: npt.ArrayLike, starts: npt.ArrayLike) -> BlockPositions:
        """Positions of blocks that begin at token *starts* (int [n]) of batch rows *rows* (int [n] or one number)."""
        b = np.ascontiguousarray(starts, np.int64).reshape(-1, 1)
        a = np.ascontiguousarray(np.broadcast_to(np.asarray(rows, np.int64).reshape(-1, 1), b.shape))
        return BlockPositions(a, b)


def _count(tensors: Sequence[torch.Tensor], spec: BlockSpec) -> None:
    if len(tensors) != spec.num_layers:
        raise LayoutError(f"{len(tensors)} tensors for {spec.num_layers} layers; pass one per layer")
