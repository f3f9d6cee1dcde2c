"""The packing as a real vLLM engine fills it: its own kernel, and its cache after a prefill beside Transformers'."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test` runs this in .venv-vllm"
)

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_WAIT_POLICY": "passive",
    "OMP_NUM_THREADS": "1",
}

KERNEL = """
import json
import numpy as np, torch
import vllm._C
import vllm._custom_ops as ops
from kvcache_factory.block.spec import BlockSpec, KVDtype, Layout
from kvcache_factory.memory import PackedRegion, Slab, gather

rows, heads, blocks = [], 3, 2
for isa, dim in (("vec", 64), ("vec16", 64), ("vec16", 80), ("vec16", 112)):
    for name in ("float32", "bfloat16", "float16"):
        for n in (32, 64, 128, 256):
            dtype, tokens = getattr(torch, name), n * blocks
            cache = torch.zeros(blocks, heads, n, 2 * dim, dtype=dtype)
            k, v = (torch.randn(tokens, heads, dim).to(dtype) for _ in range(2))
            halves = cache.view(blocks, heads, 2 * n, dim).chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(k, v, *halves, torch.arange(tokens), isa, 1.0, 1.0, "auto")
            spec = BlockSpec(KVDtype.of(name), 1, heads, dim, tokens)
            region, slab = PackedRegion(spec, [cache]), Slab(1, spec.slot_bytes)
            gather(region, region.positions([[0, 1]]), slab, [0], 0, Layout.LCND)
            want = torch.stack([k, v]).view(torch.uint8).numpy().reshape(-1)
            rows.append([f"{isa} {dim}", name, n, bool(np.array_equal(slab.view[0, : spec.payload_bytes], want))])
for cache_dtype, kind in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
    n, tokens, dim = 64, 128, 64
    cache = torch.zeros(blocks, heads, n, 2 * dim, dtype=torch.uint8)
    k, v = (torch.randint(-4, 5, (tokens, heads, dim)).bfloat16() for _ in range(2))  # numbers that fp8 has
    halves = cache.view(blocks, heads, 2 * n, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, *halves, torch.arange(tokens), "vec", 1.0, 1.0, cache_dtype)
    spec = BlockSpec(KVDtype.of(kind), 1, heads, dim, tokens)
    region, slab = PackedRegion(spec, [cache]), Slab(1, spec.slot_bytes)
    gather(region, region.positions([[0, 1]]), slab, [0], 0, Layout.LCND)
    got = torch.from_numpy(slab.view[0, : spec.payload_bytes]).view(kind).bfloat16().view(2, tokens, heads, dim)
    rows.append(["vec", cache_dtype, n, bool(torch.equal(got, torch.stack([k, v])))])
print("RESULT" + json.dumps(rows))
"""

ENGINE = """
import json, os, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from kvcache_factory.block.spec import BlockSpec, KVDtype, Layout
from kvcache_factory.memory import PackedRegion, SequenceRegion, Slab, gather, scatter

path, n, tokens = sys.argv[1], 32, 128
ids = [(7 * i * i + 11 * i) % 40_000 + 10 for i in range(tokens)]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
with torch.no_grad():
    cache = model(torch.tensor([ids]), use_cache=True).past_key_values
llm = LLM(path, dtype="float32", max_model_len=256, enforce_eager=True, block_size=n,
          kv_cache_memory_bytes=64 << 20, max_num_seqs=2)
llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
tensors = runner.kv_caches
used = tensors[0].abs().sum(dim=(1, 2, 3)).nonzero().flatten().tolist()[: tokens // n]
keys = [layer.keys for layer in cache.layers]
values = [layer.values for layer in cache.layers]
spec = BlockSpec(KVDtype.F32, len(keys), keys[0].shape[1], keys[0].shape[3], 64)
region, slab = PackedRegion(spec, tensors), Slab(2, spec.slot_bytes)
gather(region, region.positions(used), slab, [0, 1], 0, region.tag)
got = [torch.zeros_like(t) for t in keys + values]
mine = SequenceRegion.from_layers(got[: len(keys)], got[len(keys) :], spec)
scatter(mine, mine.positions(0, [0, 64]), slab, [0, 1], 0, region.tag)
worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, keys + values))
print("RESULT" + json.dumps({"tag": region.tag, "worst": worst, "shape": list(tensors[0].shape[1:])}))
sys.stdout.flush()
os._exit(0)
"""


def run(program: str, *arguments: str) -> Any:
    """What *program* printed as its result, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, f"no result; exit status {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(lines[-1].removeprefix("RESULT"))


def test_the_kernel_of_the_cpu_backend_packs_as_the_page_says() -> None:
    """What vLLM's own kernel writes, of every dtype and block size, is read back bit for bit."""
    rows = run(KERNEL)
    assert len(rows) == 4 * 12 + 2
    assert [row for row in rows if not row[3]] == []


def test_an_engine_holds_what_transformers_holds_in_its_own_packing() -> None:
    """After one prompt in both, vLLM's blocks unpacked are Transformers' keys and values, up to rounding."""
    from kvcache_factory.demo.model import ensure_model

    found = run(ENGINE, str(ensure_model("float32")))
    assert found["tag"] == "VLLM_CPU_32"
    assert found["shape"] == [3, 32, 128]
    assert found["worst"] < 1e-3
