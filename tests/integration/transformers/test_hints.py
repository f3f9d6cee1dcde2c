"""What the adapter tells policies: whether a session returns, and which blocks were looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import BLOCK, prompt, tiny_llama
from transformers import PreTrainedTokenizerFast, StoppingCriteriaList

from kvcache_factory import CacheManager
from kvcache_factory.integration.transformers import TransformersCacheAdapter
from kvcache_factory.integration.transformers.attention import attention_mass

Attach = Callable[..., TransformersCacheAdapter]


@pytest.fixture
def heard(manager: CacheManager, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Hints of every request that reaches the policy of the first tier."""
    hints: list[Any] = []
    policy = manager._chain.tiers[0].policy
    listen = policy.on_request

    def on_request(now: float, rows: Any, hit_len: int, hint: Any) -> None:
        hints.append(hint)
        listen(now, rows, hit_len, hint)

    monkeypatch.setattr(policy, "on_request", on_request)
    return hints


def test_generate_says_what_its_session_says(attach: Attach, manager: CacheManager, heard: list[Any]) -> None:
    """``session.reuse_hint`` goes with every call inside."""
    model = tiny_llama()
    attach(model)
    manager.create_session("agent").reuse_hint = "tool_pending"
    with manager.use_session("agent"):
        model.generate(input_ids=prompt(50), max_new_tokens=3, do_sample=False)
    assert {hint.reuse for hint in heard} == {"tool_pending"}
    assert {hint.session for hint in heard} == {"agent"}


def test_a_session_may_be_destroyed_while_its_model_answers(attach: Attach, manager: CacheManager) -> None:
    """The answer is the one without a cache, and nothing of the request is stored; a new session begins anew."""
    model = tiny_llama()
    call = {"input_ids": prompt(3 * BLOCK), "max_new_tokens": BLOCK + 2, "do_sample": False}
    plain = model.generate(**call)
    adapter = attach(model)

    def end(ids: torch.Tensor, scores: object, **_: object) -> bool:
        if ids.shape[1] == 3 * BLOCK + 3:
            assert manager.destroy_session("s", purge=True)
        return False

    for _ in range(2):
        manager.create_session("s")
        with manager.use_session("s"):
            warm = model.generate(**call)
            assert torch.equal(model.generate(**call, stopping_criteria=StoppingCriteriaList([end])), plain)
        assert torch.equal(warm, plain)
        manager.wait()
        assert sum(tier["held_blocks"] for tier in manager.state()["tiers"]) == 0
    assert adapter.status()["last_error"] == ""


def test_a_chat_returns_unless_somebody_knows_better(
    attach: Attach, manager: CacheManager, tokenizer: PreTrainedTokenizerFast, heard: list[Any]
) -> None:
    """By default it will be back; its session or the call can say that it will not."""
    adapter = attach(tiny_llama(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    session = manager.create_session("talk")
    message = [{"role": "user", "content": "Hello, who are you? " * 3}]
    for said, options in (("returns", {}), ("ended", {"reuse_hint": "ended"})):
        heard.clear()
        adapter.chat(session, message, max_new_tokens=3, **options)
        assert {hint.reuse for hint in heard} == {said}
    session.reuse_hint = "tool_pending"
    heard.clear()
    adapter.chat(session, message, max_new_tokens=3)
    assert {hint.reuse for hint in heard} == {"tool_pending"}
    assert adapter.status()["last_error"] == ""


def test_eager_attention_says_which_blocks_matter(attach: Attach, heard: list[Any]) -> None:
    """Whoever asks ``generate`` for attention weights has them used: one number a block, the padding left out."""
    model = tiny_llama(attn_implementation="eager")
    adapter = attach(model)
    ids = torch.cat([torch.zeros(2, 8, dtype=torch.long), prompt(4 * BLOCK, rows=2)], dim=1)
    mask = (ids != 0).long()
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    given = [hint.importance for hint in heard if hint.importance is not None]
    assert len(given) == 2
    plain = np.zeros(4 * BLOCK)
    for step in output.attentions:
        for layer in step:
            plain += layer[0].sum(dim=(0, 1)).numpy()[8 : 8 + 4 * BLOCK]
    blocks = plain.reshape(4, BLOCK).sum(axis=1)
    np.testing.assert_allclose(given[0][:4], blocks / blocks.max(), rtol=1e-4)
    assert adapter.status()["last_error"] == ""


def test_attention_that_returns_no_weights_says_nothing(attach: Attach, heard: list[Any]) -> None:
    """Without the question, and where the weights are None: as if nobody had asked."""
    model = tiny_llama()
    attach(model)
    model.generate(input_ids=prompt(50), max_new_tokens=3, do_sample=False)
    assert [hint.importance for hint in heard] == [None] * len(heard)
    assert attention_mass(((None, None), (None, None)), 0) is None
    assert attention_mass((), 0) is None
