"""The engine that the tests talk about: one real vLLM engine in a process of its own, which plays named scenes.

Run as ``python engine_program.py '{"engine": {...}, "connector": {...}, "scenes": ["reuse", ...]}'``; prints one line
``RESULT {...}`` with what each scene returned.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

PROMPT_TOKENS = 700
PATIENT = {"memory_gb": 0.25, "load_decision": "always", "lookup_wait_s": 60, "max_wait_s": 60}
"""Settings under which a slow machine finds as much as a fast one."""


def text_ids(tokenizer: Any, topic: str, tokens: int) -> list[int]:
    """*tokens* token ids of Python's own help texts, from one topic on."""
    from pydoc_data.topics import topics

    ids = list(tokenizer.encode(topics[topic] + topics["compound"] + topics["string-methods"][:8000]))
    assert len(ids) >= tokens, "the text is too short"
    return ids[:tokens]


class Stage:
    """An engine and the few things that scenes do with it."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.plan = plan
        self.sampling = SamplingParams
        connector = plan.get("connector")
        options: dict[str, Any] = {
            "model": plan["model"],
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "block_size": 64,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 256 << 20,
            "disable_log_stats": False,
            **plan.get("engine", {}),
        }
        if connector is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVCacheFactoryConnector",
                "kv_connector_module_path": "kvcache_factory.integration.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                **plan.get("transfer", {}),
                "kv_connector_extra_config": {**PATIENT, **connector},
            }
        if plan.get("handed_over"):  # a manager of this process, by way of the adapter
            from kvcache_factory import CacheManager, CPUBackend
            from kvcache_factory.integration.vllm import VLLMCacheAdapter

            del options["kv_transfer_config"]
            self.own = CacheManager(backend=CPUBackend(size_gb=0.25))
            options["kv_connector_extra_config"] = {"namespace": "handed over"}
            options = VLLMCacheAdapter.engine_args(self.own, **options)
        self.llm = LLM(**options)
        self.tokenizer = None if options.get("skip_tokenizer_init") else self.llm.get_tokenizer()

    def ask(
        self, prompts: list[Any], tokens: int = 16, salt: str | None = None, lora: Any = None, **params: Any
    ) -> dict[str, Any]:
        """Greedy answers to prompts of token ids or embeddings, with how many tokens each found in a cache."""
        extra = {"cache_salt": salt} if salt else {}
        listed = [{"prompt_token_ids" if isinstance(p, list) else "prompt_embeds": p, **extra} for p in prompts]
        sampling = self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True, **params)
        outputs = self.llm.generate(listed, sampling, use_tqdm=False, lora_request=lora)
        return {
            "ids": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def fresh(self, prompts: list[list[int]], tokens: int = 16, **params: Any) -> list[list[int]]:
        """What the engine answers when it may read no cache at all."""
        return self.ask(prompts, tokens, skip_reading_prefix_cache=True, **params)["ids"]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that only ours can answer."""
        assert self.llm.reset_prefix_cache()

    def ids(self, topic: str, tokens: int = PROMPT_TOKENS) -> list[int]:
        if self.tokenizer is None:
            return [(7 * i * i + 11 * i + len(topic)) % 100 + 10 for i in range(tokens)]
        return text_ids(self.tokenizer, topic, tokens)

    def counted(self, name: str) -> int:
        """A counter of vLLM's own metrics."""
        return int(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    @property
    def connector(self) -> Any:
        """The scheduler's connector, where the engine runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    @property
    def manager(self) -> Any:
        return self.connector.scheduler.owner.manager


def reuse(stage: Stage) -> dict[str, Any]:
    prompt = stage.ids("assert")
    expected = stage.fresh([prompt])
    stage.forget()
    warm = stage.ask([prompt])
    local = stage.ask([prompt])
    return {"expected": expected, "warm": warm, "local": local}


def answer_once(stage: Stage) -> dict[str, Any]:
    prompt = stage.ids("assert")
    answer = stage.ask([prompt])
    return {"answer": answer, "expected": stage.fresh([prompt])}


def encoded_in_memory(stage: Stage) -> dict[str, Any]:
    """A prompt that was asked before, after its blocks have shrunk where they are; who decodes them then."""
    from kvcache_factory.engine.packed import PackedTier

    decode, threads = PackedTier.decode, []

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(*args)

    prompt = stage.ids("assert")
    expected = stage.ask([prompt])["ids"]
    stage.forget()
    stage.manager.wait(60)
    PackedTier.decode = watched
    try:
        (before,) = stage.manager.state()["tiers"]
        warm = stage.ask([prompt])
        stage.forget()
        stage.ask([prompt[:1]], tokens=1)  # the lease goes back with the step that follows
        stage.manager.wait(60)
        (after,) = stage.manager.state()["tiers"]
    finally:
        PackedTier.decode = decode
    return {
        "expected": expected,
        "warm": warm,
        "decoded": len(threads),
        "by_the_engine": sum(threads),
        "encoded": [tier["encoded_blocks"] for tier in (before, after)],
        "held": [tier["held_bytes"] for tier in (before, after)],
    }


def next_turn(stage: Stage) -> dict[str, Any]:
    prompt = stage.ids("for", 300)
    first = stage.ask([prompt], tokens=100)["ids"][0]
    stage.forget()
    turn = [*prompt, *first, *stage.ids("while", 80)]
    warm = stage.ask([turn])
    return {"known": len(prompt) + len(first), "warm": warm, "expected": stage.fresh([turn])}


def shared_prefixes(stage: Stage) -> dict[str, Any]:
    prefix = stage.ids("class", 448)
    prompts = [
        prefix + stage.ids(topic, 90) for topic in ("if", "with", "try", "del", "global", "lambda", "in", "while")
    ]
    expected = stage.fresh(prompts)
    stage.forget()
    warm = stage.ask(prompts)
    stage.forget()
    return {"expected": expected, "warm": warm, "again": stage.ask(prompts)}


def salted(stage: Stage) -> dict[str, Any]:
    prompt = stage.ids("import", 400)
    stage.ask([prompt])
    stage.forget()
    first = stage.ask([prompt], salt="a tenant")
    stage.forget()
    second = stage.ask([prompt], salt="a tenant")
    stage.forget()
    return {"first": first, "second": second, "other": stage.ask([prompt], salt="another tenant")}


def adapters(stage: Stage) -> dict[str, Any]:
    """Three names of two adapters: the first and the last are files of the same content."""
    from vllm.lora.request import LoRARequest

    prompt = stage.ids("import", 300)
    named = {name: LoRARequest(name, n + 1, path) for n, (name, path) in enumerate(stage.plan["adapters"].items())}
    found: dict[str, Any] = {}
    for step, name in (("plain", None), ("one", "one"), ("one again", "one"), ("two", "two"), ("copy", "copy")):
        stage.forget()
        found[step] = stage.ask([prompt], lora=named.get(name))
    for step, name in (("expected plain", None), ("expected one", "one"), ("expected two", "two")):
        found[step] = stage.fresh([prompt], lora=named.get(name))
    return found


def embeddings(stage: Stage) -> dict[str, Any]:
    """A prompt of embeddings, those of known tokens, twice; and then as tokens."""
    from safetensors.torch import load_file

    ids = stage.ids("while", 200)
    table = load_file(f"{stage.plan['model']}/model.safetensors")["model.embed_tokens.weight"]
    runs = []
    for _ in range(2):
        stage.forget()
        runs.append(stage.ask([table[ids]]))
    stage.forget()
    return {"runs": runs, "tokens": stage.ask([ids])}


def not_reading(stage: Stage) -> dict[str, Any]:
    prompt = stage.ids("assert")
    stage.ask([prompt])
    stage.forget()
    return {"answer": stage.ask([prompt], skip_reading_prefix_cache=True)}


def prompt_logprobs(stage: Stage) -> dict[str, Any]:
    prompt = stage.ids("assert", 300)
    stage.ask([prompt])
    stage.forget()
    sampling = stage.sampling(temperature=0, max_tokens=1, prompt_logprobs=0)
    runs = []
    for _ in range(2):
        output = stage.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        runs.append(
            [None if row is None else max(value.logprob for value in row.values()) for row in output.prompt_logprobs]
        )
        stage.forget()
    return {"first": runs[0], "second": runs[1], "tokens": len(prompt)}


def aborted(stage: Stage) -> dict[str, Any]:
    engine = stage.llm.llm_engine
    prompts = {name: stage.ids(name, 400) for name in ("assert", "for", "with", "try", "class")}
    expected = dict(zip(prompts, stage.fresh(list(prompts.values())), strict=True))
    stage.forget()
    sampling = stage.sampling(temperature=0, max_tokens=16, ignore_eos=True)
    for name, ids in prompts.items():
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    engine.abort_request(["with"])  # nothing was asked of it yet
    answers: dict[str, list[int]] = {}
    for number in range(10_000):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        if number == 1:
            engine.abort_request(["for"])  # it is running
    return {"expected": expected, "answers": answers}


def weights_changed(stage: Stage) -> dict[str, Any]:
    prompt = stage.ids("assert")
    stage.ask([prompt])
    reset = stage.llm.reset_prefix_cache(reset_connector=True)
    first = stage.ask([prompt])
    stage.forget()
    return {"reset": reset, "first": first, "second": stage.ask([prompt]), "expected": stage.fresh([prompt])}


def load_fails(stage: Stage) -> dict[str, Any]:
    from kvcache_factory.integration.vllm import worker

    prefix = stage.ids("class", 448)
    prompts = [prefix + stage.ids(topic, 60) for topic in ("if", "with", "try", "del")]
    expected = stage.fresh(prompts)
    stage.forget()
    real, calls = worker.scatter, []

    def broken(*args: Any) -> None:
        calls.append(1)
        real(*args)  # the bytes are there, and are of no use: nobody can know which of them are good
        raise OSError("planted")

    worker.scatter = broken
    try:
        answers = stage.ask(prompts)
    finally:
        worker.scatter = real
    stage.forget()
    return {"expected": expected, "answers": answers, "calls": len(calls), "after": stage.ask(prompts)}


def slot_changes_under_a_load(stage: Stage) -> dict[str, Any]:
    """A block that turns out to be damaged between the promise and the load."""
    prompt = stage.ids("while", 500)
    expected = stage.fresh([prompt])
    stage.forget()
    tier = stage.manager._chain.tiers[0]
    real = tier.sound
    tier.sound = lambda rows, integrity: min(len(rows), 3)
    try:
        answer = stage.ask([prompt])
    finally:
        tier.sound = real
    return {"expected": expected, "answer": answer}


def crowd(stage: Stage) -> dict[str, Any]:
    """32 requests at once, more than both pools can hold: preempted by vLLM, evicted by us."""
    topics = ["assert", "for", "with", "try", "class", "while", "import", "if"]
    starts = [stage.ids(topic, 40 + 8 * number) for number, topic in enumerate(topics)]
    prompts = [start + stage.ids(topics[turn], 24) for turn in range(4) for start in starts]
    calm = stage.plan["calm"]  # as many at once as the pool can hold
    expected = [ids for at in range(0, 32, calm) for ids in stage.fresh(prompts[at : at + calm], tokens=40)]
    before = stage.counted("vllm:num_preemptions")
    core, most = stage.llm.llm_engine.engine_core.engine_core, 0
    real = core.scheduler.schedule

    def schedule(*args: Any) -> Any:
        nonlocal most
        output = real(*args)
        most = max(most, len(core.scheduler.running))
        return output

    core.scheduler.schedule = schedule
    runs = [stage.ask(prompts, tokens=40)["ids"] for _ in range(2)]
    core.scheduler.schedule = real
    evicted = sum(row["blocks"] for row in stage.manager.state()["events"] if row["event"] == "evicted")
    preempted = stage.counted("vllm:num_preemptions") - before
    return {"expected": expected, "runs": runs, "preempted": preempted, "evicted": evicted, "most": most}


def killed_while_writing(stage: Stage) -> dict[str, Any]:
    """One prompt reaches the disk; of the next, a segment's slots are half written when the process says so."""
    from kvcache_factory.store.disk.segment import Segment

    stage.ask([stage.ids("class", 600)])
    stage.manager.wait(60)
    real = Segment.move

    def move(segment: Any, slots: Any, views: Any, *, write: bool, **how: Any) -> int:
        if not write:
            return real(segment, slots, views, write=write, **how)
        for view in views:
            view[len(view) // 2 :] = bytes(
                len(view) - len(view) // 2
            )  # the second half of each image has not reached the disk
        real(segment, slots, views, write=write, **how)
        print("WRITING", flush=True)
        time.sleep(600)
        raise AssertionError("nobody has killed this process")

    Segment.move = move
    stage.ask([stage.ids("with", 600)])
    stage.manager.wait(600)
    return {}


def after_a_kill(stage: Stage) -> dict[str, Any]:
    found = {}
    for name, topic in (("written", "class"), ("half written", "with")):
        prompt = stage.ids(topic, 600)
        found[name] = {"answer": stage.ask([prompt]), "expected": stage.fresh([prompt])}
    return found


def events(stage: Stage) -> dict[str, Any]:
    """What vLLM publishes of the host's blocks: under the hashes by which it announced its own."""
    publisher = stage.llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
    published: list[Any] = []
    publisher.publish = lambda batch: published.extend(batch.events)
    stage.ask([stage.ids("assert", 300)])
    stage.manager.reset()
    stage.connector.scheduler.events._looked -= 10
    stage.ask([stage.ids("for", 30)])
    named = [
        (type(event).__name__, event.medium, list(event.block_hashes))
        for event in published
        if hasattr(event, "block_hashes")
    ]
    return {
        kind: sorted(str(hash_) for name, medium, hashes in named if (name, medium) == which for hash_ in hashes)
        for kind, which in {"gpu": ("BlockStored", "GPU"), "stored": ("BlockStored", "CPU"),
                            "removed": ("BlockRemoved", "CPU")}.items()
    }  # fmt: skip


def wait_for_a_line(stage: Stage) -> dict[str, Any]:
    print("READY", flush=True)
    sys.stdin.readline()
    return {}


def figures(stage: Stage) -> dict[str, Any]:
    """What vLLM's metrics say about ours, and whether our books are in order."""
    stage.manager.wait(30)
    metrics = {m.name: m.value for m in stage.llm.get_metrics() if "kvcache_factory" in m.name}
    return {"metrics": metrics, "check": stage.manager.check(), "leases": stage.manager.state()["leases"]}


def handed_over(stage: Stage) -> dict[str, Any]:
    """What the engine got by way of the adapter."""
    side = stage.connector.scheduler
    policy = stage.llm.llm_engine.vllm_config.kv_transfer_config.kv_load_failure_policy
    return {"same": side.owner.manager is stage.own, "namespace": side.settings.namespace, "policy": policy}


def settle(stage: Stage) -> dict[str, Any]:
    """Let what was saved reach the disk before the process ends."""
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        stage.manager.wait(60)
    else:
        time.sleep(3)
    return {}


SCENES = {
    scene.__name__: scene
    for scene in (
        reuse, answer_once, wait_for_a_line, next_turn, shared_prefixes, salted, not_reading, prompt_logprobs, aborted,
        weights_changed, adapters, embeddings, events, load_fails, slot_changes_under_a_load, crowd, handed_over,
        killed_while_writing, after_a_kill, encoded_in_memory, figures, settle,
    )
}  # fmt: skip


def main() -> None:
    plan = json.loads(sys.argv[1])
    stage = Stage(plan)
    results = {}
    for name in plan["scenes"]:
        if name != "settle":
            stage.forget()
        results[name] = SCENES[name](stage)
    print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
