"""Whose KV it is: weights by content, adapters by content, and changes after attach."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BLOCK, prompt, tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvcache_factory.block import identity
from kvcache_factory.integration.transformers import TransformersCacheAdapter, weights

Attach = Callable[..., TransformersCacheAdapter]


class Lora(nn.Module):
    """A linear layer with a low-rank adapter, in the shape that PEFT gives it."""

    def __init__(self, base_layer: nn.Linear, seed: int, name: str = "default") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({name: nn.Linear(base_layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({name: nn.Linear(4, base_layer.out_features, bias=False)})
        self.scaling = {name: 2.0}
        self.active_adapters = [name]
        self.disable_adapters = False
        self.merged = False
        with torch.no_grad():
            for part in (self.lora_A[name], self.lora_B[name]):
                part.weight.copy_(torch.randn(part.weight.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        if not (self.disable_adapters or self.merged):
            for name in self.active_adapters:
                out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out

    def merge(self) -> None:
        """As PEFT does: through ``.data``, which leaves the version of the weight alone."""
        for name in self.active_adapters:
            self.base_layer.weight.data += self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]
        self.merged = True


def with_lora(seed: int = 5, name: str = "default") -> tuple[LlamaForCausalLM, Lora]:
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    attention.v_proj = Lora(attention.v_proj, seed, name)
    return model, attention.v_proj


@pytest.fixture
def saved(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def fingerprint_of(model: Any) -> str:
    return weights.fingerprint(model)


def test_a_live_model_and_its_directory_have_one_fingerprint(model: LlamaForCausalLM, saved: Path) -> None:
    """Two programs, one that made the model and one that read its files, share KV."""
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert fingerprint_of(model) == fingerprint_of(loaded) == identity.fingerprint_directory(saved)


def test_a_model_from_a_directory_is_named_by_its_files(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are hashed once and remembered, so attaching a large model again costs a sample."""
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    monkeypatch.setattr(weights, "weights_fingerprint", lambda tensors: pytest.fail("the live weights were hashed"))
    assert fingerprint_of(loaded) == identity.fingerprint_directory(saved)


@pytest.mark.parametrize("where", ["norm", "matrix", "head"])
def test_a_model_that_left_its_directory_is_named_by_its_weights(saved: Path, where: str) -> None:
    """Weights changed after loading: the sample disagrees, and the files are no witness."""
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    part = {"norm": loaded.model.norm, "matrix": loaded.model.layers[1].mlp.up_proj, "head": loaded.lm_head}[where]
    part.weight.data.mul_(1.5)
    assert fingerprint_of(loaded) != identity.fingerprint_directory(saved)


def test_a_configuration_overridden_at_load_is_seen(saved: Path) -> None:
    """Another rotation under the same files makes other KV."""
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, rms_norm_eps=0.1)
    assert fingerprint_of(loaded) != identity.fingerprint_directory(saved)


def test_a_damaged_directory_does_not_matter(saved: Path, model: LlamaForCausalLM) -> None:
    """Files that cannot be understood are no witness; the live weights still are."""
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    (saved / "model.safetensors").unlink()  # the model still maps the old file
    (saved / "model.safetensors").write_bytes(b"not a model")
    assert fingerprint_of(loaded) == fingerprint_of(model)


def test_weights_kept_in_another_dtype_make_another_identity(saved: Path, attach: Attach) -> None:
    """The same files loaded as bf16 make other KV."""
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    half = attach(loaded)
    assert half.space.identity.kv_dtype == "bfloat16"


def test_tied_weights_count_once(tmp_path: Path) -> None:
    """A head that is the embedding is not in the file, and the directory is a witness all the same."""
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert fingerprint_of(loaded) == identity.fingerprint_directory(tmp_path) == fingerprint_of(model)


def test_names_keep_apart_and_bring_together(attach: Attach) -> None:
    """Namespace and salt keep equal models apart; a model_id vouches for different ones."""
    digests = set()
    for options in ({}, {"namespace": "other"}, {"salt": "tenant"}):
        adapter = attach(tiny_llama(), **options)
        digests.add(adapter.space.identity.digest)
    assert len(digests) == 3
    ours, theirs = (attach(tiny_llama(seed), model_id="mine/model-1") for seed in (0, 1))
    assert ours.space.identity == theirs.space.identity


def test_two_models_share_a_manager_and_nothing_else(attach: Attach) -> None:
    """Equal tokens, other weights: no hit."""
    one, other = tiny_llama(0), tiny_llama(1)
    attach(one)
    adapter = attach(other)
    one.generate(prompt(64), max_new_tokens=2)
    other.generate(prompt(64), max_new_tokens=2)
    assert adapter.status()["hits"] == 0


