"""From a configuration to tiers: the only place that knows stores, policies and the engine together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from .backend import (
    DEFAULT_SIZE_GB,
    GIB,
    Backend,
    CPUBackend,
    DiskBackend,
    GPUBackend,
    HierarchicalBackend,
    Level,
    RemoteBackend,
    levels_of,
)
from .block.identity import Identity
from .cluster.opening import open_cluster
from .codec.aesgcm import AesGcm
from .codec.base import BlockCodec
from .codec.calibration import tables_directory
from .codec.coder import Coder
from .codec.keys import load_key
from .codec.layers import Layers
from .codec.names import make_codec, parse_codec
from .config import ManagerConfig
from .connector.base import Connector, ConnectorConfig
from .connector.names import check_name, create_connector
from .engine.chain import TierChain
from .engine.compressing import CompressionRule
from .engine.flow import FlowSettings
from .engine.lasting import LastingTier
from .engine.ledger import Ledger
from .engine.packed import PackedTier
from .engine.remote import RemoteLevel, RemoteOptions
from .engine.roots import Roots
from .engine.tier import Ingestion, Tier
from .engine.transit import TRANSIT_BYTES
from .errors import CapacityError, ConfigError
from .policy.base import EvictionPolicy
from .policy.compression import CompressionPolicy
from .policy.placement import check_placement, compresses, policy_at, size_cap_gb, swap_level
from .store.disk import DiskStore
from .store.disk.identities import leave_note
from .store.memory import MemoryStore
from .store.remote import RemoteSettings, RemoteStore

STAGED_BATCHES = 8
"""Batches for which a staging level has room at least."""

_KINDS = {CPUBackend: "cpu", GPUBackend: "gpu", DiskBackend: "disk"}


def build_chain(
    config: ManagerConfig,
    policy: EvictionPolicy,
    ledger: Ledger,
    on_error: Callable[[Exception], None],
) -> TierChain:
    """Unopened tiers for *config*; nothing is allocated until the first model is registered."""
    levels = levels_of(config.backend)
    outside = levels.pop() if isinstance(levels[-1], RemoteBackend) else None
    kinds = [_KINDS[type(level)] for level in levels]
    check_placement(policy, kinds)
    budgets = level_budgets(levels, size_cap_gb(policy, None), [size_cap_gb(policy, kind) for kind in kinds])
    roots = Roots()
    compression = config.compression_policy
    codings = [coding_of(level, kind, compression, policy) for level, kind in zip(levels, kinds, strict=True)]
    packed = any(codec and kind != "disk" for (codec, _), kind in zip(codings, kinds, strict=True))
    if packed and isinstance(outside, RemoteBackend) and outside.ingestion == "evicted":
        raise ConfigError(
            "RemoteBackend(ingestion='evicted') takes blocks out of whole slots while the engine waits, so that memory "
            "above it cannot be encoded; use ingestion 'all' or 'hot', or CompressionPolicy(tiers=('disk', 'remote'))"
        )
    places = [tables_directory()]
    tiers = [
        _tier(name, level, policy_at(policy, kind), budget, ledger, roots, coding, places)
        for name, level, kind, budget, coding in zip(_names(kinds), levels, kinds, budgets, codings, strict=True)
    ]
    for number, tier in enumerate(tiers):
        tier.swap_to = swap_level(policy, number, kinds)
    flow = FlowSettings(
        integrity=config.integrity,
        lease_max_age_s=config.lease_max_age_s,
        io_threads=config.io_threads or _io_threads(levels),
        measure_stages=config.enable_metrics and config.measure_stages,
    )
    if isinstance(config.backend, HierarchicalBackend):
        marks = config.backend
        flow = msgspec.structs.replace(flow, demote_at=marks.demote_at, demote_to=marks.demote_to)
    remote = None
    if isinstance(outside, RemoteBackend):
        remote = _remote(outside, config, policy, ledger, roots, on_error)
        tiers[0].least_blocks = STAGED_BATCHES * outside.op_batch
    return TierChain(tiers, flow, roots, ledger, time.monotonic, on_error, remote=remote)


def _remote(
    level: RemoteBackend,
    config: ManagerConfig,
    policy: EvictionPolicy,
    ledger: Ledger,
    roots: Roots,
    on_error: Callable[[Exception], None],
) -> RemoteLevel:
    check_name(level.connector)
    settings = RemoteSettings(name=level.connector, op_batch=level.op_batch, workers=level.workers)
    options = RemoteOptions(
        namespace=level.namespace,
        builder=config.key_builder,
        ingestion=Ingestion(level.ingestion),
        hot_hits=level.hot_hits,
        op_batch=level.op_batch,
        chunk_tokens=config.chunk_tokens,
        per_token_timeout_s=level.per_token_timeout_ms / 1000,
        max_wait_s=level.max_wait_s,
        max_inflight_tokens=level.max_inflight_tokens,
        workers=level.workers,
        double_get_blocks=level.double_get_blocks,
        double_get_ratio=level.double_get_ratio,
        strict_sync=level.strict_sync,
    )
    codec, rule = coding_of(level, "remote", config.compression_policy, policy)
    coder = Coder(codec, [tables_directory()])
    store = RemoteStore(partial(_connector, level), settings)
    return RemoteLevel(store, options, ledger, roots, on_error, coder=coder, rule=rule)


def _connector(level: RemoteBackend, executor: Executor) -> Connector[bytes, Any]:
    config = ConnectorConfig(level.connector, level.namespace, "0", executor)
    if level.meta_service is not None:
        return open_cluster(config, level.options, level.meta_service)
    return create_connector(config, level.options)


def _tier(
    name: str,
    level: Level,
    policy: EvictionPolicy,
    budget: int,
    ledger: Ledger,
    roots: Roots,
    coding: tuple[BlockCodec | None, CompressionRule],
    places: Sequence[Path],
) -> Tier:
    codec, rule = coding
    if isinstance(level, DiskBackend):
        store = DiskStore(level.path, budget, level.segment_mb << 20, direct=level.direct, encoded=codec is not None)
        tier = LastingTier(name, store, policy, budget, ledger, time.monotonic, roots)
        tier.ingestion = Ingestion(level.ingestion)
        tier.hot_hits = level.hot_hits
        tier.coder, tier.rule = Coder(codec, [Path(level.path), *places]), rule
        if level.is_encrypted:
            tier.codec = AesGcm(partial(load_key, level.key_file, level.key_env))
        return tier
    if codec is not None:
        packed = PackedTier(name, _memory_store(level), policy, budget, ledger, time.monotonic)
        packed.coder, packed.rule = Coder(codec, places), rule
        return packed
    made = Tier(name, _memory_store(level), policy, budget, ledger, time.monotonic)
    made.is_staging = isinstance(level, CPUBackend) and level.staging
    return made


def _memory_store(level: Level) -> MemoryStore:
    if isinstance(level, CPUBackend):
        return MemoryStore(None, level.huge_pages, level.shared)
    assert isinstance(level, GPUBackend), "a remote level is no tier"
    return MemoryStore(level.device)


def coding_of(
    level: Level, kind: str, policy: CompressionPolicy | None, eviction: EvictionPolicy
) -> tuple[BlockCodec | None, CompressionRule]:
    """What a level encodes by, and which blocks; ConfigError for an unknown codec or a wrong parameter."""
    if isinstance(level, CPUBackend) and level.staging:
        return None, CompressionRule()
    if isinstance(level, (DiskBackend, RemoteBackend)) and level.codec is not None:
        return parse_codec(level.codec), CompressionRule(behind_tokens=level.keep_recent)
    when_full = compresses(eviction, kind)
    if policy is None and when_full:
        policy = CompressionPolicy()
    if policy is None or not policy.applies_to(kind):
        return None, CompressionRule()
    rule = CompressionRule(
        keep_first=policy.keep_first,
        behind_tokens=max(policy.threshold_step, policy.keep_recent),
        min_age_s=policy.min_age_s,
        max_hits=policy.max_hits,
        when_full=when_full,
    )
    codec = make_codec(policy.method, **policy.options)
    if policy.layers is not None:
        codec = Layers(first=policy.layers[0], end=policy.layers[1], inside=codec)
    return codec, rule


def leave_notes(backend: Backend, identity: Identity) -> None:
    """Write down in each directory of *backend* whose blocks those of *identity* are, for people; raises OSError."""
    for level in levels_of(backend):
        if isinstance(level, DiskBackend):
            leave_note(Path(level.path), identity)


def _io_threads(levels: Sequence[Level]) -> int:
    """Four threads reach what a disk can do; between memories, one is enough."""
    return 4 if any(isinstance(level, DiskBackend) for level in levels) else 1


def level_budgets(levels: Sequence[Level], max_size_gb: float | None, caps_gb: Sequence[float | None]) -> list[int]:
    """Bytes of each level: its own size, at most its cap; those in memory have at most *max_size_gb* GiB together."""
    left = float("inf") if max_size_gb is None else max_size_gb * GIB
    budgets = []
    for level, cap_gb in zip(levels, caps_gb, strict=True):
        assert not isinstance(level, RemoteBackend), "a remote level has no budget here"
        if isinstance(level, CPUBackend) and level.staging and level.size_gb is None:
            budgets.append(TRANSIT_BYTES)
            continue
        caps = [cap for cap in (cap_gb, max_size_gb) if cap is not None]
        wanted = (level.size_gb if level.size_gb is not None else min(caps, default=DEFAULT_SIZE_GB)) * GIB
        if cap_gb is not None:
            wanted = min(wanted, cap_gb * GIB)
        if isinstance(level, DiskBackend):
            budgets.append(int(wanted))
            continue
        budgets.append(int(min(wanted, left)))
        left -= budgets[-1]
    if min(budgets) <= 0:
        raise CapacityError(
            f"the policy's max_size_gb={max_size_gb} is used up by the faster levels and leaves none for level "
            f"{budgets.index(min(budgets))}; raise it, or shrink the levels before"
        )
    return budgets


def _names(kinds: Sequence[str]) -> list[str]:
    names: list[str] = []
    for kind in kinds:
        same = sum(name.startswith(kind) for name in names)
        names.append(f"{kind}{same}" if same else kind)
    return names
