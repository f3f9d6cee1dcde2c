"""The packing of vLLM's CPU backend: moved whole where both sides have it, converted exactly where one side has not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.block.spec import PLAIN_LAYOUTS, BlockSpec, KVDtype, Layout
from kvcache_factory.errors import LayoutError
from kvcache_factory.memory import (
    DeviceSlab,
    PackedRegion,
    PagedRegion,
    Region,
    SequenceRegion,
    Slab,
    gather,
    move,
    scatter,
)
from kvcache_factory.memory.order import reorder

DTYPES = [KVDtype.F32, KVDtype.BF16, KVDtype.FP8_E4M3]
KV = npt.NDArray[np.generic]


def spec_of(dtype: KVDtype, tokens: int, heads: int = 2, layers: int = 2, dim: int = 4) -> BlockSpec:
    return BlockSpec(dtype, num_layers=layers, num_kv_heads=heads, head_dim=dim, block_tokens=tokens)


def random_kv(spec: BlockSpec, seed: int) -> KV:
    """Keys and values of one block as bit patterns [layers, 2, heads, tokens, dim]."""
    shape = (spec.num_layers, 2, spec.num_kv_heads, spec.block_tokens, spec.head_dim)
    kind = f"u{spec.dtype.itemsize}"
    return np.random.default_rng(seed).integers(0, np.iinfo(kind).max, shape, kind)


def written_out(kv: KV, tag: Layout) -> npt.NDArray[np.uint8]:
    """A payload as docs/format.md describes its tag, element by element in words rather than in strides."""
    layers, _, heads, tokens, dim = kv.shape
    n = tag.packed_tokens
    if tag == Layout.LCHND:
        cells = [
            kv[layer, c, h, t] for layer in range(layers) for c in (0, 1) for h in range(heads) for t in range(tokens)
        ]
    elif tag == Layout.LCND:
        cells = [
            kv[layer, c, h, t] for layer in range(layers) for c in (0, 1) for t in range(tokens) for h in range(heads)
        ]
    else:
        cells = []
        for layer in range(layers):
            for start in range(0, tokens, n):
                for h in range(heads):
                    cells += [kv[layer, 0, h, start : start + n, d] for d in range(dim)]
                    cells += [kv[layer, 1, h, t] for t in range(start, start + n)]
    return np.concatenate([np.ascontiguousarray(cell).reshape(-1) for cell in cells]).view(np.uint8)


def packed_region(
    spec: BlockSpec, n: int, blocks: int, heads: slice = slice(None)
) -> tuple[PackedRegion, list[torch.Tensor]]:
    """Zeroed tensors as vLLM registers them: every layer's blocks interleaved in one allocation."""
    width = spec.num_kv_heads if heads == slice(None) else heads.stop - heads.start
    dtype = getattr(torch, spec.dtype.value) if spec.dtype.itemsize > 1 else torch.uint8
    whole = torch.zeros(spec.num_layers, blocks, width, n, 2 * spec.head_dim, dtype=dtype)
    tensors = list(whole)
    return PackedRegion(spec, tensors, first_head=heads.start or 0), tensors


def engine_block(kv: KV, n: int, part: int, layer: int, heads: slice = slice(None)) -> npt.NDArray[np.uint8]:
    """What vLLM's CPU backend holds of one engine block of one layer."""
    cut = kv[layer : layer + 1, :, heads, part * n : part * n + n]
    return written_out(cut, Layout.vllm_cpu(n) or Layout.LCND)


