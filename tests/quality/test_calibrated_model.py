"""From ``kvcache-factory calibrate`` to an engine whose blocks are encoded with the table: whose model it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.demo.small import small_model
from transformers import AutoModelForCausalLM

from kvcache_factory import CacheManager, CompressionPolicy, GPUBackend
from kvcache_factory.cli import main
from kvcache_factory.codec.calibration import load
from kvcache_factory.errors import ConfigError
from kvcache_factory.integration.transformers import TransformersCacheAdapter

BLOCK = 64
PROMPT = torch.arange(8 * BLOCK)[None] % 200 + 2


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def opened() -> Iterator[Any]:
    """Makes managers that encode in memory by a table, and closes them."""
    managers: list[CacheManager] = []

    def make(table: Path) -> CacheManager:
        policy = CompressionPolicy("pca", options={"table": str(table), "max_rel_error": 1.0}, threshold_step=0)
        managers.append(CacheManager(GPUBackend(device="cpu", size_gb=0.01), compression_policy=policy))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


def directory(path: Path, dtype: torch.dtype) -> Path:
    model, tokenizer = small_model()
    model.to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def calibrate(model: Path, out: Path, *more: str) -> Path:
    size = ["--windows", "2", "--tokens", "128"]
    done = CliRunner().invoke(main, ["calibrate", "--model", str(model), *size, "--out", str(out), "--json", *more])
    assert done.exit_code == 0, done.output
    return Path(json.loads(done.stdout)["rows"][0]["table"])


def loaded(path: Path, dtype: torch.dtype, *, known: bool = True) -> Any:
    """The model of *path*; not *known*: as if from elsewhere, so that only its weights say whose it is."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    if not known:
        model.config._name_or_path = model.name_or_path = "someone/model"
    return model


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_table_serves_its_model_however_it_was_loaded(opened: Any, tmp_path: Path, saved: torch.dtype) -> None:
    """In any dtype, from its directory or from elsewhere; a model with other weights is refused."""
    path = directory(tmp_path / "model", saved)
    table = calibrate(path, tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for known in (True, False):
            model = loaded(path, dtype, known=known)
            TransformersCacheAdapter.attach(model, opened(table), block_tokens=BLOCK).detach()
    other = loaded(path, saved)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(ConfigError, match=r"another model.*--model-id NAME"):
        TransformersCacheAdapter.attach(other, opened(table), block_tokens=BLOCK)


def test_a_name_makes_it_the_same_model(opened: Any, tmp_path: Path) -> None:
    """What the refusal says helps: the table of a name serves whoever is registered by it, and nobody else."""
    path = directory(tmp_path / "model", torch.float32)
    table = calibrate(path, tmp_path, "--model-id", "ours")
    other = loaded(path, torch.bfloat16, known=False)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.01)
    TransformersCacheAdapter.attach(other, opened(table), block_tokens=BLOCK, model_id="ours").detach()
    for named in (None, "theirs"):
        with pytest.raises(ConfigError, match="another model"):
            TransformersCacheAdapter.attach(other, opened(table), block_tokens=BLOCK, model_id=named)


def test_an_engine_that_quantises_is_of_the_same_model(tmp_path: Path) -> None:
    """vLLM marks its fingerprint; the statistics of keys and values are still those."""
    found = load(calibrate(directory(tmp_path / "model", torch.float32), tmp_path))
    assert found.is_for(f"{found.fingerprint}+fp8")
    assert not found.is_for("0" * 32 + "+fp8")


def test_blocks_of_the_model_are_encoded_with_its_table_and_read_again(opened: Any, tmp_path: Path) -> None:
    path = directory(tmp_path / "model", torch.bfloat16)
    manager, model = opened(calibrate(path, tmp_path)), loaded(path, torch.bfloat16)
    adapter = TransformersCacheAdapter.attach(model, manager, block_tokens=BLOCK)
    call = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    first = model.generate(PROMPT, **call)
    assert manager.wait(60)
    assert manager.state()["tiers"][0]["encoded_blocks"] > 0
    again = model.generate(PROMPT, **call)
    status = adapter.status()
    adapter.detach()
    assert status["last_error"] == ""
    events = manager.state()["events"]
    assert sum(row["blocks"] for row in events if row["event"] == "hit") >= 7, events
    assert first.shape == again.shape
    assert manager.check() == []
