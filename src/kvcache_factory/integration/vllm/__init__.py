"""vLLM: a KV connector for its V1 engine, and what puts it there.

Serve with ``--kv-transfer-config '{"kv_connector": "KVCacheFactoryConnector", "kv_connector_module_path":
"kvcache_factory.integration.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'``, or use
:class:`VLLMCacheAdapter` from Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import VLLMCacheAdapter
    from .connector import KVCacheFactoryConnector

__all__ = ["KVCacheFactoryConnector", "VLLMCacheAdapter"]

_HOMES = {"KVCacheFactoryConnector": "connector", "VLLMCacheAdapter": "adapter"}


def __getattr__(name: str) -> Any:  # the connector needs vLLM, the settings and plans do not
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
