"""``kvcache-factory calibrate``: a table for the calibrated codecs, from what a model makes of a text."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from ..block.fingerprint import fingerprint_directory
from ..codec import calibration
from ..codec.calibration import tables_directory
from ..codec.values import from_bf16
from ..demo.model import Progress, silent
from ..errors import ConfigError, FormatError
from ..integration.transformers.weights import fingerprint
from .reader import Reader
from .texts import chapters, windows

TOKENS = 2048
WINDOWS = 6


def turns_of(config: Any, dim: int) -> Any:
    """Radians a position of each pair of channels: that of plain RoPE.

    Models that scale theirs lose nothing but a little of the ratio: what is undone is what will be done again.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    return float(theta) ** (-np.arange(0, dim, 2) / dim)


def make_table(
    reader: Reader,
    tokenizer: Any,
    out: Path,
    *,
    text: str | None = None,
    num_windows: int = WINDOWS,
    tokens: int = TOKENS,
    model_id: str | None = None,
    progress: Progress = silent,
) -> Path:
    """Read *num_windows* windows of *tokens* tokens of *text* and write the table to the directory *out*.

    *model_id*: the name by which the model is registered instead of its content.
    """
    kvs = []
    for number, ids in enumerate(windows(tokenizer, text or chapters(1), num_windows, tokens)):
        progress(number, num_windows + 1, "reading the text to calibrate")
        kvs.append(from_bf16(reader.read(ids)))
    progress(num_windows, num_windows + 1, "principal components")
    config = reader.model.config
    name = str(getattr(config, "_name_or_path", "") or config.model_type)
    turns = turns_of(config, reader.spec.head_dim)
    return calibration.fit(kvs, turns, Path(name).name, out, fingerprint_of(reader.model, model_id))


def fingerprint_of(model: Any, model_id: str | None = None) -> str:
    """The fingerprint by which the files that *model* was loaded from, as float32 or not, are known."""
    directory = Path(str(getattr(model.config, "_name_or_path", "")))
    if model_id is None and (directory / "config.json").is_file():
        with contextlib.suppress(ConfigError):  # weights in other files than safetensors
            return fingerprint_directory(directory)
    return fingerprint(model, model_id)


def find_or_make(reader: Reader, tokenizer: Any, progress: Progress = silent) -> Path:
    """The newest table in the default directory that is the model's, or a new one."""
    wanted = (reader.spec.num_layers, reader.spec.num_kv_heads, reader.spec.head_dim)
    name = Path(str(getattr(reader.model.config, "_name_or_path", "") or reader.model.config.model_type)).name
    known = fingerprint_of(reader.model)
    files = sorted(tables_directory().glob(calibration.PATTERN), key=lambda f: -f.stat().st_mtime)
    for file in files:
        try:
            found = calibration.load(file)
        except FormatError:  # somebody else's, or half of one: that is no reason not to make a good one
            continue
        if (found.geometry, found.model) == (wanted, name) and found.fingerprint in ("", known):
            return file
    return make_table(reader, tokenizer, tables_directory(), progress=progress)
