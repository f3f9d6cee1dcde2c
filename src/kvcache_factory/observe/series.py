"""From the state of a manager to the series of the catalog."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from ..engine.ledger import MANAGER

ALL = "all"
"""The value of the label ``tier`` for what belongs to no tier."""
CORRUPT = (
    "checksum",
    "payload_checksum",
    "identity",
    "key",
    "record_differs",
    "layout",
    "codec",
    "not_authentic",
    "header_",
)
"""Reasons, or their beginnings, for which a block is not what its record says."""


class Series(NamedTuple):
    """One value of the family ``kvcache_factory_<name>``; labels without the manager's."""

    name: str
    labels: tuple[str, ...]
    value: float
    buckets: list[tuple[str, float]] | None = None


class Rate(Protocol):
    """Turns a count into how fast it grows."""

    def of(self, count: int) -> float: ...


def series_of(state: Mapping[str, Any], rate: Rate) -> Iterator[Series]:
    """All series of one manager."""
    policies = {tier["tier"]: str(tier["policy"]) for tier in state["tiers"]}
    for row in [*_zeros(state), *state["events"]]:
        yield from _event(row, state["block_tokens"], policies)
    yield from _ratios(state)
    yield Series("hits_per_second", (), rate.of(_blocks(state, MANAGER, "hit")))
    devices: set[str] = set()
    for tier in state["tiers"]:
        yield from _tier(tier, state)
        if "device" in tier and tier["device"] not in devices:  # several tiers may be on one
            devices.add(tier["device"])
            yield Series("device_memory_bytes", (tier["device"],), tier["device_bytes"])
            yield Series("device_memory_peak_bytes", (tier["device"],), tier["device_peak_bytes"])
    yield from _manager(state)
    for row in state["durations"]:
        yield _duration(row, state["bounds_s"])
    for row in state["comparisons"]:
        yield Series("work_predicted_seconds_total", (row["kind"],), row["predicted_s"])
        yield Series("work_actual_seconds_total", (row["kind"],), row["actual_s"])


_BY_TIER = {  # event → families of blocks and of bytes
    "loaded": ("loaded_blocks_total", "loaded_bytes_total"),
    "stored": ("stored_blocks_total", "stored_bytes_total"),
    "found": ("found_blocks_total", ""),
    "duplicate": ("duplicate_blocks_total", ""),
    "unused": ("evicted_unused_blocks_total", ""),
}
_BY_REASON = {
    "miss": "missed_blocks_total",
    "load_failed": "load_failed_blocks_total",
    "not_stored": "not_stored_blocks_total",
    "dropped": "dropped_blocks_total",
    "encoded": "encoded_blocks_total",
}


