"""Time to first token of a real vLLM engine on CPU: computed, loaded from a directory in a fresh process, loaded from
DRAM, and found by vLLM's own prefix cache; and what the connector costs where nothing is found.

    .venv-vllm/bin/python benchmarks/vllm_ttft.py --tokens 1000 --tokens 4000
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

import click

from kvcache_factory.cli.output import document, print_rows
from kvcache_factory.demo.model import ensure_model

COMMAND = "bench vllm-ttft"


@click.command()
@click.option(
    "--tokens", multiple=True, type=int, default=(1000, 4000), show_default=True, help="Length of the prompt."
)
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]), show_default=True)
@click.option("--block-size", default=128, show_default=True, help="Tokens of an engine block.")
@click.option("--repeat", default=3, show_default=True, help="Measurements of what does not need a fresh process.")
@click.option("--threads", default=2, show_default=True, help="OMP_NUM_THREADS of the engines.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(tokens: tuple[int, ...], dtype: str, block_size: int, repeat: int, threads: int, as_json: bool) -> None:
    """Measure with one engine for each process, and print a table."""
    model = str(ensure_model(dtype))
    rows: list[dict[str, Any]] = []
    for count in tokens:
        plan = {"model": model, "dtype": dtype, "block_size": block_size, "tokens": count, "repeat": repeat}
        with tempfile.TemporaryDirectory(prefix="kvcache-factory-bench-") as folder:
            disk = {"disk_path": folder, "disk_gb": 2, "memory_gb": 1, "load_decision": "always"}
            parts = [
                _engine({**plan, "connector": None, "phases": ["computed", "own_prefix_hit"]}, threads),
                _engine({**plan, "connector": disk, "phases": ["saving", "dram_hit", "no_hits"]}, threads),
                _engine({**plan, "connector": disk, "phases": ["fresh_process"]}, threads),
            ]
        rows += _rows(count, dtype, {name: found for part in parts for name, found in part.items()})
    if as_json:
        click.echo(json.dumps(document(COMMAND, rows), indent=2))
    else:
        print_rows(rows, title="time to first token")


def _rows(tokens: int, dtype: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    base = found["computed"]
    return [
        {
            "tokens": tokens,
            "dtype": dtype,
            "phase": phase,
            "loaded_tokens": result["cached"],
            "ttft_s": result["ttft_s"],
            "speedup": base["ttft_s"] / result["ttft_s"],
            "identical": result["ids"] == base["ids"] if "same_prompt" in result else None,
        }
        for phase, result in found.items()
    ]


def _engine(plan: dict[str, Any], threads: int) -> dict[str, Any]:
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(threads),
    }
    done = subprocess.run(
        [sys.executable, __file__, "--engine", json.dumps(plan)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise click.ClickException(f"the engine failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def play(plan: dict[str, Any]) -> dict[str, Any]:
    """The phases of one engine, in its own process."""
    from pydoc_data.topics import topics

    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if plan["connector"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "KVCacheFactoryConnector",
            "kv_connector_module_path": "kvcache_factory.integration.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": plan["connector"],
        }
    llm = LLM(
        model=plan["model"],
        dtype=plan["dtype"],
        block_size=plan["block_size"],
        max_model_len=plan["tokens"] + 64,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        disable_log_stats=False,
        **options,
    )
    text = "".join(topics[name] for name in ("assert", "class", "for", "specialnames", "string-methods"))
    ids = llm.get_tokenizer().encode(text)[: plan["tokens"]]
    assert len(ids) == plan["tokens"], "the text is too short"
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    def ask(prompt: list[int]) -> dict[str, Any]:
        output = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        metrics = output.metrics
        seconds = metrics.first_token_ts - metrics.queued_ts
        return {"ids": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens, "ttft_s": seconds}

    def often(prompts: list[list[int]], forget: bool) -> dict[str, Any]:
        results = []
        for prompt in prompts:
            if forget:
                llm.reset_prefix_cache()
            results.append(ask(prompt))
        return {**results[-1], "ttft_s": median(result["ttft_s"] for result in results)}

    ask(ids[:64])  # what an engine does once is not part of any phase
    llm.reset_prefix_cache()
    others = [[100 + number, *ids[1:]] for number in range(plan["repeat"])]
    acts = {
        "computed": lambda: often([ids] * plan["repeat"], forget=True),
        "own_prefix_hit": lambda: often([ids] * plan["repeat"], forget=False),
        "saving": lambda: ask(ids),
        "dram_hit": lambda: often([ids] * plan["repeat"], forget=True),
        "no_hits": lambda: often(others, forget=True),
        "fresh_process": lambda: ask(ids),
    }
    found = {}
    for phase in plan["phases"]:
        found[phase] = acts[phase]()
        if phase != "no_hits":
            found[phase]["same_prompt"] = True
    if plan["connector"] is not None:
        llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.owner.manager.wait(60)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        print("RESULT", json.dumps(play(json.loads(sys.argv[2]))), flush=True)
    else:
        main()
