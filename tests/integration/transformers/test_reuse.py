"""Reuse beyond the exact prefix: by tokens, at other positions, with what that costs measured, and never stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import BLOCK, left_padded, prompt, tiny_llama
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from kvcache_factory import CacheManager
from kvcache_factory.errors import ConfigError, UnsupportedGenerationError
from kvcache_factory.integration.transformers import Reuse, TransformersCacheAdapter
from kvcache_factory.integration.transformers.calls import NotServed
from kvcache_factory.integration.transformers.layout import cache_argument
from kvcache_factory.integration.transformers.recompute import judge, recompute, relative_error
from kvcache_factory.integration.transformers.rotation import Rotation
from kvcache_factory.integration.transformers.runs import find_runs

Attach = Callable[..., TransformersCacheAdapter]
GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def kv_of(model: LlamaForCausalLM, ids: torch.Tensor, first: int = 0) -> list[Any]:
    """Layers of a cache that holds *ids*, the first of them at position *first*."""
    cache = DynamicCache(config=model.config)
    positions = torch.arange(first, first + ids.shape[1])[None]
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, **{cache_argument(model): cache})
    return list(cache.layers)


# -- rotation ---------------------------------------------------------------------------------------------------------

ROPES = {
    "default": {},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("by", [-40, 12, 1700])
def test_moved_keys_are_those_of_the_new_position(kind: str, by: int) -> None:
    """Exact in float32 up to rounding, in every layer, forwards and backwards, for scaled rotations too."""
    scaling = {"rope_scaling": {**ROPES[kind], "rope_theta": 10000.0}} if ROPES[kind] else {}
    model = tiny_llama(**scaling)
    ids = prompt(20)
    rotation = Rotation.of(model)
    for layer, there in zip(kv_of(model, ids, 50), kv_of(model, ids, 50 + by), strict=True):
        moved = rotation.move(layer.keys, torch.full((20,), by))
        torch.testing.assert_close(moved, there.keys, rtol=1e-3, atol=1e-3)
        if abs(by) > 1:
            assert not torch.allclose(layer.keys, there.keys, rtol=1e-2, atol=1e-2)


def test_pairs_of_neighbours_move_too() -> None:
    """GLM rotates neighbouring channels and only half of them: the model's own function knows."""
    from transformers import GlmConfig, GlmForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 384}
    config = GlmConfig(**shape, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    model = GlmForCausalLM(config).eval()
    rotation = Rotation(model)
    for layer, there in zip(kv_of(model, prompt(9)), kv_of(model, prompt(9), 33), strict=True):
        torch.testing.assert_close(rotation.move(layer.keys, torch.full((9,), 33)), there.keys, rtol=1e-3, atol=1e-3)


def test_learned_positions_are_refused() -> None:
    """GPT-2 adds positions to its inputs: nothing can be turned."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=384)).eval()
    with pytest.raises(NotServed):
        Rotation(model)


def test_a_rotation_that_is_not_one_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares with the model; a wrong function does not pass."""
    model = tiny_llama()
    right = model.model.rotary_emb.forward
    monkeypatch.setattr(model.model.rotary_emb, "forward", lambda x, position_ids: right(x, position_ids.clamp(0, 50)))
    with pytest.raises(NotServed):
        Rotation(model)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_runs_of_an_edit_and_of_a_new_order() -> None:
    a, b, c = (np.arange(40) + 100 * n for n in range(3))
    edited = find_runs([np.concatenate([a, b, c])], np.concatenate([a, [7, 8], b[5:], c]), 8)
    assert edited == [(0, 0, 0, 40, False), (0, 45, 42, 75, False)]
    shuffled = find_runs([a, b, c], np.concatenate([c, [1], a, b]), 8)
    assert shuffled == [(2, 0, 0, 40, False), (0, 0, 41, 40, False), (1, 0, 81, 40, False)]


tokens = st.lists(st.integers(0, 2), max_size=60).map(lambda ids: np.array(ids, np.int64))


@given(st.lists(tokens, max_size=3), tokens, st.integers(1, 6), st.integers(0, 10))
def test_runs_are_equal_tokens_in_order_and_apart(sources: list[Any], ids: Any, at_least: int, begin: int) -> None:
    end = begin
    for run in find_runs(sources, ids, at_least, begin):
        assert run.length >= at_least
        assert run.new >= end
        end = run.new + run.length
        there = sources[run.source][run.old : run.old + run.length]
        assert there.tolist() == ids[run.new : end].tolist()
    assert end <= max(len(ids), begin)


# -- computing some of the tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_computing_all_rows_is_computing_the_sequence(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several passes, into tensors of nonsense; and how far the nonsense was off is said."""
    monkeypatch.setattr("kvcache_factory.integration.transformers.recompute._ROWS", 13)
    model = tiny_llama(attn_implementation=attention)
    ids = prompt(40)
    whole = kv_of(model, ids)
    keys, values = ([torch.randn_like(getattr(x, name)) for x in whole] for name in ("keys", "values"))
    reused = torch.zeros(40, dtype=torch.bool)
    reused[5:9] = True
    before = [x[1][:, :, 5:9].clone() for x in (keys, values)]
    drift = recompute(model, ids[0], torch.arange(40), keys, values, reused)
    for found_k, found_v, layer in zip(keys, values, whole, strict=True):
        torch.testing.assert_close(found_k, layer.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found_v, layer.values, rtol=1e-3, atol=1e-3)
    assert drift.shape == (2, 4)
    torch.testing.assert_close(drift[1], off(before, [x[1][:, :, 5:9] for x in (keys, values)]))


def off(found: list[torch.Tensor], true: list[torch.Tensor]) -> torch.Tensor:
    """The mean of how far keys and values are off."""
    return (relative_error(found[0], true[0]) + relative_error(found[1], true[1])) / 2


def test_judging_makes_the_first_layers_right_and_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows that were not right are computed, in several passes; of the reused it says how far off they were."""
    monkeypatch.setattr("kvcache_factory.integration.transformers.recompute._ROWS", 11)
    model = tiny_llama(num_hidden_layers=4)
    whole = kv_of(model, prompt(30))
    keys, values = ([getattr(x, name).clone() for x in whole] for name in ("keys", "values"))
    reused = torch.zeros(30, dtype=torch.bool)
    reused[10:20] = True
    for tensor in (*keys[:2], *values[:2]):
        tensor[:, :, 10:] += torch.randn_like(tensor[:, :, 10:])
    before = [x[1][:, :, 10:20].clone() for x in (keys, values)]
    calls = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    error = judge(model, prompt(30)[0], torch.arange(10, 30), keys[:2], values[:2], reused)
    handle.remove()
    assert not calls
    for k, v, layer in zip(keys, values, whole, strict=True):
        torch.testing.assert_close(k, layer.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v, layer.values, rtol=1e-4, atol=1e-4)
    true = [x[:, :, 10:20] for x in (whole[1].keys, whole[1].values)]
    torch.testing.assert_close(error, off(before, true), rtol=1e-4, atol=1e-4)


# -- requests ---------------------------------------------------------------------------------------------------------


def edited(ids: torch.Tensor, at: int, count: int) -> torch.Tensor:
    return torch.cat([ids[:, :at], prompt(count, seed=9), ids[:, at:]], dim=1)


def test_without_asking_an_edit_costs_what_it_always_did(attach: Attach) -> None:
    """Off by default: everything behind the edit is computed."""
    model, ids = tiny_llama(), prompt(10 * BLOCK)
    adapter = attach(model)
    model.generate(input_ids=ids, **GREEDY)
    before = adapter.status()["reused_tokens"]
    model.generate(input_ids=edited(ids, 40, 3), **GREEDY)
    assert adapter.status()["reused_tokens"] - before == 2 * BLOCK


def test_an_edit_is_reused_behind_it(attach: Attach) -> None:
    """All but the edit, a margin and what no whole block held is reused; how far it drifts is measured."""
    model, ids = tiny_llama(), prompt(10 * BLOCK)
    adapter = attach(model)
    model.generate(input_ids=ids, **GREEDY)
    new = edited(ids, 40, 3)
    made = adapter.generate(reuse=Reuse.after_edit(ids[0].tolist(), margin=2, measure=True), input_ids=new, **GREEDY)
    report = made.report
    assert report["moved_by"] == [0, 3]
    # 40 tokens are exact (32 of them whole blocks), 3 new, 2 a margin; the last of 163 is the engine's.
    assert report["reused_beyond_prefix"] == 162 - 40 - 3 - 2
    assert report["recomputed_tokens"] == 3 + 2
    assert 0 < report["drift"] <= report["drift_max"]
    assert report["kl"] >= 0
    assert adapter.status()["last_error"] == ""


def test_everything_computed_again_is_exact(attach: Attach) -> None:
    """With a share of 1 nothing reused is left, and the output is that of plain generation."""
    model, ids = tiny_llama(num_hidden_layers=4), prompt(10 * BLOCK)
    new = edited(ids, 40, 3)
    plain = model.generate(input_ids=new, **GREEDY)
    adapter = attach(model)
    model.generate(input_ids=ids, **GREEDY)
    reuse = Reuse.after_edit(ids[0], recompute=1.0, measure=True)
    made = adapter.generate(reuse=reuse, input_ids=new, **GREEDY)
    assert made.output.tolist() == plain.tolist()
    assert made.report["kl"] == pytest.approx(0, abs=1e-5)
    assert made.report["reused_beyond_prefix"] == 0
    assert made.report["top1"]


def test_an_edit_that_is_only_cut_away_is_exact_where_it_must_be(attach: Attach) -> None:
    """A prompt that goes on from the exact prefix in mid-block takes the rest of the block as it is, undrifted."""
    model, ids = tiny_llama(), prompt(10 * BLOCK)
    new = torch.cat([ids[:, :70], prompt(5, seed=4)], dim=1)
    plain = model.generate(input_ids=new, **GREEDY)
    adapter = attach(model)
    model.generate(input_ids=ids, **GREEDY)
    made = adapter.generate(reuse=Reuse.after_edit(ids[0], measure=True), input_ids=new, **GREEDY)
    assert made.output.tolist() == plain.tolist()
    assert made.report["recomputed_tokens"] == 4
    assert made.report["reused_beyond_prefix"] == 0
    assert made.report["drift"] is None


def test_documents_in_another_order(attach: Attach) -> None:
    """Each was read alone behind the same first token; a share of what is reused is computed again, and helps."""
    model = tiny_llama(num_hidden_layers=4)
    first = torch.tensor([[1]])
    documents = [torch.cat([first, prompt(3 * BLOCK - 1, seed=n)], dim=1) for n in range(3)]
    adapter = attach(model)
    for document in documents:
        model.generate(input_ids=document, **GREEDY)
    new = torch.cat([first, *(documents[n][:, 1:] for n in (2, 0, 1)), prompt(6, seed=5)], dim=1)

    def served(share: float) -> dict[str, Any]:
        reuse = Reuse.of_documents(documents_of(documents), recompute=share, margin=1, measure=True)
        return adapter.generate(reuse=reuse, input_ids=new, **GREEDY).report

    none, some, most = served(0.0), served(0.15), served(1.0)
    assert none["moved_by"] == [47, 94]
    assert none["reused_beyond_prefix"] == 2 * 46
    assert some["reused_beyond_prefix"] == pytest.approx(2 * 46 * 0.85, abs=2)
    assert most["kl"] == pytest.approx(0, abs=1e-5)
    assert none["kl"] > most["kl"]
    assert adapter.status()["last_error"] == ""


def documents_of(documents: list[torch.Tensor]) -> list[list[int]]:
    return [document[0].tolist() for document in documents]


def test_what_was_reused_is_never_stored(attach: Attach, manager: CacheManager) -> None:
    """Neither the prompt's blocks nor those of the answer: a later exact request computes them."""
    model, ids = tiny_llama(), prompt(10 * BLOCK)
    new = edited(ids, 40, 3)
    plain = model.generate(input_ids=new, **GREEDY)
    adapter = attach(model)
    model.generate(input_ids=ids, **GREEDY)
    stored = adapter.status()["saved_blocks"]
    made = adapter.generate(reuse=Reuse.after_edit(ids[0]), input_ids=new, **GREEDY)
    assert adapter.status()["saved_blocks"] == stored
    assert adapter.space.peek(adapter.space.chain(made.output[0])) == 2  # the exact prefix, as before
    assert model.generate(input_ids=new, **GREEDY).tolist() == plain.tolist()
    assert model.generate(input_ids=new, **GREEDY).tolist() == plain.tolist()


def test_nothing_found_is_an_ordinary_request(attach: Attach) -> None:
    """Exact, and stored as such."""
    model, ids = tiny_llama(), prompt(5 * BLOCK)
    adapter = attach(model)
    made = adapter.generate(reuse=Reuse.after_edit(prompt(90, seed=3)[0]), input_ids=ids, **GREEDY)
    assert made.report == {"reused_tokens": 0, "reused_beyond_prefix": 0, "recomputed_tokens": 0}
    assert adapter.status()["saved_blocks"] == 5


def test_what_cannot_be_served_is_refused(attach: Attach) -> None:
    adapter = attach(tiny_llama())
    reuse = Reuse.after_edit([5] * 50)
    with pytest.raises(UnsupportedGenerationError, match="one"):
        adapter.generate(reuse=reuse, max_new_tokens=2, **left_padded(30, 40))
    with pytest.raises(UnsupportedGenerationError, match="full pass"):
        adapter.generate(reuse=reuse, input_ids=prompt(40), output_hidden_states=True, max_new_tokens=2)
    for wrong in (
        {"recompute": 2.0},
        {"recompute": "half"},
        {"recompute": float("nan")},
        {"margin": -1},
        {"at_least": 0},
    ):
        with pytest.raises(ConfigError):
            Reuse(sources=[], **wrong)
    with pytest.raises(ConfigError, match="give a Reuse"):
        adapter.generate(reuse=[1, 2], input_ids=prompt(40))  # type: ignore[arg-type]
