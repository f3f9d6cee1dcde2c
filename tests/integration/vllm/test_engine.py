"""One engine in this process, without and with the cache: the same answers, and much less to compute.

``expected`` is what the same engine answers while it may read no cache at all; prefills are in chunks of 256 tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
from engines import Once, needs_vllm, play

pytestmark = needs_vllm

SCENES = (
    "reuse", "next_turn", "shared_prefixes", "salted", "not_reading", "prompt_logprobs", "aborted", "load_fails",
    "slot_changes_under_a_load", "weights_changed", "figures",
)  # fmt: skip


@pytest.fixture
def played(once: Once) -> dict[str, Any]:
    """All scenes on one engine with blocks of 64 tokens."""
    result: dict[str, Any] = once("engine-64", lambda: play(*SCENES))
    return result


def test_a_prompt_is_loaded_and_answered_as_if_it_were_computed(played: dict[str, Any]) -> None:
    """700 tokens: ten blocks of 64 come from the cache, the rest is computed, and the answer is the same."""
    scene = played["reuse"]
    assert scene["warm"]["cached"] == [640]
    assert scene["expected"] == scene["warm"]["ids"] == scene["local"]["ids"]


def test_blocks_that_are_encoded_in_memory_are_decoded_ahead(once: Once) -> None:
    """Eleven blocks of 64 tokens, nine of them int8: decoded by background threads while a request waits for ten.

    The copies go when the request has ended, and the engine's thread never decodes.
    """
    memory = {"backend": {"type": "cpu", "size_gb": 0.25}, "compression_policy": {"method": "int8"}}
    connector = {"manager": memory, "load_decision": "always"}
    scene = once("engine-int8", lambda: play("encoded_in_memory", "figures", connector=connector))
    played, figures = scene["encoded_in_memory"], scene["figures"]
    assert played["warm"]["cached"] == [640]
    assert (played["decoded"], played["by_the_engine"]) == (9, 0)
    assert played["encoded"] == [9, 9]
    assert played["held"][0] == played["held"][1]
    assert (figures["check"], figures["leases"]) == ([], 0)


def test_the_next_turn_loads_what_was_generated(played: dict[str, Any]) -> None:
    """300 tokens of prompt and 100 of answer are known, and six blocks of 64 of them are loaded."""
    scene = played["next_turn"]
    assert scene["known"] == 400
    assert scene["warm"]["cached"] == [384]
    assert scene["expected"] == scene["warm"]["ids"]


def test_requests_at_the_same_time_share_a_prefix(played: dict[str, Any]) -> None:
    """Eight requests in one batch load one prefix, also those that see the blocks of a neighbour being filled."""
    scene = played["shared_prefixes"]
    assert scene["warm"]["cached"] == scene["again"]["cached"] == [512] * 8
    assert scene["expected"] == scene["warm"]["ids"] == scene["again"]["ids"]


def test_a_salt_keeps_tenants_apart(played: dict[str, Any]) -> None:
    """The first request under a salt finds nothing, the second all, and another salt again nothing."""
    scene = played["salted"]
    assert [scene[name]["cached"] for name in ("first", "second", "other")] == [[0], [384], [0]]
    assert scene["first"]["ids"] == scene["second"]["ids"] == scene["other"]["ids"]


def test_a_request_may_ask_not_to_read_any_cache(played: dict[str, Any]) -> None:
    """``skip_reading_prefix_cache`` is honoured."""
    assert played["not_reading"]["answer"]["cached"] == [0]


def test_logprobs_of_the_prompt_are_complete(played: dict[str, Any]) -> None:
    """They need every position to be computed, and get it though the blocks are stored."""
    scene = played["prompt_logprobs"]
    assert len(scene["first"]) == scene["tokens"]
    assert scene["first"] == scene["second"]


def test_an_abort_disturbs_nobody(played: dict[str, Any]) -> None:
    """One request goes while it waits and one while it runs; the others answer as expected."""
    scene = played["aborted"]
    assert set(scene["answers"]) == {"assert", "try", "class"}
    assert all(scene["expected"][name] == answer for name, answer in scene["answers"].items())


def test_a_load_that_fails_is_computed_and_not_tried_for_ever(played: dict[str, Any]) -> None:
    """The request and its neighbours on the same blocks compute them; later the blocks are found again."""
    scene = played["load_fails"]
    assert scene["calls"] == 1
    assert scene["expected"] == scene["answers"]["ids"] == scene["after"]["ids"]
    assert scene["after"]["cached"] == [448] * 4


def test_blocks_that_are_lost_after_they_were_promised_are_computed(played: dict[str, Any]) -> None:
    """A checksum that does not hold any more costs time, not the answer."""
    scene = played["slot_changes_under_a_load"]
    assert scene["expected"] == scene["answer"]["ids"]


def test_after_a_reset_of_the_connector_nothing_old_is_served(played: dict[str, Any]) -> None:
    """vLLM asks for that when weights change in place; what is computed afterwards is found again."""
    scene = played["weights_changed"]
    assert scene["reset"]
    assert scene["first"]["cached"] == [0]
    assert scene["second"]["cached"] == [640]
    assert scene["expected"] == scene["first"]["ids"] == scene["second"]["ids"]


def test_the_books_are_in_order_and_vllm_shows_them(played: dict[str, Any]) -> None:
    """No lease is left, no invariant is broken, and vLLM's metrics have our counters."""
    scene = played["figures"]
    assert scene["check"] == []
    assert scene["leases"] == 0
    assert scene["metrics"]["vllm:kvcache_factory_blocks_loaded"] > 0
    assert scene["metrics"]["vllm:kvcache_factory_blocks_saved"] > 0
    assert scene["metrics"]["vllm:kvcache_factory_loads_failed"] == 1


