"""Whose KV an engine computes: the model it loaded, and the adapter and salt of one request."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...block.fingerprint import fingerprint_directory, model_fingerprint
from ...block.identity import Identity
from ...errors import ConfigError
from ...keyspace import KeySpace
from ...manager import CacheManager
from .geometry import Geometry
from .settings import Settings

MAX_SPACES = 256
"""Adapters and salts whose key spaces are remembered; the oldest is made again when it comes back."""

_CHUNK = 4 << 20


def model_name(vllm_config: Any, settings: Settings) -> str:
    """Fingerprint of the engine's model: its configuration as it runs, and its weights.

    Raises ConfigError where the weights are not safetensors in a local directory and no ``model_id`` is given.
    """
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    if settings.model_id:
        return _variant(model_fingerprint(config, "", settings.model_id), model)
    directory = _directory(model)
    if directory is None:
        raise ConfigError(
            f"the weights of {model.model!r} are not in a local directory, so that they have no fingerprint; set "
            "model_id in kv_connector_extra_config to a name that changes whenever the weights do"
        )
    return _variant(fingerprint_directory(directory, config=config), model)


def _variant(fingerprint: str, model: Any) -> str:
    """Weights that are quantised while they are loaded give other KV under the same files."""
    return f"{fingerprint}+{model.quantization}" if model.quantization else fingerprint


def _directory(model: Any) -> Path | None:
    path = Path(model.model)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception:  # whatever the hub's library says: there is no directory
        return None


class Spaces:
    """The key spaces of one engine: one for each adapter and salt that its requests come with."""

    def __init__(self, manager: CacheManager, geometry: Geometry, settings: Settings, model: str, scales: str) -> None:
        self._manager = manager
        self._geometry = geometry
        self._settings = settings
        self._model = model
        self._scales = scales
        self._epoch = ""
        self._known: OrderedDict[tuple[str, str], KeySpace] = OrderedDict()
        self._adapters: dict[tuple[str, tuple[int, ...]], str] = {}

    @property
    def plain(self) -> KeySpace:
        """The space of requests without adapter and salt."""
        return self.get("", "")

    def of(self, request: Any) -> KeySpace:
        """The space of a vLLM request."""
        lora = self._adapter(request.lora_request) if request.lora_request is not None else ""
        return self.get(lora, request.cache_salt or "")

    def get(self, lora: str, salt: str) -> KeySpace:
        """The space of this adapter digest and salt."""
        space = self._known.get((lora, salt))
        if space is None:
            spec = self._geometry.spec
            identity = Identity(
                model=self._model,
                kv_dtype=spec.dtype.value,
                block_tokens=spec.block_tokens,
                kv_scales=self._scales,
                lora=lora,
                salt=salt,
                namespace=self._settings.namespace + self._epoch,
            )
            space = self._known[lora, salt] = self._manager.register(spec, identity)
            if len(self._known) > MAX_SPACES:
                self._known.popitem(last=False)
        self._known.move_to_end((lora, salt))
        return space

    def turn_page(self, name: str) -> None:
        """Never find again what was stored until now: the weights behind the same fingerprint may have changed."""
        self._epoch = f"+{name}"
        self._known.clear()

    def _adapter(self, lora: Any) -> str:
        from vllm.lora.utils import get_adapter_absolute_path

        files = sorted(path for path in Path(get_adapter_absolute_path(lora.lora_path)).iterdir() if path.is_file())
        stamp = tuple(value for path in files for value in _stamp(path))
        key = (str(lora.lora_path), stamp)
        if key not in self._adapters:
            if len(self._adapters) >= MAX_SPACES:
                self._adapters.clear()
            self._adapters[key] = _content(files)
        return self._adapters[key]


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _content(files: list[Path]) -> str:
    """Cryptographic digest of an adapter's files: strangers may have uploaded them."""
    digest = hashlib.blake2b(b"lora directory", digest_size=16)
    for path in files:
        if path.suffix in (".safetensors", ".bin", ".pt") or path.name == "adapter_config.json":
            digest.update(len(path.name).to_bytes(4, "little") + path.name.encode())
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            _feed(path, digest.update)
    return digest.hexdigest()


def _feed(path: Path, take: Callable[[bytes], None]) -> None:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            take(chunk)
