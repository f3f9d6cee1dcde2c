"""Settings of the connector: engine's extra configuration, environment, file, defaults, in this order."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...backend import Backend, CPUBackend, DiskBackend, GPUBackend, HierarchicalBackend, Level, levels_of
from ...config import ManagerConfig, PolicyConfig
from ...environment import PREFIX, compose
from ...errors import ConfigError

ENV_PREFIX = "KVCACHE_FACTORY_"
FROM_ENV = (
    "memory_gb", "disk_path", "disk_gb", "namespace", "model_id", "block_tokens", "load_decision", "config_file",
)  # fmt: skip
"""Settings that a variable of the environment can give: the prefix and the name in capitals."""

_OF_MANAGER = {
    "memory_gb",
    "disk_path",
    "disk_gb",
    "eviction_policy",
    "integrity",
    "lease_max_age_s",
    "manager",
    "attached",
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``kv_connector_extra_config`` can hold."""

    memory_gb: float = 4.0
    """DRAM in GiB."""
    disk_path: str = ""
    """Directory that keeps blocks across runs and is shared between engines; none without."""
    disk_gb: float = 10.0
    """Capacity of that directory in GiB."""
    block_tokens: int = 0
    """Tokens of a storage block; 0: the engine's block, at least 64; -1: the engine's block."""
    namespace: str = "default"
    """Keeps deployments apart that share a store."""
    model_id: str = ""
    """A name to vouch for instead of the fingerprint of configuration and weights."""
    load_decision: Literal["auto", "always", "never"] = "auto"
    """Load when it is faster than computing, always, or never."""
    max_wait_s: float = 2.0
    """Longest time that a request waits for blocks from slower tiers."""
    lookup_wait_s: float = 0.05
    """Longest time that a request waits to learn what other processes have stored."""
    ask_again_s: float = 0.05
    """Longest time in one go that an engine without other work waits for them."""
    eviction_policy: PolicyConfig = PolicyConfig()
    """Who leaves when a tier is full."""
    integrity: Literal["off", "sample", "full"] = "off"
    """Verify payloads in memory on load."""
    lease_max_age_s: float = 600.0
    """A request that holds blocks longer than this loses its lease."""
    config_file: str = ""
    """A TOML file with these settings."""
    manager: ManagerConfig | None = None
    """A whole manager; sizes, disk and policy above are not read then."""
    attached: int = 0
    """Number of a manager that was handed over in process *attached_pid*."""
    attached_pid: int = 0
    """That process."""
    control: str = ""
    """Socket on which the process that started the engine asks for sessions and figures."""
    sleeping: bool = False
    """Do nothing until that process names a manager."""

    def __post_init__(self) -> None:
        for name in ("memory_gb", "disk_gb", "max_wait_s", "lookup_wait_s", "ask_again_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: give a number that is not negative")
        if self.block_tokens < -1:
            raise ConfigError(f"block_tokens={self.block_tokens}: give the tokens of a storage block, 0 or -1")

    def manager_config(self, shared: bool) -> ManagerConfig:
        """The manager to make; *shared*: its memory must be reachable from other processes."""
        if self.manager is not None:
            return msgspec.structs.replace(self.manager, backend=_reachable(self.manager.backend, shared))
        levels: list[Level] = [CPUBackend(size_gb=self.memory_gb, shared=shared)]
        if self.disk_path:
            segment = max(min(256, int(self.disk_gb * 1024) // 4), 1)
            levels.append(DiskBackend(self.disk_path, size_gb=self.disk_gb, segment_mb=segment))
        return ManagerConfig(
            backend=HierarchicalBackend(levels) if len(levels) > 1 else levels[0],
            eviction_policy=self.eviction_policy,
            name="vllm",
            integrity=self.integrity,
            lease_max_age_s=self.lease_max_age_s,
        )


def read_settings(extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from an engine's extra configuration; what it does not say, the environment and a file may.

    Where neither of them describes a manager, ``AIBRIX_KV_CACHE_OL_*`` variables may.  Raises ConfigError that names
    the setting for unknown names and wrong values.
    """
    names = {field.name for field in msgspec.structs.fields(Settings)}
    given = {
        name: environment[ENV_PREFIX + name.upper()] for name in FROM_ENV if environment.get(ENV_PREFIX + name.upper())
    }
    merged = {**given, **extra}
    path = str(merged.get("config_file", ""))
    from_file = _read_file(path) if path else {}
    unknown = sorted((set(extra) | set(from_file)) - names)
    if unknown:
        raise ConfigError(
            f"unknown settings of KVCacheFactoryConnector: {', '.join(unknown)}; there are {sorted(names)}"
        )
    if not _OF_MANAGER & {*from_file, *merged} and any(name.startswith(PREFIX) for name in environment):
        merged["manager"] = compose(environment)[0]
    try:
        settings = msgspec.convert({**from_file, **merged}, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of KVCacheFactoryConnector: {error}") from None
    if settings.manager is not None and not settings.block_tokens:
        settings = msgspec.structs.replace(settings, block_tokens=settings.manager.block_tokens)
    return settings


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config_file: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config_file {path} is not TOML: {error}") from None
    table = content.get("vllm", content)
    if not isinstance(table, dict):
        raise ConfigError(f"config_file {path}: [vllm] must be a table")
    return table


def _reachable(backend: Backend, shared: bool) -> Backend:
    """*backend* with a first level that the engine's worker processes can map."""
    if not shared:
        return backend
    first, *others = levels_of(backend)
    if isinstance(first, GPUBackend):  # a device tier cannot be mapped by another process; DRAM takes its place
        first = CPUBackend(size_gb=first.size_gb, shared=True)
    elif isinstance(first, CPUBackend):
        first = msgspec.structs.replace(first, shared=True)
    if isinstance(backend, HierarchicalBackend):
        return msgspec.structs.replace(backend, levels=[first, *others])
    return first
