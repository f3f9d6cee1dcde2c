"""Engine tensors of every layout go into slots and come back bit for bit, in both payload orders."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache_factory.block.spec import PLAIN_LAYOUTS, BlockSpec, KVDtype, Layout
from kvcache_factory.errors import LayoutError
from kvcache_factory.memory import BlockPositions, PagedRegion, Region, SequenceRegion, Slab, gather, scatter

BLOCKS = 7
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Engine:
    """One engine's tensors, a region over them, and the positions of three of its storage blocks."""

    region: Region
    positions: BlockPositions
    tensors: list[torch.Tensor]

    def block(self, i: int) -> torch.Tensor:
        """Block i read through torch alone, as [L, 2, T, H, D]."""
        planes: dict[tuple[int, int], list[torch.Tensor]] = {}
        for layer, c, _, tensor in self.region.block_views(self.positions, i):
            planes.setdefault((layer, c), []).append(tensor)
        whole = torch.stack([torch.cat(planes[key]) for key in sorted(planes)])
        return whole.reshape(self.region.spec.num_layers, 2, *whole.shape[1:])


def filled(shape: tuple[int, ...], dtype: KVDtype, rng: np.random.Generator) -> torch.Tensor:
    """A tensor of random bits (which includes NaN patterns: movement must not look at values)."""
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype.value))


def paged(layout: str, spec: BlockSpec, parts: int, rng: np.random.Generator, shift: int) -> Engine:
    sizes = {"2": 2, "B": BLOCKS * parts, "N": spec.block_tokens // parts, "H": spec.num_kv_heads, "D": spec.head_dim}
    shape = tuple(sizes[x] for x in layout)
    tensors = [filled((*shape[:-1], shape[-1] + shift), spec.dtype, rng)[..., shift:] for _ in range(spec.num_layers)]
    region = PagedRegion.from_tensors(tensors, spec, layout)
    return Engine(region, region.positions(rng.permutation(BLOCKS * parts)[: 3 * parts].reshape(3, parts)), tensors)


def cross_layer(spec: BlockSpec, parts: int, rng: np.random.Generator, shift: int) -> Engine:
    n = spec.block_tokens // parts
    tensor = filled((BLOCKS * parts, spec.num_layers, 2, n, spec.num_kv_heads, spec.head_dim + shift), spec.dtype, rng)
    region = PagedRegion.from_cross_layer(tensor[..., shift:], spec)
    return Engine(region, region.positions(rng.permutation(BLOCKS * parts)[: 3 * parts].reshape(3, parts)), [tensor])


def sequences(spec: BlockSpec, rng: np.random.Generator, shift: int, transposed: bool) -> Engine:
    tokens = 4 * spec.block_tokens + 1
    shape = (2, tokens, spec.num_kv_heads) if transposed else (2, spec.num_kv_heads, tokens)
    made = [filled((*shape, spec.head_dim + shift), spec.dtype, rng)[..., shift:] for _ in range(2 * spec.num_layers)]
    tensors = [t.transpose(1, 2) for t in made] if transposed else made
    region = SequenceRegion.from_layers(tensors[: spec.num_layers], tensors[spec.num_layers :], spec)
    starts = np.array([0, 1, 2]) * spec.block_tokens + int(rng.integers(0, 2))
    return Engine(region, region.positions([0, 1, 0], starts), tensors)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    parts = draw(st.sampled_from([1, 2, 4]))
    spec = BlockSpec(
        dtype=draw(st.sampled_from(list(KVDtype))),
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 2, 8, 40, 64])),
        block_tokens=parts * draw(st.sampled_from([1, 3, 8])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shift = draw(st.integers(0, 1))  # one element off, so that heads are not adjacent and addresses are odd
    kind = draw(st.sampled_from(["2BNHD", "B2NHD", "2BHND", "B2HND", "cross", "sequence", "transposed"]))
    if kind == "cross":
        return cross_layer(spec, parts, rng, shift)
    if kind in ("sequence", "transposed"):
        return sequences(spec, rng, shift, kind == "transposed")
    return paged(kind, spec, parts, rng, shift)


def bits(t: torch.Tensor) -> Any:
    return t.contiguous().view(torch.uint8).numpy()


@MANY
@given(engine=engines(), tag=st.sampled_from(list(PLAIN_LAYOUTS)))
def test_a_block_goes_into_a_slot_in_the_asked_order_and_comes_back(path: str, engine: Engine, tag: Layout) -> None:
    """Gather gives [L, 2, N, H, D] or [L, 2, H, N, D]; scatter restores the tensors; nothing else changes."""
    spec = engine.region.spec
    slab = Slab(5, spec.slot_bytes)
    slab.view[:] = 0xA5
    slots = np.array([4, 0, 2])
    before = [t.clone() for t in engine.tensors]
    gather(engine.region, engine.positions, slab, slots, spec.header_bytes, tag)
    for i, slot in enumerate(slots.tolist()):
        want = engine.block(i) if tag == Layout.LCND else engine.block(i).transpose(2, 3)
        payload = slab.view[slot, spec.header_bytes : spec.header_bytes + spec.payload_bytes]
        assert np.array_equal(payload, bits(want).reshape(-1))
        assert (slab.view[slot, : spec.header_bytes] == 0xA5).all()
        assert (slab.view[slot, spec.header_bytes + spec.payload_bytes :] == 0xA5).all()
    assert (slab.view[[1, 3]] == 0xA5).all()
    for i in range(3):
        for *_, tensor in engine.region.block_views(engine.positions, i):
            tensor.zero_()
    scatter(engine.region, engine.positions, slab, slots, spec.header_bytes, tag)
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(before, engine.tensors, strict=True))
    slab.close()