@st.composite
def cases(draw: st.DrawFn) -> tuple[BlockSpec, int, int]:
    """A spec, the engine's block size in it, and a seed."""
    n = draw(st.sampled_from([32, 64]))
    tokens = n * draw(st.integers(1, 4))
    spec = spec_of(draw(st.sampled_from(DTYPES)), tokens, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return spec, n, draw(st.integers(0, 1000))


@given(case=cases(), data=st.data())
def test_every_order_turns_into_every_other_bit_by_bit(case: tuple[BlockSpec, int, int], data: st.DataObject) -> None:
    """Whatever the two orders, what arrives is what the page describes."""
    spec, _, seed = case
    possible = [tag for tag in Layout if tag.fits(spec)]
    source, target = (data.draw(st.sampled_from(possible)) for _ in range(2))
    kv = random_kv(spec, seed)
    out = np.zeros(spec.payload_bytes, np.uint8)
    reorder(written_out(kv, source), source, out, target, spec)
    assert np.array_equal(out, written_out(kv, target))


@given(case=cases(), data=st.data())
def test_blocks_leave_and_enter_a_packed_cache_in_any_order(
    case: tuple[BlockSpec, int, int], data: st.DataObject
) -> None:
    """gather() from vLLM's tensors gives the payload of any tag, and scatter() of any tag gives vLLM's tensors."""
    spec, n, seed = case
    tag = data.draw(st.sampled_from([tag for tag in Layout if tag.fits(spec)]))
    parts = spec.block_tokens // n
    ids = data.draw(st.permutations(range(3 * parts))).copy()[: 2 * parts]
    blocks = [random_kv(spec, seed), random_kv(spec, seed + 1)]
    region, tensors = packed_region(spec, n, 3 * parts)
    slab = Slab(3, spec.slot_bytes)
    at = region.positions(np.reshape(ids, (2, parts)))
    for slot, kv in zip((2, 0), blocks, strict=True):
        slab.view[slot, spec.header_bytes : spec.header_bytes + spec.payload_bytes] = written_out(kv, tag)
    scatter(region, at, slab, [2, 0], spec.header_bytes, tag)
    for number, block in enumerate(ids):
        kv, part = blocks[number // parts], number % parts
        for layer, tensor in enumerate(tensors):
            held = tensor[block].contiguous().view(torch.uint8).numpy().reshape(-1)
            assert np.array_equal(held, engine_block(kv, n, part, layer))
    back = Slab(2, spec.slot_bytes)
    gather(region, at, back, [0, 1], spec.header_bytes, tag)
    for slot, kv in enumerate(blocks):
        payload = back.view[slot, spec.header_bytes : spec.header_bytes + spec.payload_bytes]
        assert np.array_equal(payload, written_out(kv, tag))
        assert not back.view[slot, : spec.header_bytes].any()


def plain_engine(kind: str, spec: BlockSpec) -> tuple[Region, list[torch.Tensor]]:
    """Zeroed tensors of an engine without a packing, with room for two blocks."""
    dtype, layers = getattr(torch, spec.dtype.value), range(spec.num_layers)
    shape = (spec.num_kv_heads, 2 * spec.block_tokens, spec.head_dim)
    if kind == "paged":
        tensors = [torch.zeros(2, 2, spec.block_tokens, shape[0], shape[2], dtype=dtype) for _ in layers]
        return PagedRegion.from_tensors(tensors, spec), tensors
    keys, values = ([torch.zeros(1, *shape, dtype=dtype) for _ in layers] for _ in range(2))
    return SequenceRegion.from_layers(keys, values, spec), keys + values


@pytest.mark.parametrize("kind", ["paged", "sequence"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("staging", [1, 8 << 20])
def test_what_vllm_wrote_is_read_by_other_engines(
    path: str, kind: str, dtype: KVDtype, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed slot is scattered into plain tensors and gathered back as it was, one by one or all at once."""
    monkeypatch.setattr(move, "_STAGING_BYTES", staging)
    spec, tag = spec_of(dtype, 64), Layout.VLLM_CPU_32
    region, tensors = plain_engine(kind, spec)
    at = region.positions([[1], [0]]) if isinstance(region, PagedRegion) else region.positions(0, [64, 0])  # type: ignore[attr-defined]
    blocks = [random_kv(spec, 1), random_kv(spec, 2)]
    slab, plain, back = (Slab(2, spec.slot_bytes) for _ in range(3))
    for slot, kv in enumerate(blocks):
        slab.view[slot, : spec.payload_bytes] = written_out(kv, tag)
    scatter(region, at, slab, [0, 1], 0, tag)
    gather(region, at, plain, [0, 1], 0, Layout.LCHND)
    gather(region, at, back, [0, 1], 0, tag)
    for slot, kv in enumerate(blocks):
        assert np.array_equal(plain.view[slot, : spec.payload_bytes], written_out(kv, Layout.LCHND))
        assert np.array_equal(back.view[slot, : spec.payload_bytes], slab.view[slot, : spec.payload_bytes])
    assert all(t.view(torch.uint8).any() for t in tensors)


@pytest.mark.parametrize("tag", [*PLAIN_LAYOUTS, Layout.VLLM_CPU_32, Layout.VLLM_CPU_64])
def test_ranks_fill_one_payload_that_does_not_depend_on_their_number(tag: Layout) -> None:
    """Each rank writes and reads its own heads of a payload, and leaves the others' alone."""
    spec = spec_of(KVDtype.F32, 64, heads=4)
    kv = random_kv(spec, 3)
    slab = Slab(1, spec.slot_bytes)
    for heads in (slice(2, 4), slice(0, 1), slice(1, 2)):
        rank, tensors = packed_region(spec, 32, 2, heads)
        for part in (0, 1):
            for layer, tensor in enumerate(tensors):
                data = engine_block(kv, 32, part, layer, heads).copy().view(np.float32)
                tensor[part] = torch.from_numpy(data).view(tensor[part].shape)
        gather(rank, rank.positions([[0, 1]]), slab, [0], 0, tag)
    assert np.array_equal(slab.view[0, : spec.payload_bytes], written_out(kv, tag))
    rank, tensors = packed_region(spec, 32, 2, slice(1, 3))
    scatter(rank, rank.positions([[1, 0]]), slab, [0], 0, tag)
    for layer, tensor in enumerate(tensors):
        held = tensor[1].contiguous().view(torch.uint8).numpy().reshape(-1)
        assert np.array_equal(held, engine_block(kv, 32, 0, layer, slice(1, 3)))


@pytest.mark.parametrize("tag", [*PLAIN_LAYOUTS, Layout.VLLM_CPU_32])
def test_packed_blocks_reach_slots_on_a_device(tag: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slots are no host memory, blocks pass through it and the bytes are the same, both ways."""
    spec = spec_of(KVDtype.BF16, 64)
    region, tensors = packed_region(spec, 32, 4)
    for tensor in tensors:
        tensor.view(torch.int16).random_()
    at = region.positions([[3, 1], [0, 2]])
    host, device = Slab(2, spec.slot_bytes), DeviceSlab(2, spec.payload_bytes)
    gather(region, at, host, [0, 1], 0, tag)
    monkeypatch.setattr(device, "device", "elsewhere:0")
    gather(region, at, device, [0, 1], 0, tag)
    assert np.array_equal(device.view[:, : spec.payload_bytes], host.view[:, : spec.payload_bytes])
    before = [t.clone() for t in tensors]
    for tensor in tensors:
        tensor.zero_()
    scatter(region, at, device, [0, 1], 0, tag)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, tensors, strict=True))


def test_no_blocks_are_a_batch_too() -> None:
    """Nothing to move, in any order, moves nothing."""
    region, _ = packed_region(spec_of(KVDtype.F32, 64), 32, 1)
    slab = Slab(1, region.spec.slot_bytes)
    for tag in (Layout.LCHND, Layout.VLLM_CPU_32):
        gather(region, region.positions(np.empty((0, 2), np.int64)), slab, np.empty(0, np.int64), 0, tag)
    assert not slab.view.any()


def test_numbers_of_orders_are_for_ever() -> None:
    """Columns and logs keep these numbers; docs/format.md lists them."""
    assert {tag.value: tag.code for tag in Layout} == {
        "LCND": 0,
        "LCHND": 1,
        "VLLM_CPU_32": 2,
        "VLLM_CPU_64": 3,
        "VLLM_CPU_128": 4,
        "VLLM_CPU_256": 5,
    }
    assert all(Layout.of_code(tag.code) is tag and Layout.named(tag.value) is tag for tag in Layout)
    assert Layout.named("VLLM_CPU_48") is None


def test_tensors_that_are_no_such_cache_are_refused() -> None:
    """The message says which layer and why."""
    spec = spec_of(KVDtype.F32, 64)
    good = [torch.zeros(2, 2, 32, 8) for _ in range(2)]
    bad: list[tuple[list[torch.Tensor], str]] = [
        (good[:1], "1 tensors for 2 layers"),
        ([good[0], torch.zeros(2, 2, 32, 16)], "layer 1: shape"),
        ([good[0], torch.zeros(2, 2, 32, 8).bfloat16()], r"layer 1: dtype is torch\.bfloat16"),
        ([good[0], torch.zeros(2, 2, 8, 32).mT], "layer 1: blocks must be whole"),
        ([torch.zeros(2, 2, 48, 8)] * 2, "blocks of 48 tokens"),
        ([torch.zeros(2, 2, 128, 8)] * 2, "blocks of 128 tokens"),
        ([torch.zeros(2, 3, 32, 8)] * 2, "heads 0 to 2"),
    ]
    for tensors, words in bad:
        with pytest.raises(LayoutError, match=words):
            PackedRegion(spec, tensors)
    with pytest.raises(LayoutError, match="heads 1 to 2"):
        PackedRegion(spec, good, first_head=1)


def test_orders_and_positions_that_cannot_be_are_refused() -> None:
    """A packing of 128 tokens has no block of 64, and block 2 is not among two."""
    spec = spec_of(KVDtype.F32, 64)
    region, _ = packed_region(spec, 32, 2)
    slab = Slab(1, spec.slot_bytes)
    with pytest.raises(LayoutError, match="cannot be in order"):
        gather(region, region.positions([[0, 1]]), slab, [0], 0, Layout.VLLM_CPU_128)
    for tag in (Layout.VLLM_CPU_32, Layout.LCND):
        with pytest.raises(LayoutError, match=r"not in 0\.\.1"):
            gather(region, region.positions([[0, 2]]), slab, [0], 0, tag)
