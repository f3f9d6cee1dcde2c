"""Pruning: what each method keeps, what the live cache says of itself, and that nobody else ever gets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import BLOCK, left_padded, prompt, tiny_llama
from transformers import DynamicCache, LlamaForCausalLM

from kvcache_factory import CacheManager, CPUBackend, DiskBackend, HeuristicEvictionPolicy, HierarchicalBackend
from kvcache_factory.errors import ConfigError, UnsupportedGenerationError
from kvcache_factory.integration.transformers import (
    H2O,
    KeyDiff,
    L2Norm,
    PruningMethod,
    PyramidKV,
    Seen,
    SnapKV,
    StreamingLLM,
    TransformersCacheAdapter,
    parse_pruning,
    register_pruning,
)
from kvcache_factory.integration.transformers.layout import cache_argument
from kvcache_factory.integration.transformers.observing import Observer, attention_modules, queries_of, received
from kvcache_factory.integration.transformers.pruned import MaskCut, PrunedCache, Pruner
from kvcache_factory.integration.transformers.pruning import pruning_names

Attach = Callable[..., TransformersCacheAdapter]
METHODS_ALONE = ["streaming", "h2o", "snapkv", "pyramidkv", "l2norm", "keydiff"]
METHODS = ["streaming", "h2o", "snapkv:window=8", "pyramidkv:window=8", "l2norm:recent=4", "keydiff:recent=4"]


def run(model: LlamaForCausalLM, method: PruningMethod, ids: torch.Tensor, *more: torch.Tensor) -> tuple[Any, Any]:
    """Read *ids*, prune, read *more* piece by piece; the cache and the logits of the last piece."""
    cache = PrunedCache(model.config.num_hidden_layers)
    with Pruner(model, cache, method, ids.shape[1]), torch.no_grad():
        for part in (ids, *more):
            logits = model(input_ids=part, **{cache_argument(model): cache}).logits
    return cache, logits


# -- methods ----------------------------------------------------------------------------------------------------------


def seen(tokens: int = 40, mass: torch.Tensor | None = None) -> Seen:
    torch.manual_seed(0)
    return Seen(torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8), mass)


def test_streaming_keeps_first_and_last() -> None:
    assert StreamingLLM(keep=0.25).kept(seen(), 10).tolist()[0][0] == [0, 1, 2, 3, 34, 35, 36, 37, 38, 39]


def test_l2norm_keeps_small_keys() -> None:
    looked = seen()
    looked.keys[:, :, 17] *= 1e-3
    looked.keys[:, :, 18] *= 1e3
    kept = L2Norm(sinks=0, recent=0).kept(looked, 20)
    assert (kept == 17).any(-1).all()
    assert not (kept == 18).any()


def test_keydiff_keeps_what_is_unlike_the_rest() -> None:
    looked = seen()
    looked.keys[:] = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]) + 0.01 * looked.keys
    looked.keys[:, :, 21] *= -1
    assert KeyDiff(sinks=0, recent=0).kept(looked, 1).flatten().tolist() == [21, 21]


def test_snapkv_keeps_what_its_window_looks_at_and_its_neighbours() -> None:
    mass = torch.zeros(1, 2, 40)
    mass[:, :, 20] = 1.0
    kept = SnapKV(sinks=0, window=8, kernel=3).kept(seen(mass=mass), 11)[0, 0].tolist()
    assert kept == [19, 20, 21, *range(32, 40)]


def test_h2o_keeps_heavy_hitters_and_half_recent() -> None:
    mass = torch.zeros(1, 2, 40)
    mass[:, :, [5, 9, 14, 20, 25]] = 1.0
    assert H2O(sinks=0, recent=0).kept(seen(mass=mass), 10)[0, 0].tolist() == [5, 9, 14, 20, 25, *range(35, 40)]


@given(st.floats(0.01, 1), st.integers(1, 3000), st.integers(1, 40), st.integers(1, 40))
def test_pyramid_budgets_fall_and_keep_their_sum(keep: float, tokens: int, layers: int, window: int) -> None:
    method = PyramidKV(keep=keep, sinks=0, window=window)
    budgets = [method.budget(tokens, layer, layers) for layer in range(layers)]
    assert budgets == sorted(budgets, reverse=True)
    assert all(min(tokens, window) <= budget <= tokens for budget in budgets)
    if budgets[-1] > window:  # no floor was touched
        assert abs(sum(budgets) - keep * tokens * layers) <= layers / 2 + 1


@given(st.sampled_from(METHODS_ALONE), st.floats(0.05, 1), st.integers(1, 90))
def test_every_method_keeps_exactly_its_budget(name: str, keep: float, tokens: int) -> None:
    """Distinct tokens, in order, for every head, whatever the length."""
    method = parse_pruning(f"{name}:keep={keep}")
    looked = Seen(torch.randn(2, 3, tokens, 8), torch.randn(2, 3, tokens, 8), torch.rand(2, 3, tokens))
    budget = method.budget(tokens, 0, 4)
    kept = method.kept(looked, budget)
    assert kept.shape == (2, 3, budget)
    assert (kept.diff(dim=-1) > 0).all()
    assert bool((kept >= 0).all())
    assert bool((kept < tokens).all())


def test_names_and_parameters() -> None:
    method = parse_pruning("snapkv:keep=0.25, window=16")
    assert method == SnapKV(keep=0.25, window=16)
    assert parse_pruning(str(method)) == method
    assert set(METHODS_ALONE) <= set(pruning_names())
    assert all(parse_pruning(name).source.startswith("arXiv") for name in METHODS_ALONE)
    for wrong in ("snap", "snapkv:keep=0", "snapkv:keep=x", "snapkv:depth=3", "snapkv:window", "snapkv:window=0"):
        with pytest.raises(ConfigError):
            parse_pruning(wrong)
    with pytest.raises(ConfigError):
        register_pruning(type("Other", (SnapKV,), {}))


# -- the attention that is observed -----------------------------------------------------------------------------------


def test_observed_attention_is_that_of_the_model() -> None:
    """Queries made again from outside give the weights that eager attention returns."""
    model = tiny_llama(attn_implementation="eager")
    ids = prompt(30)

    class Look(Observer):
        def after(self, layer: int, mass: torch.Tensor | None) -> None:
            found[layer] = mass

    found: dict[int, Any] = {}
    cache = DynamicCache(config=model.config)
    with Look(model, cache, 7), torch.no_grad():
        output = model(input_ids=ids, output_attentions=True, **{cache_argument(model): cache})
    for layer, weights in enumerate(output.attentions):
        expected = weights[:, :, -7:].reshape(1, 2, 2, 7, 30).mean(2).sum(2)
        torch.testing.assert_close(found[layer], expected, rtol=1e-4, atol=1e-5)


def test_chunks_of_queries_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 20, 8)
    whole = received(queries, keys, 0.3)
    monkeypatch.setattr("kvcache_factory.integration.transformers.observing._CHUNK_BYTES", 1)
    torch.testing.assert_close(received(queries, keys, 0.3), whole)
    torch.testing.assert_close(whole.sum(-1), torch.full((1, 2), 9.0))


def test_other_caches_are_not_touched() -> None:
    """A request of another thread runs through the same modules with a cache of its own."""
    model = tiny_llama()
    ids = prompt(40)
    own, other = PrunedCache(2), DynamicCache(config=model.config)
    with Pruner(model, own, StreamingLLM(keep=0.5), 40), torch.no_grad():
        model(input_ids=ids, **{cache_argument(model): other})
    assert other.get_seq_length() == other.layers[0].keys.shape[2] == 40
    assert own.get_seq_length() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in attention_modules(model, 2))


def test_queries_of_models_that_normalise_them() -> None:
    """Qwen 3 normalises each head's queries before it rotates them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 384}
    config = Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    model = Qwen3ForCausalLM(config).eval()
    module = attention_modules(model, 1)[0]
    hidden = torch.randn(1, 6, 32)
    positions = model.model.rotary_emb(hidden, position_ids=torch.arange(6)[None])
    with torch.no_grad():
        queries = queries_of(module, hidden, positions)
        norms = module.q_norm(module.q_proj(hidden).view(1, 6, 4, 8)).transpose(1, 2).norm(dim=-1)
    torch.testing.assert_close(queries.norm(dim=-1), norms)  # a rotation keeps lengths


