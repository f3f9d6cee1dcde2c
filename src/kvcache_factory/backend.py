"""Backends: descriptions of where blocks rest.  Constructing one allocates nothing and calls no device."""

from __future__ import annotations

import os
import re
from typing import Any, Literal

import msgspec

from .cluster.opening import MetaServiceBackend
from .errors import CapacityError, ConfigError

GIB = 1 << 30
MOST_GB = 10**15
"""A number that can still be turned into bytes; what a machine has, is found out when a level opens."""
DEFAULT_SIZE_GB = 10.0
"""Size in GiB where neither the backend nor the policy gives one."""


class CPUBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cpu", kw_only=True):
    """Host DRAM, allocated by this process and pre-faulted in the background."""

    size_gb: float | None = None
    """Capacity in GiB, overhead included; None: the policy's ``max_size_gb``, else 10."""
    huge_pages: bool = True
    """Ask the system for huge pages."""
    shared: bool = False
    """Let other processes map the memory, as engines with worker processes need; no huge pages then."""
    staging: bool = False
    """No cache but room in which blocks pass to and from a RemoteBackend: 64 MiB, or what is needed for its batches."""

    def __post_init__(self) -> None:
        _check_size("CPUBackend", self.size_gb)

    def __repr__(self) -> str:
        return f"CPUBackend(size_gb={self.size_gb})"


class GPUBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gpu", kw_only=True):
    """Memory of a torch device; ``"cpu"`` works too."""

    device: str = "cuda:0"
    """Name of the torch device."""
    size_gb: float | None = None
    """Capacity in GiB, overhead included; None: the policy's ``max_size_gb``, else 10."""

    def __post_init__(self) -> None:
        _check_size("GPUBackend", self.size_gb)
        if not isinstance(self.device, str) or not self.device:
            raise ConfigError(f"GPUBackend(device={self.device!r}): give the name of a torch device, such as 'cuda:0'")

    def __repr__(self) -> str:
        return f"GPUBackend(device={self.device!r}, size_gb={self.size_gb})"


class DiskBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="disk"):
    """A directory of slot images that outlasts the process and may be shared by several; a level below memory."""

    path: str
    """Directory; made when it is not there, and refused when somebody else's files are in it."""
    size_gb: float = DEFAULT_SIZE_GB
    """Capacity in GiB of the whole directory, all processes and earlier runs together."""
    segment_mb: int = 256
    """Size in MiB of one file of slots; the capacity must hold at least one."""
    ingestion: Literal["all", "hot", "evicted"] = "all"
    """When a block of the level above is written: when it is stored, when it has been hit often, or when it leaves."""
    hot_hits: int = 2
    """Hits that make a block hot."""
    direct: Literal["auto", "never"] = "auto"
    """Bypass the page cache (O_DIRECT) where a probe finds that it works, or never."""
    key_file: str | None = None
    """Encrypt with the key in this file, which only its owner can read: 32 bytes, or 64 hex digits."""
    key_env: str | None = None
    """Encrypt with the key in the environment variable of this name."""
    codec: str | None = None
    """Encode blocks on their way to the disk: ``"bf16x"``, ``"int8"``, ``"pca:step=0.5,table=FILE"``, and so on."""
    keep_recent: int = 64
    """Tokens at the end of a chain that *codec*, if it is lossy, leaves exact until others are appended; >= 0."""

    def __post_init__(self) -> None:
        if self.size_gb is None:
            raise CapacityError("DiskBackend(size_gb=None): a directory has no default size; give one in GiB above 0")
        _check_size("DiskBackend", self.size_gb)
        if not isinstance(self.path, (str, os.PathLike)) or not str(self.path) or "\0" in str(self.path):
            raise ConfigError(f"DiskBackend(path={self.path!r}): give the path of a directory")
        msgspec.structs.force_setattr(self, "path", os.fspath(self.path))
        if not isinstance(self.segment_mb, int) or not 1 <= self.segment_mb <= 4096:
            raise ConfigError(f"DiskBackend(segment_mb={self.segment_mb!r}): use 1 to 4096")
        if self.size_gb * 1024 < self.segment_mb:
            raise CapacityError(
                f"DiskBackend(size_gb={self.size_gb}) is smaller than one segment of {self.segment_mb} MiB; give at "
                f"least {self.segment_mb / 1024} GiB, or a smaller segment_mb"
            )
        if self.ingestion not in ("all", "hot", "evicted"):
            raise ConfigError(f"DiskBackend(ingestion={self.ingestion!r}): use 'all', 'hot' or 'evicted'")
        if not isinstance(self.hot_hits, int) or self.hot_hits < 1:
            raise ConfigError(f"DiskBackend(hot_hits={self.hot_hits!r}): use 1 or more")
        if not _is_count(self.keep_recent, 0):
            raise ConfigError(f"DiskBackend(keep_recent={self.keep_recent!r}): give tokens, 0 or more")
        if self.direct not in ("auto", "never"):
            raise ConfigError(f"DiskBackend(direct={self.direct!r}): use 'auto' or 'never'")
        self._check_key_place()

    @property
    def is_encrypted(self) -> bool:
        """Whether blocks are encrypted before they are written."""
        return self.key_file is not None or self.key_env is not None

    def _check_key_place(self) -> None:
        """No message repeats what was given: somebody may have given the key itself."""
        if self.key_file is not None and self.key_env is not None:
            raise ConfigError("DiskBackend: give key_file or key_env, not both")
        for name in ("key_file", "key_env"):
            place = getattr(self, name)
            place = os.fspath(place) if isinstance(place, os.PathLike) and name == "key_file" else place
            if place is not None and (not isinstance(place, str) or re.fullmatch(r"|[0-9a-fA-F]{32,}", place)):
                raise ConfigError(f"DiskBackend: {name} is where the key is, not the key: a path, or a variable's name")
            msgspec.structs.force_setattr(self, name, place)
        if self.key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.key_env):
            raise ConfigError("DiskBackend: key_env is no name of an environment variable")

    def __repr__(self) -> str:
        return f"DiskBackend({self.path!r}, size_gb={self.size_gb})"


class RemoteBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="remote", kw_only=True):
    """A store elsewhere, reached by a connector and shared by engines; the last level, below memory."""

    connector: str
    """Name of the connector, such as ``"REDIS"``, or ``"module:Class"``."""
    options: dict[str, Any] = {}
    """The connector's own options."""
    namespace: str = "aibrix"
    """First part of the name of every block there."""
    ingestion: Literal["all", "hot", "evicted"] = "hot"
    """When a block of the memory above is written: when it is stored, when it has been hit, or when it leaves."""
    hot_hits: int = 1
    """Hits that make a block hot."""
    op_batch: int = 32
    """Blocks of one batch."""
    per_token_timeout_ms: float = 20.0
    """Deadline of an operation: its tokens times this, in milliseconds, at most *max_wait_s*."""
    max_wait_s: float = 2.0
    """Longest deadline of an operation, in seconds."""
    max_inflight_tokens: int = 0
    """Tokens that may wait to be written or be on their way; 0: a batch for each worker, while the rest waits."""
    workers: int = 8
    """Batches on their way at once, and threads for clients that block."""
    double_get_blocks: int = 4
    """Fewest missing blocks for which it is asked."""
    double_get_ratio: float = 0.1
    """Least share of missing blocks (0..1) for which it is asked."""
    meta_service: MetaServiceBackend | None = None
    """Where the servers are listed, when there are several; they share the keys."""
    strict_sync: bool = False
    """Let whoever stores a block wait until it is written, within the deadline."""
    codec: str | None = None
    """Encode blocks on their way there, as ``DiskBackend.codec`` does; needs a connector that takes shorter values."""
    keep_recent: int = 64
    """Tokens at the end of a chain that stay exact, as ``DiskBackend.keep_recent``."""

    def __post_init__(self) -> None:
        allowed = {
            "connector": (isinstance(self.connector, str) and self.connector, "the name of a connector"),
            "namespace": (isinstance(self.namespace, str) and self.namespace, "a name that is not empty"),
            "ingestion": (self.ingestion in ("all", "hot", "evicted"), "'all', 'hot' or 'evicted'"),
            "hot_hits": (_is_count(self.hot_hits, 1), "1 or more"),
            "op_batch": (_is_count(self.op_batch, 1, 4096), "1 to 4096"),
            "per_token_timeout_ms": (_is_number(self.per_token_timeout_ms, above=0), "milliseconds above 0"),
            "max_wait_s": (_is_number(self.max_wait_s, above=0), "seconds above 0"),
            "max_inflight_tokens": (_is_count(self.max_inflight_tokens, 0), "0 or more"),
            "workers": (_is_count(self.workers, 1, 256), "1 to 256"),
            "double_get_blocks": (_is_count(self.double_get_blocks, 0), "0 or more"),
            "keep_recent": (_is_count(self.keep_recent, 0), "0 tokens or more"),
            "codec": (self.codec is None or isinstance(self.codec, str), "the name of a codec"),
            "double_get_ratio": (_is_number(self.double_get_ratio) and 0 <= self.double_get_ratio <= 1, "0 to 1"),
        }
        for name, (right, what) in allowed.items():
            if not right:
                raise ConfigError(f"RemoteBackend({name}={getattr(self, name)!r}): use {what}")

    def __repr__(self) -> str:
        return f"RemoteBackend({self.connector!r}, ingestion={self.ingestion!r})"  # options may hold secrets


