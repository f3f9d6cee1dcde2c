"""A live cache that compresses itself: what it holds, what it gives back, where it can be cropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import prompt, tiny_llama
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvcache_factory import CompressionPolicy
from kvcache_factory.errors import ConfigError
from kvcache_factory.integration.transformers import TieredCache, TieredCacheLayer, TransformersCacheAdapter
from kvcache_factory.integration.transformers.layout import cache_argument

Attach = Callable[..., TransformersCacheAdapter]
LENGTH_CROPS = not hasattr(DynamicLayer, "get_max_length")
GREEDY = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}


def filled(policy: CompressionPolicy, tokens: int, rows: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """A layer that has grown to *tokens* tokens in three steps, and what it was given."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(rows, 2, tokens, 64, generator=generator).to(dtype) for _ in range(2))
    layer = TieredCacheLayer(policy)
    for part in (slice(0, tokens // 2), slice(tokens // 2, tokens - 1), slice(tokens - 1, tokens)):
        found = layer.update(k[:, :, part], v[:, :, part])
    return layer, k, v, found


def test_the_beginning_and_the_end_are_exact_and_the_rest_nearly() -> None:
    layer, k, v, _ = filled(CompressionPolicy(method="int8", threshold_step=50, keep_recent=0, keep_first=1), 400)
    assert layer.get_seq_length() == 400
    assert layer.encoded_tokens == 256  # blocks 1 to 4; 80 tokens follow the last of them
    assert layer.tail_tokens == 80
    for found, true in zip(layer.whole(), (k, v), strict=True):
        assert torch.equal(found[:, :, :64], true[:, :, :64])
        assert torch.equal(found[:, :, 320:], true[:, :, 320:])
        off = (found[:, :, 64:320] - true[:, :, 64:320]).abs().max()
        assert 0 < off < 0.05
    assert layer.bytes_held < 0.6 * (k.nbytes + v.nbytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_lossless_codec_gives_every_bit_back(dtype: torch.dtype) -> None:
    layer, k, v, _ = filled(CompressionPolicy(method="bf16x", threshold_step=0, keep_recent=0), 300, 2, dtype)
    assert layer.encoded_tokens == 192
    assert torch.equal(layer.whole()[0], k)
    assert torch.equal(layer.whole()[1], v)


def test_what_a_step_returns_is_what_it_encodes_afterwards() -> None:
    """A prompt is read exactly: its blocks are encoded when its last token has been attended to."""
    policy = CompressionPolicy(method="rot4", threshold_step=0, keep_recent=0, keep_first=0)
    k, v = torch.randn(1, 2, 200, 64), torch.randn(1, 2, 200, 64)
    layer = TieredCacheLayer(policy)
    assert torch.equal(layer.update(k, v)[0], k)
    assert layer.encoded_tokens == 192
    assert not torch.equal(layer.whole()[0], k)


def test_not_a_number_stays_what_it_is() -> None:
    policy = CompressionPolicy(method="int8", threshold_step=0, keep_recent=0, keep_first=0)
    k = torch.randn(1, 2, 128, 64)
    k[0, 0, 5, 5] = torch.nan
    layer = TieredCacheLayer(policy)
    layer.update(k, k)
    assert torch.equal(layer.whole()[0][:, :, :64], k[:, :, :64]) is False  # NaN equals nothing
    torch.testing.assert_close(layer.whole()[0][:, :, :64], k[:, :, :64], rtol=0, atol=0, equal_nan=True)


def test_it_can_be_cropped_inside_the_exact_tail() -> None:
    """And goes on from there as if the tokens had never come; beyond the tail it refuses, and nothing has changed."""
    policy = CompressionPolicy(method="int8", threshold_step=50, keep_recent=0)
    layer, _, _, _ = filled(policy, 400)
    other, k, v, _ = filled(policy, 400)
    assert layer.is_croppable
    layer.crop(-30)
    assert (layer.get_seq_length(), layer.encoded_tokens) == (370, 256)
    layer.update(k[:, :, 370:], v[:, :, 370:])
    assert torch.equal(layer.whole()[0].clone(), other.whole()[0])
    with pytest.raises(ValueError, match="tail"):
        layer.crop(-81)
    if LENGTH_CROPS:
        layer.crop(390)
        assert layer.get_seq_length() == 390
        layer.crop(500)
        assert layer.get_seq_length() == 390
    else:
        with pytest.raises(ValueError, match="negative"):
            layer.crop(390)
    layer.crop(0)
    layer.reset()
    assert (layer.get_seq_length(), layer.encoded_tokens) == (0, 0)


def test_rows_are_chosen_and_repeated_whole() -> None:
    layer, k, _, _ = filled(CompressionPolicy(method="bf16x", threshold_step=0, keep_recent=0), 200, rows=3)
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.whole()[0], k.repeat_interleave(2, 0))
    layer.reorder_cache(torch.tensor([4, 0]))
    assert torch.equal(layer.whole()[0], k[[2, 0]])
    layer.batch_select_indices(torch.tensor([False, True]))
    assert torch.equal(layer.whole()[0], k[[0]])


def test_other_levels_policies_leave_it_alone() -> None:
    layer, k, v, _ = filled(CompressionPolicy(method="int8", threshold_step=0, tiers=("disk",)), 300)
    assert layer.encoded_tokens == 0
    assert layer.bytes_held == k.nbytes + v.nbytes
    for method in ("pca", "low_rank"):
        with pytest.raises(ConfigError, match="all layers"):
            TieredCacheLayer(CompressionPolicy(method=method))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_takes_it_as_a_cache(attention: str) -> None:
    """Lossless: the output of a plain cache, with fewer bytes held."""
    model = tiny_llama(attn_implementation=attention, head_dim=32).to(torch.bfloat16)
    plain = DynamicCache(config=model.config)
    cache = TieredCache(2, CompressionPolicy(method="bf16x", threshold_step=50))
    name = cache_argument(model)
    expected = model.generate(input_ids=prompt(300), **{name: plain}, **GREEDY)
    assert model.generate(input_ids=prompt(300), **{name: cache}, **GREEDY).tolist() == expected.tolist()
    assert cache.get_seq_length() == 339
    assert cache.bytes_held < sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)


def test_the_adapter_compresses_for_a_call_that_asks(attach: Attach) -> None:
    """A lossy live cache is never stored; a lossless one is, and what it stored is exact."""
    model = tiny_llama(head_dim=32)
    plain = model.generate(input_ids=prompt(300), **GREEDY)
    adapter = attach(model)
    made = adapter.generate(compress=CompressionPolicy(), input_ids=prompt(300), **GREEDY)
    assert made.report["encoded_tokens"] >= 64
    assert made.report["true_tokens"] == 339
    assert made.report["ratio"] > 1.5
    assert adapter.status()["saved_blocks"] == 0
    exact = adapter.generate(compress=CompressionPolicy(method="bf16x"), input_ids=prompt(300), **GREEDY)
    assert exact.output.tolist() == plain.tolist()
    assert adapter.status()["saved_blocks"] == 21
    assert model.generate(input_ids=prompt(300), **GREEDY).tolist() == plain.tolist()
    beams = adapter.generate(compress=CompressionPolicy(method="bf16x"), input_ids=prompt(300), num_beams=2, **GREEDY)
    detached = adapter
    detached.detach()
    assert beams.output.tolist() == model.generate(input_ids=prompt(300), num_beams=2, **GREEDY).tolist()
    assert adapter.status()["last_error"] == ""


def test_a_policy_that_cannot_be_is_refused_before_anything_runs(attach: Attach) -> None:
    adapter = attach(tiny_llama())
    with pytest.raises(ConfigError, match="all layers"):
        adapter.generate(compress=CompressionPolicy(method="pca"), input_ids=prompt(40))
    with pytest.raises(ConfigError, match="give a CompressionPolicy"):
        adapter.generate(compress="int8", input_ids=prompt(40))  # type: ignore[arg-type]
