"""Whole blocks in the order of the attention that they receive: let go for good, or moved to a slower tier.

Both begin with what ``rank_blocks`` tells the cache: the share of the last queries' attention, over all layers and
heads, that each block got.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from ..backend import GIB, CPUBackend, DiskBackend, HierarchicalBackend
from ..block.identity import Identity
from ..errors import ConfigError
from ..integration.transformers.layout import cache_argument
from ..integration.transformers.observing import AttentionMass
from ..integration.transformers.pruned import PrunedCache
from ..keyspace import KeySpace
from ..manager import CacheManager
from ..memory.region import SequenceRegion
from ..policy.importance import attention
from ..policy.scored import HeuristicEvictionPolicy
from .blocks import Coded
from .reader import KV, PrunedKV, Reader, cache_of

_QUERIES = 64
DROP, DEMOTE = "drop_blocks", "demote_blocks"


class Placing(msgspec.Struct, frozen=True):
    """What happens to all but the share *keep* of the blocks: they are dropped, or demoted to a disk."""

    name: str
    keep: float = 0.5

    @classmethod
    def parse(cls, text: str) -> Placing:
        """Of ``name`` or ``name:keep=0.25``; ConfigError for anything else."""
        name, _, rest = text.partition(":")
        key, _, value = rest.partition("=")
        try:
            keep = float(value) if rest else 0.5
        except ValueError:
            keep = 0.0
        if (rest and key.strip() != "keep") or not 0 < keep <= 1:
            raise ConfigError(f"{text!r}: {name.strip()} takes keep=, above 0 and at most 1")
        return cls(name.strip(), keep)


class Prefix(Protocol):
    """Tokens, and their KV."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def kv(self) -> KV: ...


def ranks(reader: Reader, prefix: Prefix) -> Any:
    """Importance 0 to 1 of each block of *prefix*, ``float64 [blocks]``: its last queries are computed once more."""
    head = len(prefix.ids) - _QUERIES
    cache = cache_of(prefix.kv[:, :, :, :head])
    arguments = {"input_ids": torch.tensor([prefix.ids[head:]]), cache_argument(reader.model): cache}
    observer = AttentionMass(reader.model, cache, _QUERIES, len(prefix.ids))
    with torch.inference_mode(), observer:
        reader.model(use_cache=True, **arguments)
    assert observer.mass is not None
    return attention(observer.mass[0].numpy(), reader.spec.block_tokens)


def drop(reader: Reader, prefix: Prefix, keep: float) -> Coded:
    """*prefix* without the blocks that its last queries looked at least; the first and the last stay in any case."""
    n = reader.spec.block_tokens
    order = ranks(reader, prefix)
    order[[0, -1]] = np.inf
    blocks = np.sort(np.argsort(-order, kind="stable")[: max(round(keep * len(order)), 2)])
    tokens = (blocks[:, None] * n + np.arange(n)).ravel()
    tokens = np.concatenate([tokens, np.arange(len(order) * n, len(prefix.ids))])
    cache = PrunedCache.over(cache_of(prefix.kv))
    index = torch.from_numpy(tokens)[None, None].expand(1, reader.spec.num_kv_heads, -1)
    for layer in cache.layers:
        layer.keep(index)
    stored = prefix.kv.nbytes * len(tokens) // len(prefix.ids)
    return Coded(PrunedKV(lambda: copy.deepcopy(cache)), 0, 0, prefix.kv.nbytes, stored, 0.0, 0.0)


class Demotion:
    """Prefixes in memory and on a disk below it, of which the least important blocks have left memory."""

    def __init__(self, reader: Reader, prefixes: Sequence[Prefix], keep: float) -> None:
        self._spec = reader.spec
        self.bytes_read, self.seconds = 0, 0.0
        with ExitStack() as closing:
            self._space = self._fill(closing, reader, prefixes, keep)
            self._closing = closing.pop_all()

    def _fill(self, closing: ExitStack, reader: Reader, prefixes: Sequence[Prefix], keep: float) -> KeySpace:
        path = closing.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        size = 1.5 * sum(prefix.kv.nbytes for prefix in prefixes) / GIB + 0.5
        backend = HierarchicalBackend([CPUBackend(size_gb=size), DiskBackend(path, size_gb=size)])
        manager = closing.enter_context(CacheManager(backend, eviction_policy=HeuristicEvictionPolicy()))
        spec, total = self._spec, 0
        space = manager.register(spec, Identity("measured", spec.dtype.value, spec.block_tokens))
        for prefix in prefixes:
            region, positions = self._region(prefix.kv)
            space.save(space.chain(prefix.ids), region, positions, importance=ranks(reader, prefix))
            total += len(positions)
        manager.wait()
        manager.evict(total - round(keep * total))
        return space

    def __enter__(self) -> Demotion:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def load(self, prefix: Prefix) -> Coded:
        """*prefix* as it comes back; its size is that of what memory holds of it."""
        chain = self._space.chain(prefix.ids)
        kept = self._space.held_in_memory(chain) * self._spec.payload_bytes
        out = prefix.kv.copy()
        out[:, :, :, : chain.num_blocks * self._spec.block_tokens] = 0
        region, positions = self._region(out)
        begun = time.process_time()
        ticket = self._space.prefetch(chain)
        if ticket is not None:
            ticket.wait()  # for as long as the disk takes: an engine would compute what is late
        match = self._space.match(chain, "measured")
        loaded = self._space.load(match, region, positions[: match.blocks])
        self._space.release("measured")
        self.seconds += time.process_time() - begun
        self.bytes_read += loaded * self._spec.payload_bytes
        if loaded != chain.num_blocks:
            raise ConfigError(f"{DEMOTE}: {chain.num_blocks - loaded} blocks did not come back; is the disk full?")
        return Coded(out, len(positions), 0, len(positions) * self._spec.payload_bytes, kept, 0.0, 0.0)

    @property
    def gbps(self) -> float:
        """Bytes (1e9) that a second of CPU time brought back."""
        return self.bytes_read / max(self.seconds, 1e-9) / 1e9

    def _region(self, kv: KV) -> tuple[SequenceRegion, Any]:
        """Where the engine has *kv*, which is written to when blocks are loaded."""
        tensors = torch.from_numpy(kv.view(np.int16)).view(torch.bfloat16)
        keys, values = ([layer[c][None] for layer in tensors] for c in (0, 1))
        region = SequenceRegion.from_layers(keys, values, self._spec)
        n = self._spec.block_tokens
        return region, region.positions(0, np.arange(kv.shape[3] // n) * n)
