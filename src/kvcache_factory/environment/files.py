"""Configurations in files, TOML, YAML or JSON, and the presets that are shipped as such."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MissingDependencyError
from ..policy.names import known_policies

_PRESETS = resources.files(__package__) / "presets"


def known_presets() -> list[str]:
    """Names of the presets."""
    return sorted(Path(entry.name).stem for entry in _PRESETS.iterdir() if entry.name.endswith(".toml"))


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration in a file, or of a preset by its name, as plain data.

    A file may begin with ``preset = "..."``: what it says then replaces what the preset says.  Types of levels and
    names of policies may be written as their classes are called.  Raises ConfigError that names the file.
    """
    text = os.fspath(path)
    if text in known_presets():
        data = tomllib.loads((_PRESETS / f"{text}.toml").read_text("utf-8"))
    else:
        data = _load(Path(text))
    preset = data.pop("preset", None)
    if preset is not None:
        if preset not in known_presets():
            raise ConfigError(f"{text}: there is no preset {preset!r}; there are {', '.join(known_presets())}")
        base = read_file(preset)
        if "levels" in data:  # short for a backend, which takes the place of the preset's
            base.pop("backend", None)
        data = {**base, **data}
    return _by_their_names(data, text)


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        near = difflib.get_close_matches(str(path), known_presets(), 1) if not path.suffix else []
        hint = f"; did you mean the preset {near[0]!r}?" if near else f"; presets are {', '.join(known_presets())}"
        raise ConfigError(f"configuration {path}: {error.strerror or error}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path} is not UTF-8: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        data = _yaml(text, path)
    else:
        kind, loads = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
        try:
            data = loads(text)
        except ValueError as error:  # both decoders' errors are
            raise ConfigError(f"configuration {path} is not {kind}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"configuration {path}: must be a table of names and values, not {type(data).__name__}")
    return data


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependencyError.of("pyyaml", "yaml", f"configuration {path}") from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {path} is not YAML: {' '.join(str(error).split())}") from None


def _by_their_names(data: dict[str, Any], path: str) -> dict[str, Any]:
    """*data* with registered names in place of names of classes, and whole tables in place of bare names."""
    classes = {policy.__name__: name for name, policy in known_policies().items()}
    policy = data.get("eviction_policy")
    if isinstance(policy, str):
        policy = {"name": policy}
    if isinstance(policy, Mapping):
        name = str(policy.get("name", "lru"))
        data["eviction_policy"] = {**policy, "name": classes.get(name, name.lower())}
    levels = data.pop("levels", None)
    if levels is not None:
        if "backend" in data:
            raise ConfigError(f"configuration {path}: give backend or levels, not both")
        data["backend"] = {"type": "hierarchical", "levels": levels}
    if isinstance(data.get("backend"), Mapping):
        data["backend"] = _level(data["backend"])
    return data


def _level(level: Any) -> Any:
    if not isinstance(level, Mapping):
        return level
    kind = level.get("type")
    named = {**level, "type": kind.removesuffix("Backend").lower()} if isinstance(kind, str) else dict(level)
    if isinstance(named.get("path"), str):
        named["path"] = os.path.expanduser(named["path"])
    if isinstance(named.get("levels"), list):
        named["levels"] = [_level(inner) for inner in named["levels"]]
    return named
