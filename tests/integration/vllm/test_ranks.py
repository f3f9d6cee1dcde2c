"""Two tensor-parallel ranks fill one slot, each its own heads, and a single rank reads what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import TIMEOUT_S, environment, needs_vllm, play

pytestmark = needs_vllm

MODEL = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=256, max_position_embeddings=4096, num_hidden_layers=3, initializer_range=0.2)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


@pytest.mark.soak
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="vLLM binds each rank to a core of its own")
def test_what_two_ranks_saved_is_loaded_by_two_and_by_one(tmp_path: Path) -> None:
    """The number of ranks belongs to neither the key nor the bytes of a block."""
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-c", MODEL, str(model)], env=environment(), check=True, timeout=TIMEOUT_S)
    connector = {"disk_path": str(tmp_path / "kv"), "disk_gb": 0.25, "memory_gb": 0.05}
    cores = sorted(os.sched_getaffinity(0))[:2]
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in cores)}
    engine = {"skip_tokenizer_init": True, "more": {"model": str(model)}}
    two = play(
        "answer_once", "reuse", "settle",
        connector=connector, processes=True, variables=bind, tensor_parallel_size=2, **engine,
    )  # fmt: skip
    assert two["answer_once"]["answer"]["cached"] == [0]
    assert two["reuse"]["warm"]["cached"] == [640]
    assert two["reuse"]["warm"]["ids"] == two["reuse"]["local"]["ids"] == two["reuse"]["expected"]
    one = play("answer_once", connector=connector, **engine)["answer_once"]
    assert one["answer"]["cached"] == [640]
    assert one["answer"]["ids"] == one["expected"] == two["answer_once"]["answer"]["ids"]
