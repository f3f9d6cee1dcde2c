"""Transformers' own keys and values, in and out of the packing that vLLM's CPU backend keeps."""

from __future__ import annotations

import pytest
import torch
from tiny_models import prompt, tiny_llama

from kvcache_factory.block.spec import BlockSpec, KVDtype, Layout
from kvcache_factory.integration.transformers.layout import cache_argument
from kvcache_factory.memory import PackedRegion, SequenceRegion, Slab, gather, scatter

BLOCKS, TOKENS = 2, 64


def prefilled() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values [1, heads, tokens, dim] of each layer after a prompt of two blocks."""
    model = tiny_llama()
    with torch.no_grad():
        output = model(prompt(BLOCKS * TOKENS), use_cache=True)
    cache = getattr(output, cache_argument(model), None) or output.past_key_values
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


@pytest.mark.parametrize("n", [32, 64])
def test_a_prefill_reaches_a_packed_cache_and_comes_back(n: int) -> None:
    """Each block and head holds K transposed and then V; read back in Transformers' order, nothing has changed."""
    keys, values = prefilled()
    heads, dim = keys[0].shape[1], keys[0].shape[3]
    spec = BlockSpec(KVDtype.F32, len(keys), heads, dim, TOKENS)
    sequence = SequenceRegion.from_layers(keys, values, spec)
    tensors = [torch.zeros(BLOCKS * TOKENS // n, heads, n, 2 * dim) for _ in keys]
    packed = PackedRegion(spec, tensors)
    at = packed.positions(range(len(tensors[0])))
    slab = Slab(BLOCKS, spec.slot_bytes)
    gather(sequence, sequence.positions(0, [0, TOKENS]), slab, range(BLOCKS), spec.header_bytes, sequence.tag)
    scatter(packed, at, slab, range(BLOCKS), spec.header_bytes, sequence.tag)
    for tensor, k, v in zip(tensors, keys, values, strict=True):
        for block in range(len(tensor)):
            for head in range(heads):
                mine = slice(block * n, block * n + n)
                first, second = tensor[block, head].reshape(2, -1)
                assert torch.equal(first, k[0, head, mine].T.reshape(-1))
                assert torch.equal(second, v[0, head, mine].reshape(-1))
    back = Slab(BLOCKS, spec.slot_bytes)
    gather(packed, at, back, range(BLOCKS), spec.header_bytes, packed.tag)
    restored = [torch.zeros_like(t) for t in [*keys, *values]]
    other = SequenceRegion.from_layers(restored[: len(keys)], restored[len(keys) :], spec)
    scatter(other, other.positions(0, [0, TOKENS]), back, range(BLOCKS), spec.header_bytes, packed.tag)
    assert all(torch.equal(a, b) for a, b in zip(restored, [*keys, *values], strict=True))
    assert packed.tag == Layout.vllm_cpu(n)
