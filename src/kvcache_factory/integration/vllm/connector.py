"""The class that vLLM loads: it hands each hook to the side that this process plays."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...errors import KVCacheError
from .control import Server
from .metrics import ConnectorStats, PromMetrics
from .plans import Nothing, StepPlan, StepReport
from .remote import handlers
from .scheduler import SchedulerSide
from .settings import Settings, read_settings
from .worker import WorkerSide

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvcache_factory.integration")


class KVCacheFactoryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps KV blocks of vLLM's V1 engine in DRAM and on disk, under the keys that every engine shares.

    Loads and saves are synchronous copies in the worker, around the forward; what is slower than DRAM is fetched to
    DRAM while the request waits.  Raises LayoutError for models whose KV cannot be restored exactly, and ConfigError
    for settings that cannot work.
    """

    _cache_hit_source = CacheHitSource.HOST
    counted = True
    """Whether vLLM's loggers take statistics of this class; those of an engine that was made without it cannot."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._server: Server | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._open_scheduler(settings)
        else:
            self._open_worker(settings)

    def _open_scheduler(self, settings: Settings) -> None:
        if not settings.sleeping:
            self.wake(settings)
        if settings.control and settings.attached_pid != os.getpid():
            self._server = Server(settings.control, handlers(self, settings))
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            _log.warning(
                "vLLM: a block that cannot be loaded ends its request with an error; add "
                '"kv_load_failure_policy": "recompute" to --kv-transfer-config to have it computed instead'
            )

    def _open_worker(self, settings: Settings) -> None:
        try:
            self._worker = WorkerSide(self._vllm_config, self._kv_cache_config, settings)
        except KVCacheError:
            if not settings.sleeping:
                raise  # an engine that nobody attaches must not notice; attach says what is wrong

    def wake(self, settings: Settings) -> None:
        """Begin to serve, by a manager that *settings* name."""
        self._scheduler = SchedulerSide(self._vllm_config, self._kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later."""
        return False

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side; only in the scheduler's role, and awake."""
        assert self._scheduler is not None, "a worker's connector, or nobody has attached a manager"
        return self._scheduler

    @property
    def awake(self) -> bool:
        """Whether this is the scheduler's connector and has a manager."""
        return self._scheduler is not None

    @property
    def worker(self) -> WorkerSide:
        """The worker's side; only in a worker's role."""
        assert self._worker is not None, "this is the scheduler's connector"
        return self._worker

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        side = self._scheduler or self._worker
        if side is not None:
            side.close()

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self._scheduler is None:
            return {}
        fetched = self._scheduler.fetched_tokens(request, num_external_tokens)
        sources = {CacheHitSource.HOST: num_external_tokens - fetched, CacheHitSource.DISK: fetched}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing() if self._scheduler is None else self._scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None:
            self._scheduler.step_ended(report if isinstance(report, StepReport) else StepReport())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self._scheduler is None else self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        return True if self._scheduler is None else self._scheduler.reset()

    # -- worker -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata()
        if self._worker is not None and isinstance(plan, StepPlan):
            self._worker.load(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads have ended before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the forward."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> StepReport | None:
        if self._worker is None:
            return None
        # With drafts vLLM asks before it calls wait_for_save; the KV of known tokens is complete by then.
        self._worker.save()
        return self._worker.report()

    # -- statistics ---------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        return self._scheduler.stats.take() if self._scheduler is not None and self.counted else None

    def take_events(self) -> list[Any]:
        events = self._scheduler.events if self._scheduler is not None else None
        return events.take() if events is not None else []

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
