"""Backends: descriptions of where blocks rest.  Constructing one allocates nothing and calls no device."""

from __future__ import annotations

import msgspec

from .errors import CapacityError, ConfigError

GIB = 1 << 30
DEFAULT_SIZE_GB = 10.0
"""Size in GiB where neither the backend nor the policy gives one."""


class CPUBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cpu", kw_only=True):
    """Host DRAM, allocated by this process and pre-faulted in the background."""

    size_gb: float | None = None
    """Capacity in GiB, overhead included; None: the policy's ``max_size_gb``, else 10."""
    huge_pages: bool = True
    """Ask the system for huge pages."""

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


Level = CPUBackend | GPUBackend


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
                    f"HierarchicalBackend: {type(level).__name__} cannot be a level; use CPUBackend or GPUBackend"
                )
        if not 0 < self.demote_to <= self.demote_at <= 1:
            raise ConfigError(
                f"HierarchicalBackend: 0 < demote_to <= demote_at <= 1 does not hold for demote_to={self.demote_to}, "
                f"demote_at={self.demote_at}"
            )


Backend = CPUBackend | GPUBackend | HierarchicalBackend


def levels_of(backend: Backend) -> list[Level]:
    """The levels of any backend, the fastest first."""
    return list(backend.levels) if isinstance(backend, HierarchicalBackend) else [backend]


def _check_size(name: str, size_gb: float | None) -> None:
    if size_gb is None:
        return
    if isinstance(size_gb, bool) or not isinstance(size_gb, (int, float)) or not 0 < size_gb < float("inf"):
        raise CapacityError(f"{name}(size_gb={size_gb!r}): give a size in GiB above 0")