# -- the live cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("text", METHODS)
def test_a_pruned_cache_is_the_masked_full_cache(text: str, attention: str) -> None:
    """Reading on gives what the full cache gives when attention to the tokens that left is masked, layer by layer."""
    model = tiny_llama(attn_implementation=attention)
    method = parse_pruning(text + ",keep=0.5" if ":" in text else text + ":keep=0.5")
    ids, more = prompt(60), prompt(5, seed=1)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, **{cache_argument(model): full})
    cache, _ = run(model, method, ids)
    assert cache.get_seq_length() == 60
    assert cache.is_pruned
    assert max(cache.stored_tokens) < 60
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        # Each kept key is one of the full cache's at its place: found by equality, head by head.
        same = (layer.keys.unsqueeze(3) == whole.keys.unsqueeze(2)).all(-1)
        assert same.any(-1).all()
        torch.testing.assert_close(same.float() @ whole.values, layer.values)
    before = list(cache.stored_tokens)
    expected = _masked(model, cache, full, more)
    with MaskCut(model, cache), torch.no_grad():
        found = model(input_ids=more, **{cache_argument(model): cache}).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert cache.get_seq_length() == 65
    assert cache.stored_tokens == [n + 5 for n in before]


def _masked(model: LlamaForCausalLM, pruned: PrunedCache, full: Any, more: torch.Tensor) -> torch.Tensor:
    """Logits behind *full* where keys that *pruned* lacks are moved out of reach: their values count for nothing."""
    from kvcache_factory.integration.transformers.pruned import PrunedLayer

    class Masked(PrunedLayer):  # type: ignore[misc]
        def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return torch.cat((self.keys, k), 2), torch.cat((self.values, v), 2)

    cache = PrunedCache(len(pruned.layers))
    cache.layers = [Masked() for _ in pruned.layers]
    for own, layer in zip(cache.layers, pruned.layers, strict=True):
        own.keys, own.values, own.is_initialized, own.true_length = layer.keys, layer.values, True, 60
    q = more.shape[1]
    masks = {}
    for number, layer in enumerate(pruned.layers):
        width = layer.stored + q
        allowed = torch.arange(width) <= (torch.arange(q) + layer.stored)[:, None]
        masks[number] = torch.zeros(q, width).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]
    handles = [
        module.register_forward_pre_hook(
            lambda m, a, k: (a, {**k, "attention_mask": masks[m.layer_idx]}), with_kwargs=True
        )
        for module in attention_modules(model, len(pruned.layers))
    ]
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(
                input_ids=more, position_ids=torch.arange(60, 60 + q)[None], **{cache_argument(model): cache}
            ).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("text", METHODS)