@MANY
@given(engine=engines(), tag=st.sampled_from(list(PLAIN_LAYOUTS)))
def test_pieces_tile_the_payload(engine: Engine, tag: Layout) -> None:
    """Offsets and sizes cover every byte of the payload once, in order."""
    addresses, offsets, sizes = engine.region.describe(engine.positions, tag)
    assert addresses.shape == (3, len(offsets))
    assert np.array_equal(np.append(offsets, engine.region.spec.payload_bytes), np.append(0, np.cumsum(sizes)))


SPEC = BlockSpec(KVDtype.F32, num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=4)


@pytest.mark.parametrize(
    ("kind", "pieces", "tag"),
    [("2BNHD", 4, Layout.LCND), ("B2NHD", 2, Layout.LCND), ("2BHND", 4, Layout.LCHND), ("cross", 1, Layout.LCND)],
)
def test_a_native_order_needs_few_pieces(kind: str, pieces: int, tag: Layout) -> None:
    """In its own order a paged block is one piece per layer and plane, per layer, or in all."""
    rng = np.random.default_rng(1)
    engine = cross_layer(SPEC, 1, rng, 0) if kind == "cross" else paged(kind, SPEC, 1, rng, 0)
    assert engine.region.tag == tag
    assert len(engine.region.describe(engine.positions, tag)[1]) == pieces


def test_a_sequence_is_described_per_head_or_per_token_by_its_strides() -> None:
    """Contiguous [B, H, T, D] is LCHND with one piece per head; a transposed view of [B, T, H, D] is LCND."""
    rng = np.random.default_rng(1)
    plain, transposed = sequences(SPEC, rng, 0, False), sequences(SPEC, rng, 0, True)
    assert (plain.region.tag, len(plain.region.describe(plain.positions, Layout.LCHND)[1])) == (Layout.LCHND, 8)
    assert (transposed.region.tag, len(transposed.region.describe(transposed.positions, Layout.LCND)[1])) == ("LCND", 4)


def test_expanded_tensors_are_read_but_never_written(path: str) -> None:
    """One row expanded over the batch can be saved; loading into it would write one element twice."""
    one = [filled((1, 2, 8, 8), KVDtype.F32, np.random.default_rng(i)).expand(3, 2, 8, 8) for i in range(4)]
    region = SequenceRegion.from_layers(one[:2], one[2:], SPEC)
    slab = Slab(1, SPEC.slot_bytes)
    gather(region, region.positions(2, [3]), slab, [0], 0, Layout.LCHND)
    assert np.array_equal(
        slab.view[0, :256].view(np.float32), one[0][2, :, 3:7].numpy().reshape(-1)[:64], equal_nan=True
    )
    with pytest.raises(LayoutError, match="contiguous"):
        scatter(region, region.positions(0, [0]), slab, [0], 0, Layout.LCHND)


def test_bad_tensors_are_refused_with_what_and_where() -> None:
    """Shapes, dtypes, counts and strides that cannot be described raise at registration, naming the layer."""
    good = torch.zeros(2, BLOCKS, 4, 2, 8)
    cases: list[tuple[list[torch.Tensor], str, str]] = [
        ([good], "2BNHD", "1 tensors for 2 layers"),
        ([good, good.half()], "2BNHD", "layer 1 keys: dtype"),
        ([good, good[0]], "2BNHD", "layer 1: shape"),
        ([good, good], "B2NHD", "layer 0: shape"),
        ([good, good], "NHD", "paged layout"),
        ([good, good[:, :3]], "2BNHD", "layer 1 keys: the shape differs"),
        ([torch.zeros(2, BLOCKS, 3, 2, 8)] * 2, "2BNHD", "do not divide"),
        ([torch.zeros(2, BLOCKS, 4, 3, 8)] * 2, "2BNHD", "3 heads of 8"),
        ([torch.zeros(2, BLOCKS, 4, 2, 16)[..., ::2]] * 2, "2BNHD", "head_dim is not contiguous"),
        ([good.to("meta")] * 2, "2BNHD", "no addresses"),
    ]
    for tensors, layout, message in cases:
        with pytest.raises(LayoutError, match=message):
            PagedRegion.from_tensors(tensors, SPEC, layout)
    with pytest.raises(LayoutError, match="not \\[blocks"):
        PagedRegion.from_cross_layer(good, SPEC)
    with pytest.raises(LayoutError, match="at least 4 tokens"):
        SequenceRegion.from_layers([torch.zeros(1, 2, 3, 8)] * 2, [torch.zeros(1, 2, 3, 8)] * 2, SPEC)


def test_positions_outside_the_tensors_are_refused_before_a_byte_moves() -> None:
    """A block number, row or start beyond the tensors raises; so does the wrong number of parts."""
    region = PagedRegion.from_tensors([torch.zeros(2, BLOCKS, 4, 2, 8)] * 2, SPEC)
    rows = SequenceRegion.from_layers([torch.zeros(2, 2, 9, 8)] * 2, [torch.zeros(2, 2, 9, 8)] * 2, SPEC)
    for tensors, bad in (
        (region, region.positions([0, BLOCKS])),
        (region, region.positions([-1])),
        (region, region.positions([[0, 1]])),
        (rows, rows.positions(2, [0])),
        (rows, rows.positions(0, [6])),
        (rows, rows.positions(0, [-1])),
    ):
        with pytest.raises(LayoutError):
            tensors.describe(bad, Layout.LCND)
    with pytest.raises(LayoutError, match="is a packing"):
        region.describe(region.positions([0]), "vllm-cpu")  # type: ignore[arg-type]
