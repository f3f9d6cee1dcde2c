"""Keeps KV-cache blocks alive beside the inference engine.

One door: :class:`CacheManager`.  It is given a backend (where bytes rest) and an eviction policy (who leaves), and an
adapter of :mod:`kvcache_factory.integration` connects it to an engine.  Names are resolved on first use, so importing
this package costs nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import CPUBackend, DiskBackend, GPUBackend, HierarchicalBackend, RemoteBackend
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
    from .offloading import BlockHandle, OffloadingManager
    from .policy.adaptive import AdaptivePolicy
    from .policy.arc import ARCEvictionPolicy, MQEvictionPolicy
    from .policy.base import EvictionPolicy
    from .policy.compression import CompressionPolicy
    from .policy.gre import GREEvictionPolicy
    from .policy.hybrid import HybridPolicy
    from .policy.order import FIFOEvictionPolicy, LFUEvictionPolicy, LRUEvictionPolicy, TTLEvictionPolicy
    from .policy.s3fifo import S3FIFOEvictionPolicy, SIEVEEvictionPolicy
    from .policy.scored import GDSFEvictionPolicy, HeuristicEvictionPolicy
    from .policy.size import SizeAwarePolicy
    from .session import Session, SessionSettings

__version__ = "0.1.0"

_HOMES = {
    "backend": ("CPUBackend", "DiskBackend", "GPUBackend", "HierarchicalBackend", "RemoteBackend"),
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
    "offloading": ("BlockHandle", "OffloadingManager"),
    "policy.adaptive": ("AdaptivePolicy",),
    "policy.arc": ("ARCEvictionPolicy", "MQEvictionPolicy"),
    "policy.base": ("EvictionPolicy",),
    "policy.compression": ("CompressionPolicy",),
    "policy.gre": ("GREEvictionPolicy",),
    "policy.hybrid": ("HybridPolicy",),
    "policy.order": ("FIFOEvictionPolicy", "LFUEvictionPolicy", "LRUEvictionPolicy", "TTLEvictionPolicy"),
    "policy.s3fifo": ("S3FIFOEvictionPolicy", "SIEVEEvictionPolicy"),
    "policy.scored": ("GDSFEvictionPolicy", "HeuristicEvictionPolicy"),
    "policy.size": ("SizeAwarePolicy",),
    "session": ("Session", "SessionSettings"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  the nouns first, then the errors
    "ARCEvictionPolicy",
    "AdaptivePolicy",
    "BlockHandle",
    "BlockSpec",
    "CPUBackend",
    "CacheManager",
    "CompressionPolicy",
    "DiskBackend",
    "EvictionPolicy",
    "FIFOEvictionPolicy",
    "GDSFEvictionPolicy",
    "GPUBackend",
    "GREEvictionPolicy",
    "HeuristicEvictionPolicy",
    "HierarchicalBackend",
    "HybridPolicy",
    "LFUEvictionPolicy",
    "LRUEvictionPolicy",
    "MQEvictionPolicy",
    "OffloadingManager",
    "RemoteBackend",
    "S3FIFOEvictionPolicy",
    "SIEVEEvictionPolicy",
    "Session",
    "SessionSettings",
    "SizeAwarePolicy",
    "TTLEvictionPolicy",
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