@pytest.fixture(params=[pytest.param(32, marks=pytest.mark.soak), 128, pytest.param(256, marks=pytest.mark.soak)])
def other(request: pytest.FixtureRequest, once: Once) -> dict[str, Any]:
    """Other engine blocks; the manager is one of this process, put there by ``engine_args``, and events are on."""

    def act() -> Any:
        scenes = ("events", "reuse", "next_turn", "shared_prefixes", "handed_over", "figures")
        config = {"enable_kv_cache_events": True, "publisher": "null"}
        return play(*scenes, block_size=request.param, kv_events_config=config, more={"handed_over": True})

    result: dict[str, Any] = {**once(f"engine-{request.param}", act), "block_size": request.param}
    return result


def test_other_block_sizes(other: dict[str, Any]) -> None:
    """Storage blocks of 64, 128 and 256 tokens, of two engine blocks and of one; local hits may end between them."""
    for name in ("reuse", "next_turn", "shared_prefixes"):
        assert other[name]["expected"] == other[name]["warm"]["ids"]
    step = max(other["block_size"], 64)
    assert other["reuse"]["warm"]["cached"] == [699 // step * step]
    assert (other["figures"]["check"], other["figures"]["leases"]) == ([], 0)


def test_engine_args_put_a_manager_of_this_process_behind_the_engine(other: dict[str, Any]) -> None:
    """It is the very manager, a failed load is computed, and other settings reach the connector."""
    assert other["handed_over"] == {"same": True, "namespace": "handed over", "policy": "recompute"}


def test_kv_events_say_what_the_host_holds(other: dict[str, Any]) -> None:
    """Blocks are announced under vLLM's own hashes when they are stored, and when they have left."""
    scene = other["events"]
    assert len(scene["stored"]) == 256 // other["block_size"]  # of 300 tokens; vLLM announces halves of ours, too
    assert set(scene["stored"]) <= set(scene["gpu"])
    assert scene["removed"] == scene["stored"]


def test_32_requests_at_once_with_eviction_and_preemption() -> None:
    """Together they need more than either pool has: vLLM preempts, we evict, and every answer is as expected."""
    played = play(
        "crowd",
        "figures",
        connector={"memory_gb": 0.06, "block_tokens": 32},
        block_size=32,
        num_gpu_blocks_override=84,
        max_model_len=256,
        max_num_seqs=32,
        more={"calm": 16},
    )
    scene = played["crowd"]
    assert scene["most"] == 32
    for run in scene["runs"]:
        assert run == scene["expected"]
    assert scene["preempted"] > 0
    assert scene["evicted"] > 0
    assert (played["figures"]["check"], played["figures"]["leases"]) == ([], 0)


def test_bfloat16_answers_like_vllms_own_prefix_cache() -> None:
    """Rounding depends on how a prefill is cut, so the yardstick is a hit in the engine's own memory: identical."""
    scene = play("reuse", dtype="bfloat16")["reuse"]
    assert scene["warm"]["cached"] == scene["local"]["cached"] == [640]
    assert scene["warm"]["ids"] == scene["local"]["ids"]


@pytest.mark.soak
def test_drafts_that_were_rejected_are_not_saved() -> None:
    """With n-gram speculation the next turn loads generated tokens, and answers are as expected."""
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    played = play("reuse", "next_turn", "figures", speculative_config=draft)
    for name in ("reuse", "next_turn"):
        assert played[name]["expected"] == played[name]["warm"]["ids"]
    assert played["next_turn"]["warm"]["cached"] == [384]
    assert (played["figures"]["check"], played["figures"]["leases"]) == ([], 0)


@pytest.mark.soak
def test_fp8_keys_and_values() -> None:
    """Blocks of one byte an element come back as they were."""
    played = play("reuse", "figures", kv_cache_dtype="fp8_e4m3")
    assert played["reuse"]["warm"]["cached"] == [640]
    assert played["reuse"]["warm"]["ids"] == played["reuse"]["local"]["ids"]
