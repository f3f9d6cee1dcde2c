"""Whose KV a live model makes: its weights, its adapters, and whether either has changed since.

Fine-tuning by adapters changes weights without changing a model's name, so only content counts.  The base weights and
the adapter are told apart: a model with its adapter switched off shares KV with the plain model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig

from ...block.digest import digest128
from ...block.identity import config_fingerprint, fingerprint_directory, model_fingerprint, weights_fingerprint
from ...errors import ConfigError
from .layout import base_model

_SAMPLED_ROWS = 5
_SAMPLES = 16  # elements of each parameter that are compared before every request


def fingerprint(model: Any, model_id: str | None = None) -> str:
    """The model fingerprint of live *model*, without its adapters.

    A model loaded from a local safetensors directory is named by the directory's files if a sample of its weights says
    that it still is that model; any other is named by its live weights.  Raises ConfigError where weights cannot be
    read.
    """
    config = model_config(model)
    if model_id is not None:
        return model_fingerprint(config, "", model_id)
    weights = base_weights(model)
    directory = _directory_of(model)
    if directory is not None and _agrees(directory, config, weights):
        return fingerprint_directory(directory)
    return _of_tensors(config, weights.items())


def fingerprint_as(model: Any, dtype: torch.dtype) -> str:
    """The fingerprint that live *model* would have with its weights in *dtype* and no directory to vouch for them."""
    weights = base_weights(model)
    cast = ((name, t.to(dtype) if t.is_floating_point() else t) for name, t in weights.items())
    return _of_tensors(model_config(model), cast)


def _of_tensors(config: dict[str, Any], weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = weights_fingerprint((name, str(t.dtype), tuple(t.shape), _bytes(t)) for name, t in weights)
    return model_fingerprint(config, digest)


def model_config(model: Any) -> dict[str, Any]:
    """The configuration of *model* as its file would state it: Transformers 4 adds every default of generation."""
    ways_to_generate = GenerationConfig().to_dict()
    return {k: v for k, v in base_model(model).config.to_dict().items() if k not in ways_to_generate}


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights of *model* under the names they have without adapters around them."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if _is_adapter(name) or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type == "meta":
            raise ConfigError(f"the weights of {name} are offloaded, so they have no content to name; pass model_id")
        weights[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = tensor
    return weights


def adapter_digest(model: Any) -> str:
    """32 hex digits for the content of the LoRA adapters that are at work in *model*; empty without any.

    Adapters that are switched off count for nothing; merged ones are in the weights already.
    """
    records = []
    for path, module in model.named_modules():
        if not _is_adapted(module) or _flag(module, "disable_adapters") or _flag(module, "merged"):
            continue
        active = _active(module)
        for name, tensor in module.state_dict().items():
            if not _is_adapter(name):
                continue
            adapter = next((a for a in active or () if a in name.split(".")), None)
            if active is not None and adapter is None:
                continue
            # The name that the user gave the adapter says nothing about what it does.
            kind = ".".join(part for part in name.split(".") if part != adapter)
            scale = _scaling(module, adapter)
            place = f"{_plain_path(path)}|{kind}|{tensor.dtype}|{tuple(tensor.shape)}|{scale}"
            records.append(digest128(place.encode(), bytes(_bytes(tensor))))
    return digest128(b"lora", *sorted(records)).hex() if records else ""


class WeightWatch:
    """Notices that a model's weights or adapters are not what they were.

    Compares the address and version of every parameter, the switches of every adapter, and a few elements of every
    parameter (writing through ``.data`` leaves version and address alone).  A change so small that it misses every
    sampled element, written through ``.data``, goes unnoticed: call ``adapter.refresh()`` after such a write.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._marks = self._mark()
        self._views = _sample_views(model)
        self._samples = self._sample()

    def changed(self) -> bool:
        """Whether anything is different from when this watch began."""
        if self._mark() != self._marks:
            return True
        return not all(torch.equal(now, then) for now, then in zip(self._sample(), self._samples, strict=True))

    def _mark(self) -> list[Any]:
        marks: list[Any] = []
        for module in self._model.modules():
            for p in module._parameters.values():
                if p is not None:
                    marks.append((p.data_ptr() if p.device.type != "meta" else 0, _version(p)))
            if _is_adapted(module):
                active = _active(module)
                marks.append((_flag(module, "disable_adapters"), _flag(module, "merged"), active))
                marks.append(repr(getattr(module, "scaling", None)))
        return marks

    def _sample(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [torch.cat(views).view(torch.uint8) for views in self._views]


def _sample_views(model: Any) -> list[list[torch.Tensor]]:
    """Views of a few elements of each parameter, grouped so that each group is read by one kernel."""
    groups: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    for p in model.parameters():
        t = p.detach()
        dense = t.device.type != "meta" and t.layout == torch.strided and t.numel()
        if not dense or t.untyped_storage().nbytes() < (t.storage_offset() + t.numel()) * t.element_size():
            continue
        count = min(_SAMPLES, t.numel())
        view = t.as_strided((count,), (t.numel() // count,), t.storage_offset())
        if t.element_size() == 1:
            view = view.view(torch.uint8)  # types of one byte that cannot be concatenated
        groups.setdefault((view.dtype, view.device), []).append(view)
    return list(groups.values())


def _directory_of(model: Any) -> Path | None:
    """The local directory that *model* says it came from, if it holds safetensors."""
    name = getattr(base_model(model), "name_or_path", "") or ""
    with suppress(OSError):
        path = Path(str(name))
        if name and (path / "config.json").is_file() and _weight_files(path):
            return path
    return None


def _weight_files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        return sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _agrees(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> bool:
    """Whether the files hold the live configuration and, as far as a sample tells, the live weights."""
    try:
        stored = json.loads((directory / "config.json").read_text())
        if config_fingerprint(stored) != config_fingerprint(config):
            return False
        found = set()
        for file in _weight_files(directory):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a mapping
                    if name not in weights or not _same_sample(tensors.get_slice(name), weights[name]):
                        return False
                    found.add(weights[name].data_ptr())
        return all(tensor.data_ptr() in found for tensor in weights.values())  # a tied head is another name for one
    except Exception:  # a file that cannot be read or understood is no witness: the live weights are
        return False


def _same_sample(stored: Any, live: torch.Tensor) -> bool:
    shape = list(stored.get_shape())
    if shape != list(live.shape):
        return False
    if not shape:
        return bool(torch.equal(stored[...].to(live.dtype), live.detach().cpu()))
    last = shape[0] - 1
    rows = {last * i // max(_SAMPLED_ROWS - 1, 1) for i in range(_SAMPLED_ROWS)} if len(shape) > 1 else {0}
    wide = 1 if len(shape) > 1 else shape[0]
    return all(
        torch.equal(stored[row : row + wide].to(live.dtype), live.detach()[row : row + wide].cpu()) for row in rows
    )


def _bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor in its own order, as a buffer."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


def _is_adapted(module: Any) -> bool:
    """Whether a module carries a LoRA adapter, whoever made it."""
    return all(name in module._modules or name in module._parameters for name in ("lora_A", "lora_B"))


def _is_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _plain_path(path: str) -> str:
    return path.removeprefix("base_model.model.")


def _active(module: Any) -> list[str] | None:
    """Names of the adapters at work in *module*; None where it has one adapter without a name."""
    names = getattr(module, "active_adapters", None)
    if names is None or callable(names):
        return None
    return [names] if isinstance(names, str) else [str(name) for name in names]


def _scaling(module: Any, adapter: str | None) -> Any:
    scaling = getattr(module, "scaling", None)
    return scaling.get(adapter) if isinstance(scaling, dict) else scaling


def _flag(module: Any, name: str) -> bool:
    value = getattr(module, name, False)
    return bool(value) if not callable(value) else False


def _version(tensor: torch.Tensor) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # tensors made under inference_mode keep no version
        return -1
