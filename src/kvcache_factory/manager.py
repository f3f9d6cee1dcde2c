"""CacheManager: the one door to the cache."""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .backend import Backend, CPUBackend
from .block.identity import Identity
from .block.key import root_key
from .block.spec import BlockSpec
from .build import build_chain, leave_notes
from .config import Integrity, ManagerConfig, PolicyConfig, dump_config, parse_config
from .context import Context
from .engine.chain import TierChain
from .engine.index import Index
from .engine.inside import INSIDE
from .engine.ledger import Ledger
from .environment import compose
from .errors import ConfigError
from .jit import warm_up_in_background
from .keyspace import KeySpace
from .memory.agreement import Agreement
from .observe.port import join_port
from .observe.state import state_of
from .policy.base import EvictionPolicy
from .policy.compression import CompressionPolicy
from .policy.order import LRUEvictionPolicy
from .registry import make_policy
from .session import Keeper, Remote, SessionBook, SessionSettings
from .session.verbs import SessionVerbs
from .store.base import SlotMemory

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_NUMBERS = itertools.count(1)
_log = logging.getLogger("kvcache_factory")
_LIVE: weakref.WeakSet[CacheManager] = weakref.WeakSet()


class CacheManager(SessionVerbs):
    """Keeps KV blocks under one budget, for the models that are registered with it.

    Constructing one is pure description: memory is allocated and threads are started when the first model is
    registered.  Everything is safe to call from several threads.

    Parameters
    ----------
    backend:
        CPUBackend (the default), GPUBackend or HierarchicalBackend.
    eviction_policy:
        Who leaves when a tier is full; the default is leaf-first LRU.
    compression_policy:
        When blocks are encoded, and by which codec; the default is never.
    enable_metrics:
        Measure the time of each operation; counts are always kept.  See :meth:`state` and :attr:`registry`.
    metrics_port:
        Port on which ``/metrics`` is served, and the page where the extra ``server`` is installed.  Managers of one
        process share it.  0: any that is free, see :attr:`metrics_address`; None: none is opened.
    metrics_host:
        Address that it is opened on; ``"0.0.0.0"`` lets other machines read it.
    name:
        Name in logs and figures.
    integrity:
        Verify payloads in memory on load: ``"off"``, ``"sample"`` (one block in 16) or ``"full"``.
    key_builder:
        ``"ROLLING_HASH"``, ``"SIMPLE_HASH"`` or ``"RAW"``.
    lease_max_age_s:
        Seconds after which a request that never ended loses its hold on blocks.
    io_threads:
        Threads that copy between tiers; 0: four where one is a disk, else one.
    sessions:
        Quotas of sessions, what happens at a quota, and how long idle sessions live; see :class:`SessionSettings`.
    block_tokens:
        Tokens of a storage block where the adapter is told none; 0: the engine's block, at least 64; -1: the engine's.
    max_tokens:
        Tokens of a prompt past this are neither stored nor looked up; rounded down to whole blocks.  -1: no limit.
    chunk_tokens:
        Most tokens of a batch to or from a remote level (0: as many as its *op_batch* blocks have), and of a piece of
        OffloadingManager.chunks (0: 512); at least four blocks.
    measure_stages:
        With *enable_metrics*, measure the time of each stage of an operation, too.
    profiling_server:
        Address of a Pyroscope server to which profiles of this process are pushed while the manager is open.
    record:
        File to which each request is appended, for ``kvcache-factory replay``: no tokens, and keys under a salt that is
        not kept.
    process_group:
        A ``torch.distributed`` process group of tensor-parallel ranks with a manager each: what a match finds is what
        every rank has, by one collective for each match.  All ranks must match the same requests in the same order.
        No part of the configuration.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        eviction_policy: EvictionPolicy | None = None,
        compression_policy: CompressionPolicy | None = None,
        enable_metrics: bool = False,
        metrics_port: int | None = None,
        *,
        metrics_host: str = "127.0.0.1",
        name: str = "default",
        integrity: Integrity = "off",
        key_builder: str = "ROLLING_HASH",
        lease_max_age_s: float = 600.0,
        io_threads: int = 0,
        sessions: SessionSettings | None = None,
        block_tokens: int = 0,
        max_tokens: int = -1,
        chunk_tokens: int = 0,
        measure_stages: bool = False,
        profiling_server: str = "",
        record: str | os.PathLike[str] | None = None,
        process_group: Any = None,
    ) -> None:
        backend = backend if backend is not None else CPUBackend()
        policy = eviction_policy if eviction_policy is not None else LRUEvictionPolicy()
        if not isinstance(backend, Backend):
            raise ConfigError(
                f"backend={backend!r}: use CPUBackend(), GPUBackend() or HierarchicalBackend(levels=[...])"
            )
        if not isinstance(policy, EvictionPolicy):
            raise ConfigError(f"eviction_policy={policy!r}: use an EvictionPolicy, such as LRUEvictionPolicy()")
        if compression_policy is not None and not isinstance(compression_policy, CompressionPolicy):
            raise ConfigError(f"compression_policy={compression_policy!r}: use CompressionPolicy, or leave it None")
        self.policy = policy
        self.config = ManagerConfig(
            backend=backend,
            eviction_policy=PolicyConfig(policy.name, policy.options()),
            compression_policy=compression_policy,
            enable_metrics=enable_metrics,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            name=name,
            integrity=integrity,
            key_builder=key_builder,
            lease_max_age_s=lease_max_age_s,
            io_threads=io_threads,
            sessions=sessions if sessions is not None else SessionSettings(),
            block_tokens=block_tokens,
            max_tokens=max_tokens,
            chunk_tokens=chunk_tokens,
            measure_stages=measure_stages,
            profiling_server=profiling_server,
            record=os.fspath(record) if isinstance(record, os.PathLike) else record,
        )
        self._assemble(process_group)
        self._port = join_port(self, metrics_host, metrics_port) if metrics_port is not None else None
        _LIVE.add(self)

    def _assemble(self, process_group: Any) -> None:
        """Put together what the configuration describes; nothing is allocated yet."""
        self._number = next(_NUMBERS)
        self._sessions = SessionBook(self.config.sessions, time.monotonic)
        self._ledger = Ledger(timed=self.config.enable_metrics)
        # The chain outlives this object only until its threads have ended, so it must not refer back to it.
        failures = _Failures()
        self._chain = build_chain(self.config, self.policy, self._ledger, failures)
        self.config.sessions.check_tiers([tier.name for tier in self._chain.tiers])
        self._keeper = Keeper(self.config.name, self._sessions, self._chain)
        self._context = Context(self.config, self._chain, self._ledger, self._keeper, self._number)
        self._later = self._context
        self._context.scorer = self.policy.scorer
        self._context.agreement = Agreement(process_group) if process_group is not None else None
        failures.context = self._context
        self._finalizer = weakref.finalize(self, _close, self._chain, self._context)
        self._remotes = self._keeper.remotes
        self._registry: CollectorRegistry | None = None

    # -- configuration ------------------------------------------------------------------------------------------------

    def to_config(self) -> dict[str, Any]:
        """This manager's description as plain data, for JSON or TOML."""
        return dump_config(self.config)

    @classmethod
    def from_config(cls, data: dict[str, Any]) -> CacheManager:
        """A manager from what :meth:`to_config` gave; a ConfigError names the path of what is wrong."""
        return cls._made(parse_config(data), {})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> CacheManager:
        """A manager as ``AIBRIX_KV_CACHE_OL_*`` variables describe it, of the process unless *environ* is given.

        *overrides* win: arguments of the constructor, or variables without the prefix in lower case
        (``l1_cache_capacity_gb=4``).  What is not said is as documented: 10 GiB of DRAM, S3FIFO, the engine's block.
        Raises ConfigError naming variable, value and what is allowed.
        """
        return cls._made(*compose(environ, None, overrides))

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], environ: Mapping[str, str] | None = None, **overrides: Any
    ) -> CacheManager:
        """A manager as a TOML or YAML file describes it, or a preset by its name (``"low_latency_chat"``).

        The file says what :meth:`to_config` says.  Variables of the environment win over it, as in :meth:`from_env`
        (``environ={}`` leaves them out), and *overrides* over both.  Raises ConfigError naming file and field.
        """
        return cls._made(*compose(environ, path, overrides))

    @classmethod
    def _made(cls, config: ManagerConfig, arguments: Mapping[str, Any]) -> CacheManager:
        described = {name: getattr(config, name) for name in config.__struct_fields__} | dict(arguments)
        policy = described["eviction_policy"]
        if isinstance(policy, PolicyConfig):
            described["eviction_policy"] = make_policy(policy.name, **policy.options)
        return cls(**described)

    def __repr__(self) -> str:
        return f"CacheManager(backend={self.config.backend!r}, eviction_policy={self.policy!r})"

    # -- models -------------------------------------------------------------------------------------------------------

    def register(self, spec: BlockSpec, identity: Identity) -> KeySpace:
        """Open the manager for a model and return its key space.

        Raises ConfigError when spec and identity disagree, the geometry differs from an earlier model's, or a
        calibration is another model's, CapacityError when not one block fits, DeviceError when a device is not there,
        StoreError when a store cannot be used, and MissingDependencyError when what the configuration needs is not
        installed.
        """
        if (identity.block_tokens, identity.kv_dtype) != (spec.block_tokens, spec.dtype.value):
            raise ConfigError(
                f"the identity says {identity.block_tokens} tokens of {identity.kv_dtype} a block, the spec says "
                f"{spec.block_tokens} tokens of {spec.dtype.value}; make both from the same model"
            )
        self._chain.open(spec)
        self._chain.check_model(identity.model)
        self._keeper.opened()
        self._context.begin_recording(spec.block_tokens)
        self._context.begin_profiling()
        with self._context.guarded("note"):
            leave_notes(self.config.backend, identity)
        warm_up_in_background()
        self._chain.finding.forget_idle_roots()
        # Roots are negative, so that they cannot be taken for rows; -1 means "no parent" and is nobody's.
        root = self._chain.roots.number(root_key(identity, self.config.key_builder), identity.digest, known=True)
        return KeySpace(self._context, spec, identity, root, owner=self)

    @property
    def first_index(self) -> Index:
        """The index of the first tier: for benchmarks and simulations, which enter blocks without moving bytes."""
        return self._chain.tiers[0].index

    @property
    def first_slots(self) -> SlotMemory:
        """Memory of the first tier, for engines whose own process or thread copies; a model must be registered."""
        return self._chain.tiers[0].slots

    @property
    def payload_offset(self) -> int:
        """Bytes from the start of a slot of the first tier to its payload."""
        return self._chain.tiers[0].payload_offset

    # -- running it ---------------------------------------------------------------------------------------------------

    def evict(self, blocks: int, tier: str | None = None) -> int:
        """Let up to *blocks* blocks leave a tier, the first unless named, by policy; returns how many did.

        ConfigError when there is no such tier.
        """
        number = self._chain.number_of(tier) if tier is not None else 0
        with INSIDE:
            evicted = self._chain.evict(blocks, number) if self._chain.is_open else 0
        return evicted + sum(remote.call("evict", blocks, tier) or 0 for remote in self._remotes)

    def drop_tier(self, tier: str) -> int:
        """Drop every block of a tier, by its name in :meth:`state`; returns how many.  Copies in other tiers stay.

        ConfigError when there is no such tier.
        """
        number = self._chain.number_of(tier)
        with INSIDE:
            dropped = self._chain.drop_tier(number) if self._chain.is_open else 0
        return dropped + sum(remote.call("drop_tier", tier) or 0 for remote in self._remotes)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for background copies; False when *timeout* seconds were not enough."""
        self._context.catch_up()
        there = [remote.call("wait", timeout) for remote in self._remotes]
        return self._chain.wait(timeout) and False not in there

    def refresh(self) -> None:
        """Learn now what other processes have stored in shared levels; look-ups also start this by themselves."""
        if self._chain.is_open:
            self._chain.refresh()

    def reset(self) -> None:
        """Drop every block and every session's references and history; session ids stay valid."""
        with INSIDE:
            self._keeper.reset()
            self._chain.clear("reset")
        for remote in self._remotes:
            remote.call("reset")

    def check(self) -> list[str]:
        """Violated invariants, as sentences; empty when all is well."""
        there = [sentence for remote in self._remotes for sentence in remote.call("check") or ()]
        return [*self._chain.check(), *self._keeper.check(), *there]

    def state(self) -> dict[str, Any]:
        """What is held and what has happened, as plain data."""
        self._context.catch_up()
        self._keeper.expire_if_due()
        return {
            **state_of(self.config, self._chain, self._ledger, self._keeper),
            "bypassed": self._context.bypassed,
            "engines": [remote.call("state") for remote in self._remotes],
        }

    @property
    def ledger(self) -> Ledger:
        """Where everything is counted."""
        return self._ledger

    @property
    def registry(self) -> CollectorRegistry:
        """A registry of prometheus_client with this manager's metrics only, for a server that you have already."""
        if self._registry is None:
            from .observe.metrics import registry_of

            self._registry = registry_of(self)
        return self._registry

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port on which metrics are served; None where no port was asked for."""
        return self._port.address if self._port is not None else None

    def follow(self, remote: Remote) -> None:
        """Make this manager a client of one in another process: what is done to sessions here is done there, too."""
        self._keeper.follow(remote)

    def bypass(self, on: bool = True) -> None:
        """Make the cache vanish without touching the engine, or come back: what it holds stays, nothing is served.

        Requests that were promised blocks before still get them.
        """
        self._context.bypassed = bool(on)
        for remote in self._remotes:
            remote.call("bypass", bool(on))

    def close(self) -> None:
        """Stop intake, finish background work, free all memory, leave the port; idempotent."""
        if self._port is not None:
            self._port.leave(self)
        self._finalizer()

    def __enter__(self) -> CacheManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(chain: TierChain, context: Context) -> None:
    chain.close()
    context.end_recording()
    context.end_profiling()


class _Failures:
    """Hands the failures of background jobs to the context, which is made after the chain."""

    context: Context | None = None

    def __call__(self, error: Exception) -> None:
        if self.context is not None:
            self.context.failed("background", error)


def live_managers() -> list[CacheManager]:
    """The managers of this process that somebody holds."""
    return list(_LIVE)


def _disown() -> None:
    """In a forked child, where no thread of a manager lives and its files are still used by the parent."""
    for manager in live_managers():
        manager._finalizer.detach()
        manager._port = None
        manager._chain.disown()


os.register_at_fork(after_in_child=_disown)
