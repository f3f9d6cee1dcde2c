"""Keeps KV-cache blocks alive beside the inference engine.

One door: :class:`CacheManager`.  It is given a backend (where bytes rest) and an eviction policy (who leaves), and an
adapter of :mod:`kvcache_factory.integration` connects it to an engine.  Names are resolved on first use, so importing
this package costs nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import CPUBackend, DiskBackend, GPUBackend, HierarchicalBackend
    from .block.spec import BlockSpec
    from .errors import (
        CapacityError,
        ClosedError,
        ConfigError,
        DeviceError,
        FormatError,
        KVCacheError,
        LayoutError,
        MissingDependencyError,
        SessionError,
        SessionExistsError,
        StoreError,
        TokenError,
        UnknownSessionError,
        UnsupportedGenerationError,
    )
    from .manager import CacheManager
    from .policy.base import EvictionPolicy
    from .policy.order import FIFOEvictionPolicy, LRUEvictionPolicy
    from .session import Session

__version__ = "0.1.0"

_HOMES = {
    "backend": ("CPUBackend", "DiskBackend", "GPUBackend", "HierarchicalBackend"),
    "block.spec": ("BlockSpec",),
    "errors": (
        "CapacityError",
        "ClosedError",
        "ConfigError",
        "DeviceError",
        "FormatError",
        "KVCacheError",
        "LayoutError",
        "MissingDependencyError",
        "SessionError",
        "SessionExistsError",
        "StoreError",
        "TokenError",
        "UnknownSessionError",
        "UnsupportedGenerationError",
    ),
    "manager": ("CacheManager",),
    "policy.base": ("EvictionPolicy",),
    "policy.order": ("FIFOEvictionPolicy", "LRUEvictionPolicy"),
    "session": ("Session",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  the nouns first, then the errors
    "BlockSpec",
    "CPUBackend",
    "CacheManager",
    "DiskBackend",
    "EvictionPolicy",
    "FIFOEvictionPolicy",
    "GPUBackend",
    "HierarchicalBackend",
    "LRUEvictionPolicy",
    "Session",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "FormatError",
    "KVCacheError",
    "LayoutError",
    "MissingDependencyError",
    "SessionError",
    "SessionExistsError",
    "StoreError",
    "TokenError",
    "UnknownSessionError",
    "UnsupportedGenerationError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