def _zeros(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What has not happened yet: a rate can only be taken of a series that is there."""
    known = {(row["tier"], row["event"], row["reason"]) for row in state["events"]}
    wanted = [(MANAGER, event, "") for event in ("reusable", "served", "lease_expired")]
    for tier in state["tiers"]:
        wanted += [(tier["tier"], event, "") for event in _BY_TIER]
        wanted += [(tier["tier"], "not_stored", "not_admitted"), (tier["tier"], "evicted", "capacity")]
    for tier, event, reason in wanted:
        if (tier, event, reason) not in known:
            yield {"tier": tier, "event": event, "reason": reason, "times": 0, "blocks": 0, "bytes": 0}


def _event(row: Mapping[str, Any], block_tokens: int, policies: Mapping[str, str]) -> Iterator[Series]:
    event, reason, blocks = row["event"], row["reason"], row["blocks"]
    tier = ALL if row["tier"] == MANAGER else row["tier"]
    if event in _BY_TIER:
        in_blocks, in_bytes = _BY_TIER[event]
        yield Series(in_blocks, (tier,), blocks)
        if in_bytes:
            yield Series(in_bytes, (tier,), row["bytes"])
    elif event in _BY_REASON:
        yield Series(_BY_REASON[event], (tier, reason or "unknown"), blocks)
        if event == "load_failed" and reason.startswith(CORRUPT):
            yield Series("corrupt_blocks_total", (tier, reason), blocks)
        if event == "not_stored" and reason == "not_admitted":
            yield Series("admissions_refused_blocks_total", (tier,), blocks)
    elif event == "evicted":
        yield Series("evicted_blocks_total", (tier, policies.get(tier, ""), reason), blocks)
    elif event in ("demoted", "promoted"):
        yield Series("moved_blocks_total", (tier, event), blocks)
    elif event == "store_error" or (event == "error" and tier != ALL):
        yield Series("store_errors_total", (tier, reason), blocks)
    elif event == "error":
        yield Series("errors_total", (reason,), row["times"])
    elif event == "lease_expired":
        yield Series("leases_expired_total", (), row["times"])
    elif event == "decided":
        yield Series("load_decisions_total", (reason,), row["times"])
    elif event in ("reusable", "served"):
        yield Series(f"{event}_tokens_total", (), blocks * block_tokens)
    elif event == "recomputed":
        yield Series("recomputed_tokens_total", (reason,), blocks * block_tokens)


def _blocks(state: Mapping[str, Any], tier: str, event: str) -> int:
    return sum(row["blocks"] for row in state["events"] if (row["tier"], row["event"]) == (tier, event))


def _ratios(state: Mapping[str, Any]) -> Iterator[Series]:
    if state["hit_rate"] is not None:
        yield Series("hit_ratio", (), state["hit_rate"])
    remote = state.get("remote")
    for name in (MANAGER, *(tier["tier"] for tier in state["tiers"]), *([remote["tier"]] if remote else ())):
        hit, miss = _blocks(state, name, "hit"), _blocks(state, name, "miss")
        label = ALL if name == MANAGER else name
        for result, blocks in (("hit", hit), ("miss", miss)):
            yield Series("lookup_blocks_total", (label, result), blocks)
            yield Series("lookup_tokens_total", (label, result), blocks * state["block_tokens"])
        if hit + miss:
            yield Series("tier_hit_ratio", (label,), hit / (hit + miss))


def _tier(tier: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[Series]:
    name = tier["tier"]
    yield Series("tier_capacity_bytes", (name, tier["policy"]), tier["budget_bytes"])
    yield Series("tier_used_bytes", (name,), tier["held_bytes"])
    yield Series("tier_blocks", (name,), tier["held_blocks"])
    yield Series("tier_prefaulted_ratio", (name,), tier["prefaulted"])
    for size, lost in tier.get("fragmentation", {}).items():
        yield Series("fragmentation_bytes", (name, str(size)), lost)
    for breaker, is_open in tier.get("breakers", {}).items():
        yield Series("breaker_open", (name, breaker), is_open)
    yield from _codecs(tier, state)


def _codecs(tier: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[Series]:
    name = tier["tier"]
    for row in state["events"]:
        if (row["tier"], row["event"]) == (name, "encoded") and row["bytes"]:
            yield Series("codec_ratio", (name, row["reason"]), row["blocks"] * tier["payload_bytes"] / row["bytes"])
    for row in state["worst"]:
        codec = str(row["name"]).removeprefix("codec_error_")
        if row["tier"] == name and codec != row["name"]:
            yield Series("codec_error_ratio", (name, codec), row["value"])


def _manager(state: Mapping[str, Any]) -> Iterator[Series]:
    sessions = state["sessions"]
    yield Series("up", (), state["open"])
    yield Series("bypassed", (), state["bypassed"])
    yield Series("leases", (), state["leases"])
    yield Series("sessions", (), len(sessions))
    mean = sum(row["bytes"] for row in sessions) / len(sessions) if sessions else 0.0
    yield Series("session_mean_bytes", (), mean)
    yield Series("io_running_jobs", (), state["io"]["running"])
    yield Series("abandoned_read_blocks", (), state["io"]["abandoned_reads"])
    remote = state.get("remote")
    if remote:
        for breaker, is_open in breakers_of(remote).items():
            yield Series("breaker_open", (remote["tier"], breaker), is_open)
        yield Series("remote_running_operations", (remote["tier"],), remote.get("operations_in_flight", 0))
        yield Series("io_queued_jobs", ("remote",), remote["waiting_jobs"])
        for row in remote.get("members", ()):
            yield Series("remote_member_up", (remote["tier"], row["member"]), row["usable"])
            yield Series("remote_member_slots", (remote["tier"], row["member"]), row["slots"])
    for lane in ("load", "store"):
        yield Series("io_queued_jobs", (lane,), state["io"][f"{lane}_queue"])


def breakers_of(remote: Mapping[str, Any]) -> dict[str, bool]:
    """By kind of work, whether a remote level is not asked for the moment."""
    return {"calls": remote.get("breaker") == "open", "abandoned": bool(remote.get("out_of_service"))}


def _duration(row: Mapping[str, Any], bounds_s: list[float]) -> Series:
    tier = ALL if row["tier"] == MANAGER else row["tier"]
    buckets, count = [], 0
    for bound, fallen in zip([*map(_bound, bounds_s), "+Inf"], row["buckets"], strict=True):
        count += fallen
        buckets.append((bound, float(count)))
    operation = row["operation"]
    if operation == "first_token":
        return Series("first_token_seconds", (), row["sum_s"], buckets)
    if operation == "lock_wait":
        return Series("lock_wait_seconds", (tier,), row["sum_s"], buckets)
    return Series("operation_duration_seconds", (tier, operation), row["sum_s"], buckets)


def _bound(seconds: float) -> str:
    return repr(float(f"{seconds:g}"))