def _is_number(value: object, above: float = float("-inf")) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > above


def _is_count(value: object, least: int, most: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


Level = CPUBackend | GPUBackend | DiskBackend | RemoteBackend


class HierarchicalBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hierarchical"):
    """Several levels, the fastest first.

    What is saved goes to the first level and is copied down in the background; a block leaves a level by policy, and
    moves up again when it is used.
    """

    levels: list[Level]
    demote_at: float = 0.95
    """Fill of a level (0..1) at which blocks begin to leave it in the background."""
    demote_to: float = 0.9
    """Fill (0..1) at which that ends."""

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError("HierarchicalBackend(levels=[]): give at least one level, the fastest first")
        for level in self.levels:
            if not isinstance(level, Level):
                raise ConfigError(
                    f"HierarchicalBackend: {type(level).__name__} cannot be a level; use GPUBackend, CPUBackend, "
                    "DiskBackend or RemoteBackend"
                )
        if isinstance(self.levels[0], DiskBackend):
            raise ConfigError("HierarchicalBackend: a DiskBackend cannot be the first level; put a CPUBackend first")
        self._check_remote()
        paths = [os.path.realpath(level.path) for level in self.levels if isinstance(level, DiskBackend)]
        if len(set(paths)) < len(paths):
            raise ConfigError("HierarchicalBackend: two levels name the same directory; give each one of its own")
        if not 0 < self.demote_to <= self.demote_at <= 1:
            raise ConfigError(
                f"HierarchicalBackend: 0 < demote_to <= demote_at <= 1 does not hold for demote_to={self.demote_to}, "
                f"demote_at={self.demote_at}"
            )

    def _check_remote(self) -> None:
        remotes = [number for number, level in enumerate(self.levels) if isinstance(level, RemoteBackend)]
        staging = [level for level in self.levels if isinstance(level, CPUBackend) and level.staging]
        if remotes and (remotes != [len(self.levels) - 1] or not remotes[0]):
            raise ConfigError("HierarchicalBackend: a RemoteBackend must be the last level, with memory above it")
        if not staging:
            return
        remote = self.levels[-1]
        if len(self.levels) != 2 or not isinstance(remote, RemoteBackend) or not isinstance(self.levels[0], CPUBackend):
            raise ConfigError("CPUBackend(staging=True) goes with nothing but a RemoteBackend below it")
        if remote.ingestion != "all":
            raise ConfigError(
                f"RemoteBackend(ingestion={remote.ingestion!r}) needs memory that is a cache, in which blocks can be "
                "hot and which they can leave; use 'all', or CPUBackend without staging"
            )


Backend = CPUBackend | GPUBackend | DiskBackend | RemoteBackend | HierarchicalBackend


def levels_of(backend: Backend) -> list[Level]:
    """The levels of any backend, the fastest first."""
    if isinstance(backend, HierarchicalBackend):
        return list(backend.levels)
    if isinstance(backend, DiskBackend):
        raise ConfigError(
            "a DiskBackend needs memory above it: HierarchicalBackend(levels=[CPUBackend(size_gb=4), DiskBackend(...)])"
        )
    if isinstance(backend, RemoteBackend) or (isinstance(backend, CPUBackend) and backend.staging):
        raise ConfigError(
            "a RemoteBackend needs memory above it: HierarchicalBackend(levels=[CPUBackend(size_gb=4), "
            "RemoteBackend(...)]), or CPUBackend(staging=True) there for no cache in memory"
        )
    return [backend]


def _check_size(name: str, size_gb: float | None) -> None:
    if size_gb is None:
        return
    if isinstance(size_gb, bool) or not isinstance(size_gb, (int, float)) or not 0 < size_gb <= MOST_GB:
        raise CapacityError(f"{name}(size_gb={size_gb!r}): give a size in GiB above 0 and of at most {MOST_GB}")
