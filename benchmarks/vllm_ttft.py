"""Time to first token of a real vLLM engine on CPU: computed, loaded from a directory in a fresh process, loaded from
DRAM, and found by vLLM's own prefix cache; and what the connector costs where nothing is found.

    .venv-vllm/bin/python benchmarks/vllm_ttft.py --tokens 1000 --tokens 4000

Two engines are alive at the same time, one without the connector and one with it, and answer the same prompts in turn,
so that what else the machine does meets both alike; ratios are medians of ratios within a round.  The ratio of CPU time
counts everything that the process does for a prompt, writing in the background included, and hardly depends on load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import click

from kvcache_factory.cli.output import document, print_rows
from kvcache_factory.demo.model import ensure_model

COMMAND = "bench vllm-ttft"
ANSWER_TOKENS = 32
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_WAIT_POLICY": "passive",
}

Answer = dict[str, Any]


class Engine:
    """One vLLM engine in a process of its own, which does what it is told line by line."""

    def __init__(self, plan: dict[str, Any], threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", json.dumps(plan)],
            env={**os.environ, **VARIABLES, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._result()

    def ask(self, variant: int = 0, *, forget: bool = True) -> Answer:
        """Answer one of the prompts, which part at the first token; *forget*: empty vLLM's prefix cache first."""
        return self._tell({"variant": variant, "forget": forget})

    def close(self) -> None:
        """End, after what is written in the background."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, words: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return self._result()

    def _result(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise click.ClickException("the engine has ended; its last words are above")


@click.command()
@click.option(
    "--tokens", multiple=True, type=int, default=(1000, 4000), show_default=True, help="Length of the prompt."
)
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]), show_default=True)
@click.option("--block-size", default=128, show_default=True, help="Tokens of an engine block.")
@click.option("--repeat", default=5, show_default=True, help="Rounds of each comparison.")
@click.option("--processes", default=3, show_default=True, help="Fresh processes.")
@click.option("--threads", default=2, show_default=True, help="OMP_NUM_THREADS of the engines.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(
    tokens: tuple[int, ...], dtype: str, block_size: int, repeat: int, processes: int, threads: int, as_json: bool
) -> None:
    """Measure, and print a table."""
    rows: list[dict[str, Any]] = []
    for count in tokens:
        plan = {"model": str(ensure_model(dtype)), "dtype": dtype, "block_size": block_size, "tokens": count}
        with tempfile.TemporaryDirectory(prefix="kvcache-factory-bench-") as folder:
            rows += _measure({**plan, "folder": folder}, repeat, processes, threads)
    if as_json:
        click.echo(json.dumps(document(COMMAND, rows), indent=2))
    else:
        print_rows(rows, title="time to first token")


def _measure(plan: dict[str, Any], repeat: int, processes: int, threads: int) -> list[dict[str, Any]]:
    plain, cached = Engine({**plan, "folder": None}, threads), Engine(plan, threads)
    found: dict[str, list[Answer]] = {name: [] for name in ("computed", "no_hits", "own_prefix_hit", "dram_hit")}
    for number in range(repeat):  # the first prompt comes last, so that DRAM still has it
        _in_turn(number, found, ("computed", plain), ("no_hits", cached), variant=repeat - 1 - number)
    for number in range(repeat):
        _in_turn(number, found, ("own_prefix_hit", plain), ("dram_hit", cached), variant=0)
    plain.close()
    cached.close()
    found["fresh_process"] = []
    for _ in range(processes):
        fresh = Engine(plan, threads)
        found["fresh_process"].append(fresh.ask())
        fresh.close()
    return [_row(plan, phase, found) for phase in found]


def _in_turn(number: int, found: dict[str, list[Answer]], *who: tuple[str, Engine], variant: int) -> None:
    """Ask both engines, each first in every other round."""
    for phase, engine in who if number % 2 else reversed(who):
        found[phase].append(engine.ask(variant, forget=phase != "own_prefix_hit"))


def _row(plan: dict[str, Any], phase: str, found: dict[str, list[Answer]]) -> dict[str, Any]:
    answers, computed, own = found[phase], found["computed"], found["own_prefix_hit"]
    against = {"no_hits": "computed", "dram_hit": "own_prefix_hit"}.get(phase)
    pairs = list(zip(answers, found[against], strict=True)) if against else []
    ttft = median(answer["ttft_s"] for answer in answers)
    return {
        "tokens": plan["tokens"],
        "dtype": plan["dtype"],
        "phase": phase,
        "loaded_tokens": answers[-1]["cached"],
        "ttft_s": ttft,
        "total_s": median(answer["total_s"] for answer in answers),
        "speedup": median(answer["ttft_s"] for answer in computed) / ttft,
        "beside": against,
        "ttft_ratio": median(a["ttft_s"] / b["ttft_s"] for a, b in pairs) if pairs else None,
        "total_ratio": median(a["total_s"] / b["total_s"] for a, b in pairs) if pairs else None,
        "cpu_ratio": median(a["cpu_s"] / b["cpu_s"] for a, b in pairs) if pairs else None,
        "as_computed": answers[-1]["ids"] == computed[-1]["ids"],
        "as_own_hit": answers[-1]["ids"] == own[-1]["ids"],
    }


def serve(plan: dict[str, Any]) -> None:
    """An engine that answers what comes line by line, until there are no more lines."""
    from pydoc_data.topics import topics

    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if plan["folder"] is not None:
        extra = {"disk_path": plan["folder"], "disk_gb": 4, "memory_gb": 1, "load_decision": "always"}
        options["kv_transfer_config"] = {
            "kv_connector": "KVCacheFactoryConnector",
            "kv_connector_module_path": "kvcache_factory.integration.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
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
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def ask(prompt: list[int]) -> Answer:
        output = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        at = output.metrics
        return {
            "ids": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "ttft_s": at.first_token_ts - at.queued_ts,
            "total_s": at.last_token_ts - at.queued_ts,
        }

    ask(ids[:64])  # what an engine does once is not part of any phase
    print("RESULT {}", flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        if words["forget"]:
            llm.reset_prefix_cache()
        begun = time.process_time()
        answer = ask([ids[0] + words["variant"], *ids[1:]])
        if plan["folder"] is not None:  # the other engine must not pay for what this one writes
            llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.owner.manager.wait(60)
        answer["cpu_s"] = time.process_time() - begun
        print("RESULT", json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
