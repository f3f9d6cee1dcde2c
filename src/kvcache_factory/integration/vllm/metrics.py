"""Counts of the connector in vLLM's own statistics and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "blocks_loaded": "Storage blocks that were loaded instead of computed.",
    "blocks_saved": "Storage blocks that were stored.",
    "loads_failed": "Requests whose blocks could not be loaded and were computed instead.",
    "prefetches_late": "Requests that stopped waiting for slower tiers.",
    "lookups_late": "Requests that stopped waiting to learn what other processes have stored.",
    "requests_not_cacheable": "Requests with embeddings or streamed input, which are not cached.",
    "errors": "Failures of the connector itself, which were answered without the cache.",
    "preemptions": "Requests that lost their blocks to others and look them up again.",
    "sessions_let_go": "Sessions that are not accounted any more, because too many others were named since.",
    "loads_declined": "Requests whose blocks were computed because that is faster.",
}
"""Names and meanings."""


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval."""

    def count(self, **amounts: int) -> None:
        """Add to the counters of these names."""
        for name, amount in amounts.items():
            if amount:
                self.data[name] = self.data.get(name, 0) + amount

    def take(self) -> ConnectorStats | None:
        """The counts so far, which start again at zero; None when there are none."""
        if self.is_empty():
            return None
        taken = ConnectorStats(data=dict(self.data))
        self.reset()
        return taken

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        self.count(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvcache_factory_<counter>_total`` for every counter and engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(f"vllm:kvcache_factory_{name}", meaning, labelnames)
            for name, meaning in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