def change_in_place(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(0.1)


def change_data(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data += 0.1


def load_state(model: LlamaForCausalLM) -> None:
    model.load_state_dict(tiny_llama(3).state_dict())


def step(model: LlamaForCausalLM) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=prompt(8), labels=prompt(8)).loss.backward()
    optimiser.step()


def swap_module(model: LlamaForCausalLM) -> None:
    model.model.layers[1].mlp = tiny_llama(4).model.layers[1].mlp


def insert_lora(model: LlamaForCausalLM) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj = Lora(attention.v_proj, 5)


@pytest.mark.parametrize("change", [change_in_place, change_data, load_state, step, swap_module, insert_lora])
def test_weights_changed_after_attach_are_noticed(
    change: Callable[[LlamaForCausalLM], None], model: LlamaForCausalLM, attach: Attach
) -> None:
    """The next request is looked up under the new weights, and its output is theirs."""
    adapter = attach(model)
    before = adapter.space.identity
    model.generate(prompt(64), max_new_tokens=8, do_sample=False)
    change(model)
    changed = model.generate(prompt(64), max_new_tokens=8, do_sample=False)
    status = adapter.status()
    assert (status["hits"], status["refreshes"]) == (0, 1)
    assert adapter.space.identity != before
    adapter.detach()
    assert torch.equal(model.generate(prompt(64), max_new_tokens=8, do_sample=False), changed)


def test_unchanged_weights_are_read_once(model: LlamaForCausalLM, attach: Attach) -> None:
    """Requests do not make the adapter read the weights again."""
    adapter = attach(model)
    for _ in range(3):
        model.generate(prompt(40), max_new_tokens=3)
    assert adapter.status()["refreshes"] == 0


def test_refresh_reads_the_weights_again(model: LlamaForCausalLM, attach: Attach) -> None:
    """For a change by hand, and harmless without one."""
    adapter = attach(model)
    before = adapter.space.identity
    adapter.refresh()
    assert adapter.space.identity == before
    change_data(model)
    adapter.refresh()
    assert adapter.space.identity != before


def test_an_active_adapter_has_its_own_keys(attach: Attach) -> None:
    """Base, one adapter, and another one: three identities over one set of base weights."""
    adapters = [attach(model) for model in (tiny_llama(), with_lora(5)[0], with_lora(6)[0])]
    identities = [adapter.space.identity for adapter in adapters]
    assert len({i.digest for i in identities}) == 3
    assert len({i.model for i in identities}) == 1
    assert [bool(i.lora) for i in identities] == [False, True, True]


def test_an_adapter_is_known_by_content_not_by_name(attach: Attach) -> None:
    """Two processes may load one adapter under two names."""
    one, other = (attach(with_lora(5, name)[0]) for name in ("default", "customer_17"))
    assert one.space.identity == other.space.identity


def test_switching_an_adapter_off_is_noticed(attach: Attach) -> None:
    """Switched off, the model is its base and shares the base's KV; switched on, it is not."""
    base = tiny_llama()
    attach(base)
    base.generate(prompt(64), max_new_tokens=2)
    model, lora = with_lora()
    adapter = attach(model)
    model.generate(prompt(64), max_new_tokens=2)
    assert adapter.status()["hits"] == 0
    lora.disable_adapters = True
    model.generate(prompt(64), max_new_tokens=2)
    assert adapter.status()["hits"] == 1
    lora.scaling["default"], lora.disable_adapters = 1.0, False
    model.generate(prompt(64), max_new_tokens=2)
    assert adapter.status()["hits"] == 1


def test_a_merged_adapter_never_shares_with_the_base(attach: Attach) -> None:
    """Merging writes into the base weights behind the back of their version; the switch and the sample both tell."""
    base = tiny_llama()
    attach(base)
    base.generate(prompt(64), max_new_tokens=2)
    model, lora = with_lora()
    adapter = attach(model)
    lora.merge()
    plain = LlamaForCausalLM.generate(model, prompt(64), max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(prompt(64), max_new_tokens=8, do_sample=False), plain)
    assert adapter.status()["hits"] == 0
    assert adapter.space.identity.model != weights.fingerprint(base)
    assert adapter.space.identity.lora == ""


def test_the_fingerprint_is_asked_for_by_other_programs(model: LlamaForCausalLM, attach: Attach, saved: Path) -> None:
    """What status shows is what ``doctor`` shows for the directory."""
    status = attach(model).status()
    assert status["fingerprint"] == identity.fingerprint_directory(saved)
    assert json.loads((saved / "config.json").read_text())["num_hidden_layers"] == 2
    assert status["block_tokens"] == BLOCK


def test_weights_that_change_during_a_request_are_not_saved(model: LlamaForCausalLM, attach: Attach) -> None:
    """A training step in the middle of an answer: its KV belongs to neither of the two models."""
    adapter = attach(model)

    class Trainer:
        def put(self, value: torch.Tensor) -> None:
            change_in_place(model)

        def end(self) -> None:
            """Nothing to do."""

    model.generate(prompt(64), max_new_tokens=4, streamer=Trainer())
    assert adapter.status()["saved_blocks"] == 0


class PeftLike(nn.Module):
    """The outer shell that PEFT puts around a model: it hands everything on."""

    def __init__(self, inner: LlamaForCausalLM) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = inner
        self.config = inner.config

    def get_base_model(self) -> LlamaForCausalLM:
        return self.base_model.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model.generate(*args, **kwargs)


def test_a_wrapper_around_the_model_is_attached_like_the_model(attach: Attach) -> None:
    """The wrapper's generate is hooked; base and adapter are named as without the wrapper."""
    wrapped = PeftLike(with_lora()[0])
    plain = wrapped.generate(input_ids=prompt(64), max_new_tokens=8, do_sample=False)
    adapter = attach(wrapped)
    for _ in range(2):
        assert torch.equal(wrapped.generate(input_ids=prompt(64), max_new_tokens=8, do_sample=False), plain)
    assert adapter.status()["reused_tokens"] == 48
    assert adapter.space.identity == attach(with_lora()[0]).space.identity
