"""vLLM's plugin: while a process holds a manager, the engines that it starts in child processes can be attached to.

They get a connector that sleeps until ``VLLMCacheAdapter.attach`` names its manager; an engine that is never attached
works as if it had none.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_DOORS: list[object] = []  # their directories live as long as this process
_MARK = "_kvcache_factory_prepared"


def prepare() -> None:
    """Entry point of the group ``vllm.general_plugins``; called in every process of vLLM, does its work once."""
    if "kvcache_factory.manager" not in sys.modules:  # a process without managers, such as an engine's own
        return
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.kv_transfer_config is None and _wanted():
            self.kv_transfer_config = _sleeping()
        return original(self, *args, **kwargs)

    setattr(create_engine_config, _MARK, True)
    EngineArgs.create_engine_config = create_engine_config


def _wanted() -> bool:
    from vllm import envs

    from ...manager import live_managers

    # An engine in this process needs no preparation: attach puts the connector in.
    return bool(envs.VLLM_ENABLE_V1_MULTIPROCESSING and live_managers())


def _sleeping() -> Any:
    from vllm.config import KVTransferConfig

    from .adapter import CONNECTOR
    from .control import Door

    door = Door()
    _DOORS.append(door)
    extra = {"control": str(door.path), "sleeping": True}
    return KVTransferConfig(**CONNECTOR, kv_load_failure_policy="recompute", kv_connector_extra_config=extra)
