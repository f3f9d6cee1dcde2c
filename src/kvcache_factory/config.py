"""The configuration of a manager as data: what `to_config` gives and `from_config` takes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .backend import Backend, CPUBackend
from .block.key import KEY_BUILDERS
from .block.spec import DEFAULT_BLOCK_TOKENS, storage_block_tokens
from .errors import ConfigError
from .policy.compression import CompressionPolicy
from .session.settings import SessionSettings, is_name

Integrity = Literal["off", "sample", "full"]


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An eviction policy by name, with the arguments of its constructor."""

    name: str = "lru"
    """Registered name."""
    options: dict[str, Any] = {}
    """Keyword arguments."""


class ManagerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything a CacheManager is made from."""

    backend: Backend = CPUBackend()
    """Where blocks rest."""
    eviction_policy: PolicyConfig = PolicyConfig()
    """Who leaves."""
    compression_policy: CompressionPolicy | None = None
    """When blocks are encoded, and by which codec."""
    enable_metrics: bool = False
    """Measure the time of each operation."""
    metrics_port: int | None = None
    """Port on which metrics are served; 0: any that is free, None: none is opened."""
    metrics_host: str = "127.0.0.1"
    """Address that this port is opened on."""
    name: str = "default"
    """Name of the manager in logs and metrics."""
    integrity: Integrity = "off"
    """Verify payloads in memory on load: off, sample (one block in 16), full."""
    key_builder: str = "ROLLING_HASH"
    """How keys are made: ROLLING_HASH, SIMPLE_HASH or RAW."""
    lease_max_age_s: float = 600.0
    """A request that holds blocks longer than this loses its lease."""
    io_threads: int = 0
    """Threads that copy between tiers; 0: four where one is a disk, else one."""
    sessions: SessionSettings = SessionSettings()
    """Quotas of sessions and groups of them, what happens at a quota, and how long idle sessions live."""
    block_tokens: int = 0
    """Tokens of a storage block where the adapter is told none; 0: the engine's, at least 64; -1: the engine's."""
    max_tokens: int = -1
    """Tokens of a prompt past this are neither stored nor looked up, in whole blocks; -1: no limit."""
    chunk_tokens: int = 0
    """Most tokens of a batch to or from a remote level, and of a piece of OffloadingManager.chunks; 0: see there."""
    measure_stages: bool = False
    """Measure the time of each stage of an operation, too; with enable_metrics."""
    profiling_server: str = ""
    """Address of a Pyroscope server to which profiles of this process are pushed while the manager is open."""
    record: str | None = None
    """File to which requests are recorded for the simulator, without tokens and with salted keys."""

    def __post_init__(self) -> None:
        if self.integrity not in ("off", "sample", "full"):
            raise ConfigError(f"integrity={self.integrity!r}: use 'off', 'sample' or 'full'")
        if not is_name(self.name):
            raise ConfigError(f"name={self.name!r}: give a non-empty string of Unicode text")
        if not isinstance(self.sessions, SessionSettings):
            raise ConfigError(f"sessions={self.sessions!r}: use SessionSettings, such as SessionSettings(ttl_s=3600)")
        self._check_port()
        if self.key_builder not in KEY_BUILDERS:
            raise ConfigError(f"key_builder={self.key_builder!r}: use one of {', '.join(KEY_BUILDERS)}")
        if not isinstance(self.lease_max_age_s, (int, float)) or not self.lease_max_age_s > 0:
            raise ConfigError(f"lease_max_age_s={self.lease_max_age_s!r}: give seconds above 0")
        if not isinstance(self.io_threads, int) or not 0 <= self.io_threads <= 64:
            raise ConfigError(f"io_threads={self.io_threads!r}: use 1 to 64, or 0 for what fits the backend")
        if type(self.block_tokens) is not int or self.block_tokens < -1:
            raise ConfigError(
                f"block_tokens={self.block_tokens!r}: give tokens, 0 for at least 64, -1 for the engine's"
            )
        if type(self.max_tokens) is not int or not (self.max_tokens == -1 or self.max_tokens > 0):
            raise ConfigError(f"max_tokens={self.max_tokens!r}: give tokens above 0, or -1 for no limit")
        if type(self.chunk_tokens) is not int or self.chunk_tokens < 0:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens!r}: give tokens, or 0 for 512")
        if self.profiling_server != "" and not str(self.profiling_server).startswith(("http://", "https://")):
            raise ConfigError(
                f"profiling_server={self.profiling_server!r}: give an address such as http://localhost:4040"
            )
        if self.record is not None and not (isinstance(self.record, str) and self.record):
            raise ConfigError(f"record={self.record!r}: give the path of a file, or None")

    def storage_tokens(self, engine_tokens: int = 0) -> int:
        """Tokens of a storage block beside an engine with blocks of *engine_tokens*; 0: it has none."""
        if self.block_tokens > 0:
            return self.block_tokens
        if self.block_tokens < 0 and engine_tokens:
            return engine_tokens
        return storage_block_tokens(engine_tokens or DEFAULT_BLOCK_TOKENS)

    def _check_port(self) -> None:
        port = self.metrics_port
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535):
            raise ConfigError(f"metrics_port={port!r}: use 1 to 65535, 0 for any that is free, or None to open none")
        if port is not None and not self.enable_metrics:
            raise ConfigError(f"metrics_port={port} serves metrics, which are off; set enable_metrics=True too")
        if not isinstance(self.metrics_host, str) or not self.metrics_host:
            raise ConfigError(f"metrics_host={self.metrics_host!r}: give an address such as '127.0.0.1' or '0.0.0.0'")


def parse_config(data: dict[str, Any]) -> ManagerConfig:
    """A configuration from plain data; unknown fields and wrong types are ConfigErrors that name the path."""
    try:
        return msgspec.convert(data, ManagerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration of a manager: {error}") from None


def dump_config(config: ManagerConfig) -> dict[str, Any]:
    """Plain data that :func:`parse_config` turns into an equal configuration."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    return data