def test_nothing_changes_where_everything_is_kept(attach: Attach, text: str, attention: str) -> None:
    """With a budget of all tokens and a method that prunes once, pruned generation is plain generation."""
    model = tiny_llama(attn_implementation=attention)
    plain = model.generate(input_ids=prompt(50), max_new_tokens=6, do_sample=False)
    made = attach(model).generate(prune=_all(text), input_ids=prompt(50), max_new_tokens=6, do_sample=False)
    if not parse_pruning(text).ongoing:
        assert made.output.tolist() == plain.tolist()
        assert set(made.report["stored_tokens"]) == {55}
    assert made.report["true_tokens"] == 55


def _all(text: str) -> str:
    return text + ("," if ":" in text else ":") + "keep=1.0"


@pytest.mark.parametrize("text", ["streaming", "h2o"])
def test_ongoing_methods_keep_their_size(attach: Attach, text: str) -> None:
    made = attach(tiny_llama()).generate(
        prune=f"{text}:keep=0.5,recent=4", input_ids=prompt(60), max_new_tokens=20, min_new_tokens=20
    )
    assert made.report["stored_tokens"] == [30, 30]
    assert made.report["true_tokens"] == 79
    assert made.report["ratio"] == pytest.approx(79 / 30)


# -- the shared cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", METHODS)
def test_a_pruned_sequence_is_never_stored_and_never_matched(attach: Attach, manager: CacheManager, text: str) -> None:
    """Neither from an empty cache nor behind a loaded prefix; and a later request gets the exact answer."""
    model = tiny_llama()
    plain = model.generate(input_ids=prompt(80), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    adapter = attach(model)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    cold = adapter.generate(prune=text, input_ids=prompt(80), **options)
    assert adapter.status()["saved_blocks"] == 0
    chain = adapter.space.chain(cold.output[0])
    assert adapter.space.peek(chain) == 0
    assert model.generate(input_ids=prompt(80), **options).tolist() == plain.tolist()
    stored = adapter.status()["saved_blocks"]
    warm = adapter.generate(prune=text, input_ids=prompt(80), **options)
    assert adapter.status()["saved_blocks"] == stored
    assert warm.output.tolist() == cold.output.tolist()
    assert warm.report["reused_tokens"] == (0 if text == "h2o" else 64)
    assert model.generate(input_ids=prompt(80), **options).tolist() == plain.tolist()
    assert adapter.status()["last_error"] == ""


def test_its_identity_is_its_own(attach: Attach) -> None:
    adapter = attach(tiny_llama())

    def identity(text: str, seed: int) -> str:
        made = adapter.generate(prune=text, input_ids=prompt(80, seed=seed), max_new_tokens=2)
        return str(made.report["identity"])

    found = [identity("l2norm", 0), identity("l2norm", 1), identity("keydiff", 0), identity("l2norm:keep=0.6", 0)]
    keys = {key.tobytes().hex() for key in adapter.space.chain(prompt(80)[0]).keys}
    assert len({*found, *keys, adapter.space.identity.digest.hex()}) == 4 + len(keys) + 1
    assert identity("l2norm", 0) == found[0]


def test_a_returned_cache_is_refused_by_the_adapter(attach: Attach) -> None:
    """Whoever keeps the pruned cache and goes on with it is served by Transformers alone."""
    model = tiny_llama()
    adapter = attach(model)
    made = adapter.generate(prune="keydiff", input_ids=prompt(80), max_new_tokens=3, return_dict_in_generate=True)
    cache = getattr(made.output, cache_argument(model), None) or made.output.past_key_values
    assert not cache.shareable
    with pytest.raises(ValueError, match="cropped"):
        cache.layers[0].crop(-1)
    longer = torch.cat([made.output.sequences, prompt(2)], dim=1)
    model.generate(input_ids=longer, max_new_tokens=2, **{cache_argument(model): cache})
    assert adapter.status()["saved_blocks"] == 0
    assert adapter.status()["bypassed"] == {"a cache of the caller's own": 1}


def test_batches_chunks_and_beams(attach: Attach) -> None:
    model = tiny_llama()
    adapter = attach(model)
    together = adapter.generate(
        prune="snapkv:window=8", input_ids=prompt(70, rows=2), max_new_tokens=4, do_sample=False
    )
    for row in range(2):
        alone = adapter.generate(
            prune="snapkv:window=8", input_ids=prompt(70, rows=2)[row : row + 1], max_new_tokens=4, do_sample=False
        )
        assert alone.output[0].tolist() == together.output[row].tolist()
    beams = adapter.generate(prune="h2o:recent=4", input_ids=prompt(70), max_new_tokens=4, num_beams=3)
    assert beams.report["stored_tokens"] == [35, 35]


def test_what_cannot_be_pruned_is_refused(attach: Attach) -> None:
    adapter = attach(tiny_llama())
    with pytest.raises(UnsupportedGenerationError, match="padding"):
        adapter.generate(prune="l2norm", max_new_tokens=2, **left_padded(30, 40))
    with pytest.raises(UnsupportedGenerationError, match="use_cache"):
        adapter.generate(prune="l2norm", input_ids=prompt(40), use_cache=False, max_new_tokens=2)
    with pytest.raises(ConfigError, match="one of"):
        adapter.generate(prune="l2norm", rank_blocks=True, input_ids=prompt(40))
    with pytest.raises(ConfigError, match="no pruning method"):
        adapter.generate(prune="best", input_ids=prompt(40))
    assert adapter.generate(input_ids=prompt(40), max_new_tokens=2).report["reused_tokens"] == 0
    adapter.detach()
    with pytest.raises(ConfigError, match="detached"):
        adapter.generate(prune="l2norm", input_ids=prompt(40))


# -- demotion instead -------------------------------------------------------------------------------------------------


def test_ranked_blocks_stay_exact_and_say_what_was_looked_at(attach: Attach) -> None:
    """Importance has one number a block, and comes from any attention implementation."""
    model = tiny_llama()
    plain = model.generate(input_ids=prompt(6 * BLOCK), max_new_tokens=4, do_sample=False)
    adapter = attach(model)
    made = adapter.generate(rank_blocks=True, input_ids=prompt(6 * BLOCK), max_new_tokens=4, do_sample=False)
    assert made.output.tolist() == plain.tolist()
    assert adapter.status()["saved_blocks"] == 6
    (ranks,) = made.report["importance"]
    assert len(ranks) == 6
    assert max(ranks) == 1.0
    assert min(ranks) < 1.0
    again = adapter.generate(rank_blocks=True, input_ids=prompt(6 * BLOCK), max_new_tokens=4, do_sample=False)
    assert again.report["reused_tokens"] == 2 * BLOCK  # the last 64 queries are computed to be seen


def test_what_was_looked_at_least_is_demoted_first_and_not_lost(tmp_path: Path) -> None:
    """Memory lets the least looked-at ends of chains go, however recent, and the disk has them still."""
    disk = DiskBackend(path=tmp_path, size_gb=0.01, segment_mb=1)
    backend = HierarchicalBackend([CPUBackend(size_gb=0.001), disk])
    with CacheManager(backend=backend, eviction_policy=HeuristicEvictionPolicy()) as manager:
        adapter = TransformersCacheAdapter.attach(tiny_llama(), manager, block_tokens=BLOCK)
        left = []
        for seed in range(3):
            ids = prompt(5 * BLOCK, seed=seed)
            made = adapter.generate(rank_blocks=True, input_ids=ids, max_new_tokens=1)
            left.append((adapter.space.chain(ids[0]), made.report["importance"][0]))
        assert manager.wait()
        assert manager.evict(6) == 6
        for _ in range(6):  # the end of a chain leaves before what it was built on
            min((ranks for _, ranks in left if ranks), key=lambda ranks: ranks[-1]).pop()
        assert [adapter.space.held_in_memory(chain) for chain, _ in left] == [len(ranks) for _, ranks in left]
        assert [adapter.space.peek(chain) for chain, _ in left] == [5, 5, 5]
        adapter.detach()
