"""Finding the connector of an engine, or putting one into an engine that was made without."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...config import dump_config
from ...errors import ConfigError
from .control import Client
from .owner import hand_over
from .settings import Settings

if TYPE_CHECKING:
    from ...manager import CacheManager

WAKE_TIMEOUT_S = 300.0
"""Time for the engine's process to read the weights for their fingerprint, and to allocate."""

_HELP = (
    "make the engine with EngineArgs(**VLLMCacheAdapter.engine_args(manager, model=...)), or serve with "
    '--kv-transfer-config \'{"kv_connector": "KVCacheFactoryConnector", "kv_connector_module_path": '
    '"kvcache_factory.integration.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}\''
)


def core_of(engine: Any) -> Any:
    """The engine core where it runs in this process, None where it does not; ConfigError for what is no engine."""
    client = getattr(engine, "engine_core", None)
    if client is None:
        raise ConfigError(f"{type(engine).__name__} is not a vLLM LLMEngine or LLM; {_HELP}")
    core = getattr(client, "engine_core", None)
    return core if hasattr(core, "scheduler") else None


def bind(core: Any, manager: CacheManager) -> None:
    """Make sure that *manager* is behind the engine core, which runs in this process."""
    from .connector import KVCacheFactoryConnector

    connector = core.scheduler.connector
    if connector is None:
        _install(core, manager)
    elif not isinstance(connector, KVCacheFactoryConnector):
        raise ConfigError(f"this engine has another KV connector, {type(connector).__name__}; {_HELP}")
    elif not connector.awake:
        connector.wake(Settings(attached=hand_over(manager), attached_pid=os.getpid()))
    elif connector.scheduler.owner.manager is not manager:
        raise ConfigError(f"this engine was made with another manager; attach that one, or {_HELP}")


def bind_remote(engine: Any, manager: CacheManager) -> None:
    """Let the engine's process serve by a manager like *manager*, which becomes its client."""
    transfer = engine.vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    if transfer is None or transfer.kv_connector != "KVCacheFactoryConnector" or not extra.get("control"):
        raise ConfigError(f"this engine runs in another process and was made without a manager; {_HELP}")
    client = Client(extra["control"])
    client.wait_until_there()
    client.ask("attach", dump_config(manager.config), timeout=WAKE_TIMEOUT_S)
    manager.follow(client)


def _install(core: Any, manager: CacheManager) -> None:
    """Put a connector into a live engine: what vLLM does while it starts, in the same order."""
    from vllm.distributed.kv_transfer import kv_transfer_state as state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from .adapter import VLLMCacheAdapter
    from .connector import KVCacheFactoryConnector

    config, scheduler = core.vllm_config, core.scheduler
    worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    runner = getattr(worker, "model_runner", None)
    if runner is None or config.parallel_config.world_size != 1:
        raise ConfigError(f"this engine's workers run in other processes and were made without this cache; {_HELP}")
    if scheduler.has_unfinished_requests():
        raise ConfigError("this engine has requests at work; attach before the first one, or when all have ended")
    transfer = VLLMCacheAdapter.engine_args(manager, model="")["kv_transfer_config"]
    before, config.kv_transfer_config = config.kv_transfer_config, transfer
    try:
        workers = KVCacheFactoryConnector(config, KVConnectorRole.WORKER, scheduler.kv_cache_config)
        workers.register_kv_caches(_tensors(config, workers.worker.geometry.layers))
        connector = KVCacheFactoryConnector(config, KVConnectorRole.SCHEDULER, scheduler.kv_cache_config)
    except BaseException:
        config.kv_transfer_config = before
        raise
    state._KV_CONNECTOR_AGENT = workers
    connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
    scheduler.recompute_kv_load_failures = True
    if scheduler.log_stats:
        from vllm.v1.metrics.stats import PrefixCacheStats

        scheduler.connector_prefix_cache_stats = PrefixCacheStats()
    connector.counted = False
    scheduler.connector = connector


def _tensors(config: Any, layers: tuple[str, ...]) -> dict[str, Any]:
    context = config.compilation_config.static_forward_context
    return {name: context[name].kv_cache for name in layers}
