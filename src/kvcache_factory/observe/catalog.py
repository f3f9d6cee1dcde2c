"""Every metric: its name, kind, labels and meaning.  ``docs/metrics.md`` is compared with this list."""

from __future__ import annotations

from typing import Literal, NamedTuple

PREFIX = "kvcache_factory_"


class Metric(NamedTuple):
    """One family of series; all have the label ``manager`` too."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str


COUNTERS = {
    "reusable_tokens": ((), "History tokens of requests that have ended: in whole blocks that had been seen before."),
    "served_tokens": ((), "Of the reusable tokens, those that were given to the engine: prefill that was saved."),
    "recomputed_tokens": (("reason",), "The other reusable tokens: chosen, not_loaded or gone."),
    "lookup_blocks": (("tier", "result"), "Blocks that requests asked for, by result: hit or miss."),
    "lookup_tokens": (("tier", "result"), "The same in tokens."),
    "missed_blocks": (("tier", "reason"), "Blocks that were asked for and not found, by reason."),
    "loaded_blocks": (("tier",), "Blocks that were copied to an engine."),
    "loaded_bytes": (("tier",), "The same in bytes."),
    "load_failed_blocks": (("tier", "reason"), "Blocks that were found and could not be loaded, by reason."),
    "corrupt_blocks": (("tier", "reason"), "Of these, blocks that were not what their record says."),
    "stored_blocks": (("tier",), "Blocks that came to the tier."),
    "stored_bytes": (("tier",), "The same in bytes."),
    "found_blocks": (("tier",), "Blocks that were there from earlier runs or from other processes."),
    "duplicate_blocks": (("tier",), "Blocks that were to be saved and were there already."),
    "not_stored_blocks": (("tier", "reason"), "Blocks that were to be stored and were not, by reason."),
    "admissions_refused_blocks": (("tier",), "Of these, blocks that the policy did not admit."),
    "evicted_blocks": (("tier", "policy", "reason"), "Blocks that left by policy: kept_below, capacity, ..."),
    "evicted_unused_blocks": (("tier",), "Of these, blocks that no request had found in this tier."),
    "dropped_blocks": (("tier", "reason"), "Blocks that left for another reason."),
    "moved_blocks": (("tier", "direction"), "Blocks that came from another tier: demoted or promoted."),
    "encoded_blocks": (("tier", "codec"), "Blocks that were written by way of a codec."),
    "store_errors": (("tier", "reason"), "Failures of a store, by reason, such as eio, gone or short_read."),
    "errors": (("operation",), "Failures of the cache itself, which were answered as misses."),
    "leases_expired": ((), "Requests that lost their hold on blocks because of their age."),
    "load_decisions": (("decision",), "Loads weighed against computing: load, recompute or explore."),
    "work_predicted_seconds": (("kind",), "Predicted time of loads and prefills that were measured."),
    "work_actual_seconds": (("kind",), "What these took."),
}
GAUGES = {
    "hit_ratio": ((), "Served by reusable tokens since the start; no series before the first."),
    "tier_hit_ratio": (("tier",), "Hits by blocks asked for since the start; no series before the first."),
    "hits_per_second": ((), "Blocks that requests found, a second, between the last two readings."),
    "up": ((), "Whether the manager is open: a model is registered and it is not closed."),
    "bypassed": ((), "Whether the cache is bypassed."),
    "tier_capacity_bytes": (("tier", "policy"), "Budget of the tier."),
    "tier_used_bytes": (("tier",), "Bytes of the blocks in the tier, overhead included."),
    "tier_blocks": (("tier",), "Blocks in the tier."),
    "tier_prefaulted_ratio": (("tier",), "Share of the tier's memory that has been touched."),
    "fragmentation_bytes": (("tier", "slot_bytes"), "Bytes of slots of a size that hold no payload."),
    "codec_ratio": (("tier", "codec"), "Bytes of a block before the codec by bytes stored."),
    "codec_error_ratio": (("tier", "codec"), "Largest relative error that the codec has made; exact ones make none."),
    "breaker_open": (("tier", "breaker"), "1 while a kind of work is not tried because it has failed."),
    "device_memory_bytes": (("device",), "Memory in use on the device of a tier, by everything in this process."),
    "device_memory_peak_bytes": (("device",), "The most that it has been."),
    "io_running_jobs": ((), "Background jobs at work."),
    "io_queued_jobs": (("lane",), "Background jobs that wait: load, store, or remote."),
    "remote_running_operations": (("tier",), "Batches on their way to or from a remote level."),
    "remote_member_up": (("tier", "member"), "Whether a server of a cluster is in use: 0 while its keys are misses."),
    "remote_member_slots": (("tier", "member"), "Slots of keys that belong to it."),
    "abandoned_read_blocks": ((), "Blocks whose reads nobody waits for any more, but which have not ended."),
    "leases": ((), "Requests that hold blocks."),
    "sessions": ((), "Sessions."),
    "session_mean_bytes": ((), "Bytes of the blocks that a session references, on average."),
}
HISTOGRAMS = {
    "operation_duration_seconds": (("tier", "operation"), "Time of operations, with enable_metrics=True."),
    "lock_wait_seconds": (("tier",), "Time that threads waited for the index of a tier, when they had to wait."),
    "first_token_seconds": ((), "Time from a request's coming to its first token, where the adapter sees it."),
}

CATALOG: dict[str, Metric] = {
    **{f"{PREFIX}{name}_total": Metric("counter", *entry) for name, entry in COUNTERS.items()},
    **{PREFIX + name: Metric("gauge", *entry) for name, entry in GAUGES.items()},
    **{PREFIX + name: Metric("histogram", *entry) for name, entry in HISTOGRAMS.items()},
}
"""All metrics by the name under which they are exported."""
