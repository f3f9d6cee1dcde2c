"""A program that attaches a manager to an engine it made without one, and holds conversations; prints its findings."""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.integration.vllm import VLLMCacheAdapter

STORY = "The keeper of the lighthouse is called Ada. She came to the island when she was nine years old. " * 8


def turn(engine: Any, manager: CacheManager, text: str, **scope: Any) -> dict[str, Any]:
    """Ask inside a session; what was asked in the end, how much was cached, and the whole conversation."""
    greedy = SamplingParams(temperature=0, max_tokens=16)
    with manager.use_session("visitor", **scope):
        output = engine.generate(prompts=[text], sampling_params=greedy)[0]
    ids = list(output.prompt_token_ids)
    return {"prompt": ids, "all": [*ids, *output.outputs[0].token_ids], "cached": output.num_cached_tokens}


def main() -> None:
    manager = CacheManager(backend=CPUBackend(size_gb=0.25))
    arguments = {"model": sys.argv[1], **json.loads(sys.argv[2])}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    adapter = VLLMCacheAdapter.attach(engine, manager)
    manager.create_session("visitor")
    found: dict[str, Any] = {"one": turn(engine, manager, STORY)}
    engine.reset_prefix_cache()
    found["two"] = turn(engine, manager, " And she stayed")
    found["none"] = turn(engine, manager, "And she stayed", history="none")
    whole = engine.get_tokenizer().decode(found["two"]["all"], skip_special_tokens=True)
    found["contained"] = turn(engine, manager, whole + " for ever")
    found["whole"] = list(engine.get_tokenizer().encode(whole + " for ever"))

    # Somebody else's request goes on while generate() is at work, and its output is not lost.
    engine.add_request("other", "Once upon a time", SamplingParams(temperature=0, max_tokens=24))
    turn(engine, manager, " and ever")
    others = []
    while engine.has_unfinished_requests():
        others += [output.request_id for output in engine.step() if output.finished]
    found["others"] = others

    manager.wait(30)
    state = manager.state()
    found["sessions"] = [row for side in (state, *state["engines"]) if side for row in side["sessions"]]
    found["dropped"] = manager.clear_session("visitor")
    engine.reset_prefix_cache()
    found["cleared"] = turn(engine, manager, "A new story")
    found["again"] = turn(engine, manager, STORY, history="none")
    found["check"] = manager.check()
    found["status"] = adapter.status()
    adapter.detach()
    found["detached"] = not hasattr(engine, "generate")
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
