"""The other engine of ``demo --cross-engine``: vLLM, in a process of a Python that has it.

One JSON line comes in on standard input.  Answers go out as JSON lines behind :data:`MARK`; whatever else vLLM prints
is not for us.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

MARK = "kvcache-factory-demo "
BLOCK_TOKENS = 64
_CACHE_BYTES = 640 << 20
_SHORT = list(range(100, 140))  # less than a block: warms the engine up and stores nothing


def say(**content: Any) -> None:
    """Answer the parent with one line."""
    print(f"\n{MARK}{json.dumps(content)}", flush=True)


def main() -> None:
    """Run the job that the parent sends, and answer each of its requests."""
    job = json.loads(sys.stdin.readline())
    try:
        import vllm
    except ImportError as error:
        say(missing=str(error))
        return
    say(step=f"starting vLLM {vllm.__version__}")
    llm = _engine(vllm, job)
    _generate(vllm, llm, {"name": "warm-up", "token_ids": _SHORT, "fresh": False}, 2)
    for request in job["requests"]:
        say(step=f"vLLM: {request['name']}")
        say(**_generate(vllm, llm, request, job["max_new_tokens"]))
    llm.llm_engine.engine_core.shutdown()  # what is still on its way to the directory is written first
    say(done=True)


def _engine(vllm: Any, job: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KVCacheFactoryConnector",
        kv_connector_module_path="kvcache_factory.integration.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=job["settings"],
    )
    return vllm.LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=_CACHE_BYTES,
        enforce_eager=True,
        max_num_seqs=2,
        kv_transfer_config=transfer,
    )


def _generate(vllm: Any, llm: Any, request: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """Tokens of one greedy answer, how many tokens of the prompt were loaded, and seconds to the first token."""
    engine = llm.llm_engine
    options = vllm.SamplingParams(
        temperature=0,
        max_tokens=max_new_tokens,
        detokenize=False,
        skip_reading_prefix_cache=True if request["fresh"] else None,
    )
    started_s, first_s, output = time.perf_counter(), float("nan"), None
    engine.add_request(request["name"], {"prompt_token_ids": request["token_ids"]}, options)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if first_s != first_s and output.outputs[0].token_ids:
                first_s = time.perf_counter() - started_s
    assert output is not None, "an engine answers every request"
    return {
        "name": request["name"],
        "token_ids": list(output.outputs[0].token_ids),
        "reused_tokens": int(output.num_cached_tokens or 0),
        "ttft_s": first_s,
    }
