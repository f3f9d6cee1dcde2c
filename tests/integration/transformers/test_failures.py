"""Whatever fails on our side, generation goes on with the output it has without the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import BLOCK, prompt, tiny_llama
from transformers import LlamaForCausalLM

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.integration.base import RateLimitedLog
from kvcache_factory.integration.transformers import TransformersCacheAdapter
from kvcache_factory.keyspace import KeySpace

Attach = Callable[..., TransformersCacheAdapter]


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


@pytest.mark.parametrize("verb", ["chain", "match", "load", "save", "release"])
def test_a_verb_that_raises_is_a_miss(
    verb: str, model: LlamaForCausalLM, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager promises not to raise; the adapter does not rely on it."""
    plain = model.generate(prompt(64), max_new_tokens=8, do_sample=False)
    adapter = attach(model)
    model.generate(prompt(64), max_new_tokens=8, do_sample=False)
    with monkeypatch.context() as patch:
        patch.setattr(KeySpace, verb, broken)
        assert torch.equal(model.generate(prompt(64), max_new_tokens=8, do_sample=False), plain)
    status = adapter.status()
    assert status["errors"] >= 1
    assert "planted" in status["last_error"]
    adapter.manager.reset()
    for row in range(8):
        adapter.space.release(f"{adapter._prefix}-{row}-0")


def test_a_short_load_is_completed_by_computing(
    model: LlamaForCausalLM, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that ends early leaves garbage behind its last block, which must not be seen."""
    plain = model.generate(prompt(100), max_new_tokens=8, do_sample=False)
    adapter = attach(model)
    model.generate(prompt(100), max_new_tokens=8, do_sample=False)
    load = KeySpace.load

    def short(space: KeySpace, match: Any, region: Any, positions: Any) -> int:
        for pair in region._views:
            for view in pair:
                view.base if view._base is None else view._base.fill_(float("nan"))
        return load(space, match, region, positions[:2])

    monkeypatch.setattr(KeySpace, "load", short)
    assert torch.equal(model.generate(prompt(100), max_new_tokens=8, do_sample=False), plain)
    assert adapter.status()["reused_tokens"] == 2 * BLOCK


def test_a_load_that_gives_nothing(model: LlamaForCausalLM, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the request is a cold one."""
    plain = model.generate(prompt(64), max_new_tokens=8, do_sample=False)
    adapter = attach(model)
    model.generate(prompt(64), max_new_tokens=8, do_sample=False)
    monkeypatch.setattr(KeySpace, "load", lambda *args: 0)
    assert torch.equal(model.generate(prompt(64), max_new_tokens=8, do_sample=False), plain)
    assert adapter.status()["hits"] == 0


def test_a_closed_manager_serves_nothing(model: LlamaForCausalLM) -> None:
    """Generation outlives the manager."""
    plain = model.generate(prompt(64), max_new_tokens=8, do_sample=False)
    manager = CacheManager(backend=CPUBackend(size_gb=0.01))
    adapter = TransformersCacheAdapter.attach(model, manager, block_tokens=BLOCK)
    model.generate(prompt(64), max_new_tokens=8, do_sample=False)
    manager.close()
    assert torch.equal(model.generate(prompt(64), max_new_tokens=8, do_sample=False), plain)
    status = adapter.status()
    assert (status["hits"], status["bypassed"], status["errors"]) == (0, {"the manager is closed": 1}, 0)
    adapter.detach()


def test_a_model_moved_to_another_dtype_goes_on(model: LlamaForCausalLM, attach: Attach) -> None:
    """Its blocks no longer fit the manager's slots: requests do without the cache, and weights are not read again."""
    adapter = attach(model)
    model.generate(prompt(64), max_new_tokens=4, do_sample=False)
    model.to(torch.bfloat16)
    plain = LlamaForCausalLM.generate(model, prompt(64), max_new_tokens=4, do_sample=False)
    for _ in range(3):
        assert torch.equal(model.generate(prompt(64), max_new_tokens=4, do_sample=False), plain)
    assert adapter.status()["errors"] == 1
    assert adapter.status()["bypassed"] == {"a failure of the cache": 1, "the model can no longer be cached": 2}
    model.to(torch.float32)
    model.generate(prompt(64), max_new_tokens=4, do_sample=False)
    assert adapter.status()["lookups"] == 2


def test_a_cache_that_is_full_of_others(attach: Callable[..., Any]) -> None:
    """When nothing can be stored, nothing is reused and nothing is wrong."""
    model = tiny_llama()
    slot = 4096 + BLOCK * 2 * 2 * 2 * 8 * 4
    with CacheManager(backend=CPUBackend(size_gb=2 * slot / 2**30)) as small:
        adapter = TransformersCacheAdapter.attach(model, small, block_tokens=BLOCK)
        for seed in range(4):
            plain = LlamaForCausalLM.generate(model, prompt(100, seed), max_new_tokens=4, do_sample=False)
            assert torch.equal(model.generate(prompt(100, seed), max_new_tokens=4, do_sample=False), plain)
        assert adapter.status()["errors"] == 0
        adapter.detach()
        assert small.check() == []


def test_leases_are_given_back_when_generation_fails(
    model: LlamaForCausalLM, attach: Attach, manager: CacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error inside the model, or an interrupt, must not pin blocks."""
    attach(model)
    model.generate(prompt(64), max_new_tokens=2)
    monkeypatch.setattr(model, "prepare_inputs_for_generation", broken)
    with pytest.raises(RuntimeError, match="planted"):
        model.generate(prompt(64), max_new_tokens=2)
    assert manager.state()["leases"] == 0


def test_threads_share_one_adapter(model: LlamaForCausalLM, attach: Attach) -> None:
    """Requests of several threads at once each get their own output."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [torch.cat([prompt(48), prompt(10, seed)], dim=1) for seed in range(12)]
    plain = [model.generate(ids, max_new_tokens=6, do_sample=False) for ids in prompts]
    adapter = attach(model)
    with ThreadPoolExecutor(4) as pool:
        served = list(pool.map(lambda ids: model.generate(ids, max_new_tokens=6, do_sample=False), prompts))
    assert all(torch.equal(a, b) for a, b in zip(plain, served, strict=True))
    assert adapter.status()["errors"] == 0


def test_failures_are_logged_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    """One line a minute for each subject, and the next says how many were left out."""
    moments = iter(range(0, 70, 10))
    log = RateLimitedLog(60.0, clock=lambda: float(next(moments)))
    with caplog.at_level(logging.WARNING, "kvcache_factory"):
        for _ in range(7):
            log.warning("load", "it failed")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["it failed", "it failed (5 more like this were not logged)"]
