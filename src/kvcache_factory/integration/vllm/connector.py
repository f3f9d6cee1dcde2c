"""The class that vLLM loads: it hands each hook to the side that this process plays."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .metrics import ConnectorStats, PromMetrics
from .plans import StepPlan, StepReport
from .scheduler import SchedulerSide
from .settings import read_settings
from .worker import WorkerSide

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvcache_factory.integration")


class KVCacheFactoryConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Keeps KV blocks of vLLM's V1 engine in DRAM and on disk, under the keys that every engine shares.

    Loads and saves are synchronous copies in the worker, around the forward; what is slower than DRAM is fetched to
    DRAM while the request waits.  Raises LayoutError for models whose KV cannot be restored exactly, and ConfigError
    for settings that cannot work.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, settings)
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                _log.warning(
                    "vLLM: a block that cannot be loaded ends its request with an error; add "
                    '"kv_load_failure_policy": "recompute" to --kv-transfer-config to have it computed instead'
                )
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later."""
        return False

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side; only in the scheduler's role."""
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The worker's side; only in a worker's role."""
        assert self._worker is not None, "this is the scheduler's connector"
        return self._worker

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.close()

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self.scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self.scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        self.scheduler.step_ended(report if isinstance(report, StepReport) else None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finished(request)

    def reset_cache(self) -> bool:
        return self.scheduler.reset()

    # -- worker -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        self.worker.load(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads have ended before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the forward."""

    def wait_for_save(self) -> None:
        self.worker.save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        # With drafts vLLM asks before it calls wait_for_save; the KV of known tokens is complete by then.
        self.worker.save()
        return self.worker.report()

    # -- statistics ---------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        return self._scheduler.stats.take() if self._scheduler is not None else None

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
