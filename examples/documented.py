"""Chat sessions on a plain vLLM engine: the engine is made as usual, and the cache is attached to it.

Runs on a GPU as it is.  On a machine without one, say which device and model to use, and what else the engine needs::

    EXAMPLE_DEVICE=cpu EXAMPLE_MODEL=/path/to/model EXAMPLE_MAX_TOKENS=48 \
    EXAMPLE_ENGINE='{"max_model_len": 2048, "enforce_eager": true, "kv_cache_memory_bytes": 268435456}' \
    python examples/documented.py
"""

import json
import os
import uuid

from vllm import EngineArgs, LLMEngine, SamplingParams

from kvcache_factory import CacheManager, GPUBackend, LRUEvictionPolicy
from kvcache_factory.integration.vllm import VLLMCacheAdapter

DEVICE = os.environ.get("EXAMPLE_DEVICE", "cuda:0")
MODEL = os.environ.get("EXAMPLE_MODEL", "Qwen/Qwen2.5-7B-Instruct")
MAX_TOKENS = int(os.environ.get("EXAMPLE_MAX_TOKENS", "512"))
ENGINE = json.loads(os.environ.get("EXAMPLE_ENGINE", '{"gpu_memory_utilization": 0.9}'))


class ChatSession:
    """One conversation, whose keys and values belong to a session of the manager."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.session_id = str(uuid.uuid4())
        manager.create_session(self.session_id)

    def chat(self, engine: LLMEngine, text: str, sampling_params: SamplingParams) -> str:
        """Answer *text*, which goes on from what was said before."""
        with self.manager.use_session(self.session_id):
            # attach() gave the engine this method: it adds the request and steps until it has ended.
            outputs = engine.generate(
                prompts=[text],
                sampling_params=sampling_params,
                request_id=f"{self.session_id}_{uuid.uuid4().hex[:8]}",
            )
        output = outputs[0]
        print(f"[{len(output.prompt_token_ids)} tokens of prompt, {output.num_cached_tokens} of them not computed]")
        return output.outputs[0].text

    def clear_history(self) -> None:
        """A new subject: the next prompt begins without a past."""
        self.manager.clear_session(self.session_id)

    def __del__(self) -> None:
        self.manager.destroy_session(self.session_id)


def main() -> None:
    # The manager comes first: it is what tells vLLM's processes to expect an adapter.
    manager = CacheManager(
        backend=GPUBackend(device=DEVICE),
        eviction_policy=LRUEvictionPolicy(max_size_gb=2),
        enable_metrics=True,
    )
    engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL, tensor_parallel_size=1, **ENGINE))
    VLLMCacheAdapter.attach(engine, manager)

    sampling_params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=MAX_TOKENS)
    session = ChatSession(manager)
    print("AI:", session.chat(engine, "Write a quicksort in Python, please.", sampling_params))
    print("AI:", session.chat(engine, "Good. Now add detailed comments to this function.", sampling_params))
    session.clear_history()
    print("AI:", session.chat(engine, "What is the capital of France?", sampling_params))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
