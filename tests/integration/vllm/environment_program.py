"""An engine that is configured by nothing but the environment: answers one prompt, prints what was cached and said."""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=128 << 20,
        kv_transfer_config={
            "kv_connector": "KVCacheFactoryConnector",
            "kv_connector_module_path": "kvcache_factory.integration.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"load_decision": "always", "lookup_wait_s": 60, "max_wait_s": 60},
        },
    )
    from pydoc_data.topics import topics

    ids = list(llm.get_tokenizer().encode(topics["for"] + topics["compound"]))[:400]
    output: Any = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=8))[0]
    found = {"cached": output.num_cached_tokens, "ids": list(output.outputs[0].token_ids)}
    llm.llm_engine.engine_core.shutdown()
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
