"""vLLM, Transformers and a directory by itself agree on whose KV it is, whatever each adds to a configuration."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test` runs this in .venv-vllm"
)

PROGRAM = """
import json, sys
from pathlib import Path
from transformers import AutoConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config
from vllm.config import ModelConfig
from vllm.transformers_utils.config import get_config
from kvcache_factory.block.fingerprint import config_fingerprint

small = dict(vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512)
yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128, "rope_theta": 500000.0}
made = {
    "llama": LlamaConfig(**small, architectures=["LlamaForCausalLM"]),
    "llama, yarn": LlamaConfig(**small, architectures=["LlamaForCausalLM"], rope_parameters=yarn),
    "llama, llama3": LlamaConfig(**small, architectures=["LlamaForCausalLM"], rope_parameters=llama3, head_dim=64),
    "mistral": MistralConfig(**small, architectures=["MistralForCausalLM"], sliding_window=None),
    "qwen2": Qwen2Config(**small, architectures=["Qwen2ForCausalLM"]),
    "qwen3": Qwen3Config(**small, architectures=["Qwen3ForCausalLM"]),
    "phi3": Phi3Config(**small, architectures=["Phi3ForCausalLM"], pad_token_id=0, sliding_window=None),
}
found = {}
for number, (name, config) in enumerate(made.items()):
    folder = Path(sys.argv[1]) / str(number)
    config.save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text())
    served = get_config(str(folder), trust_remote_code=False).to_dict()
    live = AutoConfig.from_pretrained(folder).to_dict()
    found[name] = [config_fingerprint(c) for c in (stated, live, served)]
    if name == "llama":  # the whole of it once: vLLM starts a process to look at each class of models
        whole = ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=128)
        found[name].append(config_fingerprint(whole.hf_config.to_dict()))
print("RESULT" + json.dumps(found))
"""


def test_a_configuration_has_one_fingerprint_in_a_file_in_transformers_and_in_vllm(tmp_path: Path) -> None:
    """vLLM fills in and rewrites what a file leaves out; none of that is another model."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(lines[-1].removeprefix("RESULT"))
    assert {name: len(set(prints)) for name, prints in found.items()} == dict.fromkeys(found, 1)
    assert len({prints[0] for prints in found.values()}) == len(found)
