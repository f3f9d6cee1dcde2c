"""The remote level: asked by name, never in the tree.

What local tiers lack is asked for ahead of a look-up, lands in the memory tier above, and is proven there before it is
a hit.  What is stored is written behind.  Everything has a deadline, and nothing that is late stops the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.envelope import unpack_header
from ..block.plan import ChainView
from ..block.spec import PAGE, BlockSpec, round_up
from ..codec.base import Encoded, PayloadCoder
from ..errors import ConfigError
from ..store.base import Operation, OutsideStore
from .coding import ImageCoder
from .compressing import CompressionRule
from .images import seal
from .io import IOPool, Lane, Ticket
from .ledger import Event, Ledger
from .packed import PackedTier
from .remote_leaving import Leaving
from .remote_names import Names
from .remote_reads import Reads
from .remote_writes import Writes
from .roots import Roots
from .table import Keys, Rows
from .tier import Ingestion, Tier
from .transit import Transit
from .values import StoredChain, StoredRecords

ABANDONED_SHARE = 0.02
LEAST_ABANDONED = 8
LEAST_CHUNK_BLOCKS = 4


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a remote level is used; units are in the names."""

    namespace: str = "aibrix"
    """First part of every name."""
    builder: str = "ROLLING_HASH"
    """Key builder; RAW names a block by its whole record."""
    ingestion: Ingestion = Ingestion.HOT
    """When a block of the memory tier above is written."""
    hot_hits: int = 1
    """Hits that make a block hot."""
    op_batch: int = 32
    """Most blocks of one batch."""
    chunk_tokens: int = 0
    """Most tokens of one batch, which has four blocks at least; 0: as many as *op_batch* blocks have."""
    per_token_timeout_s: float = 0.02
    """Deadline of a batch: its tokens times this, at most *max_wait_s*."""
    max_wait_s: float = 2.0
    """Longest deadline of anything."""
    max_inflight_tokens: int = 0
    """Tokens that may wait to be written or be on their way; 0: one batch for each worker, the rest waits in line."""
    workers: int = 8
    """Batches on their way at once."""
    max_pending_jobs: int = 256
    """Reads and writes that may wait in line, each."""
    double_get_blocks: int = 4
    """Least number of missing blocks for which the level is asked."""
    double_get_ratio: float = 0.1
    """Least share of missing blocks for which it is asked."""
    strict_sync: bool = False
    """Let whoever stores a block wait until it is written, within the deadline."""


class RemoteLevel:
    """One outside store below the tiers of a manager.

    Parameters
    ----------
    store:
        Unopened.
    name:
        Name in the ledger.
    on_error:
        Called with whatever a background job raised.
    coder:
        What makes images smaller on their way out, and knows how to read those that are.
    rule:
        Which blocks it is for.
    """

    def __init__(
        self,
        store: OutsideStore,
        options: RemoteOptions,
        ledger: Ledger,
        roots: Roots,
        on_error: Callable[[Exception], None],
        name: str = "remote",
        coder: PayloadCoder | None = None,
        rule: CompressionRule | None = None,
    ) -> None:
        self.store = store
        self.options = options
        self.ledger = ledger
        self.name = name
        self.io = IOPool(options.workers, options.max_pending_jobs, on_error)
        self.names = Names(options.namespace, options.builder, roots)
        self.roots = roots
        self.coder = coder
        self.rule = rule or CompressionRule()
        self.spec: BlockSpec | None = None
        self.images: ImageCoder | None = None
        self._pools: list[Transit] = []
        self.reads: Reads
        self.writes: Writes
        self.leaving: Leaving | None = None
        """Where blocks wait that a save drives out of the first tier, if they are written then."""
        self.is_open = False
        self.landed: Callable[[int], None]
        """Told of each row at which blocks that came from here end, with one pin of it to take over."""
        self.written: Callable[[], object] = lambda: None
        """Told when blocks that were held to be written are not held any more."""

    def open(self, spec: BlockSpec, tiers: Sequence[Tier]) -> None:
        """Connect; raises StoreError, ConfigError or MissingDependencyError."""
        if self.coder is not None:
            self.coder.open(spec)
            self.images = ImageCoder(self.coder, spec, self._note_encoded)
        number = max(number for number, tier in enumerate(tiers) if tier.store.memory is not None)
        source = tiers[number]
        self.spec = spec
        # A tier without headers needs host memory in which images are put together and proven; so do those that are
        # not stored as they are in memory.
        whole = source.payload_offset > 0
        transit = None if whole and not self.encodes and not isinstance(source, PackedTier) else Transit(spec)
        passing = Transit(spec) if self.options.ingestion == Ingestion.EVICTED and number == 0 else None
        self._pools = [pool for pool in (transit, passing) if pool is not None]
        for pool in self._pools:
            pool.give_back(pool.take(1))  # registered memory must be there from the start
        most = max(math.ceil(ABANDONED_SHARE * source.index.capacity), LEAST_ABANDONED)
        self.store.open(spec, [source.slots, *(pool.memory for pool in self._pools)], most)
        self.source_number = number
        self.reads = Reads(self, source, None if whole else transit)
        self.writes = Writes(self, source, transit)
        self.leaving = Leaving(self, source, passing) if passing is not None else None
        self.is_open = True
        if self.encodes and not self.store.takes_shorter:
            self.close()
            raise ConfigError(
                "this connector takes values of one length only, so that a codec would save nothing; leave the codec "
                "out, or use REDIS, ROCKSDB, SHFS, or a connector of your own with shorter_values and without zero_copy"
            )

    def close(self) -> None:
        """End what is on its way, within seconds; idempotent.  The tiers are still open."""
        if not self.is_open:
            return
        self.is_open = False
        self.io.close()
        self.store.close()
        for pool in self._pools:
            pool.close()
        if self.coder is not None:
            self.coder.close()

    # -- encoding -----------------------------------------------------------------------------------------------------

    @property
    def encodes(self) -> bool:
        """Whether what is written goes through a codec."""
        return self.coder is not None and self.coder.encodes

    def stays_exact(self, depths: Sequence[int], chain_blocks: int) -> npt.NDArray[np.bool_]:
        """Which blocks of a chain of so many a lossy codec leaves as they are, because of their place in it."""
        assert self.spec is not None
        if self.coder is None or not (self.coder.encodes and self.coder.lossy):
            return np.zeros(len(depths), np.bool_)
        exactly = self.rule.exactly(chain_blocks, self.spec.block_tokens)
        return np.array([exactly(depth) for depth in depths], np.bool_)

    def sealing(
        self,
        pool: Transit,
        slots: Rows,
        chain: StoredChain,
        blocks: npt.NDArray[np.int64],
        known: npt.NDArray[np.uint64],
        chain_blocks: int,
    ) -> Callable[[slice], list[int] | None]:
        """What makes images of parts of *blocks* of a chain of so many, whose payloads are in *slots* of *pool*.

        *known*: as :func:`.images.seal` takes them.

        It seals and, where there is a codec, encodes them where they are.  It returns the bytes of each that must be
        stored; None where nothing encodes, and all are stored whole.
        """

        def prepare(part: slice) -> list[int] | None:
            seal(pool.spec, pool.memory.view, slots[part], chain, blocks[part], known[part])
            return self._encode(pool, slots[part], blocks[part].tolist(), chain_blocks)

        return prepare

    def _encode(self, pool: Transit, slots: Rows, depths: Sequence[int], chain_blocks: int) -> list[int] | None:
        if self.images is None or not self.encodes:
            return None
        spec, sizes = pool.spec, []
        exact = self.stays_exact(depths, chain_blocks).tolist()
        for slot, depth, stays in zip(slots.tolist(), depths, exact, strict=True):
            image = pool.memory.view[slot]
            if stays:
                sizes.append(spec.slot_bytes)
                continue
            reason = self.images.encode(image.copy(), depth, image)
            self.count(Event.KEPT_RAW, 1 if reason else 0, reason)
            header = unpack_header(image[: spec.header_bytes].data)
            sizes.append(spec.header_bytes + round_up(header.payload_bytes, PAGE))
        return sizes

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(
        self, chain: ChainView, root: int, covered: int, after: Ticket | None, wait_s: float | None
    ) -> Ticket | None:
        """Begin to bring what is there of *chain* beyond its *covered* blocks; None when that is not worth it.

        *after*: a local prefetch to let end first.  *wait_s*: what the caller would wait at most.
        """
        options, missing = self.options, chain.num_blocks - covered
        if not self.is_open or missing <= 0:
            return None
        enough = missing >= options.double_get_blocks and missing >= options.double_get_ratio * chain.num_blocks
        if self.is_second_get and not enough:
            return None
        return self.reads.begin(chain, root, after, self.deadline_s(missing, wait_s))

    @property
    def batch_blocks(self) -> int:
        """Blocks of one batch."""
        assert self.spec is not None
        most, chunk = self.options.op_batch, self.options.chunk_tokens
        return min(most, max(chunk // self.spec.block_tokens, LEAST_CHUNK_BLOCKS)) if chunk else most

    @property
    def is_second_get(self) -> bool:
        """Whether the memory above is a cache of its own, so that asking here is a second get."""
        return not self.reads.source.is_staging

    def deadline_s(self, blocks: int, wait_s: float | None = None) -> float:
        """Seconds that an operation on *blocks* blocks may take."""
        assert self.spec is not None
        options = self.options
        allowed = min(blocks * self.spec.block_tokens * options.per_token_timeout_s, options.max_wait_s)
        return allowed if wait_s is None else min(allowed, wait_s)

    # -- storing ------------------------------------------------------------------------------------------------------

    def stored(self, number: int, tip: int, blocks: int) -> None:
        """*blocks* new blocks, up to the pinned row *tip*, are in tier *number*; 0: they came from here."""
        if blocks and self._takes(number, Ingestion.ALL):
            self.writes.begin(tip, blocks)

    def used(self, number: int, rows: Rows) -> None:
        """A request has hit *rows*, the leading blocks of a chain, in tier *number*; it holds them."""
        if not self._takes(number, Ingestion.HOT):
            return
        index = self.writes.source.index
        fresh = rows[(index.hits[rows] >= self.options.hot_hits) & ~self.writes.is_written(rows)]
        if len(fresh):
            self.writes.begin(int(fresh[-1]), len(fresh))

    def takes_leaving(self, number: int) -> bool:
        """Whether blocks are written when they leave tier *number*."""
        return self._takes(number, Ingestion.EVICTED)

    def take_leaving(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Have pinned *rows* that are about to leave written; which of them are not lost then.

        By way of slots that are free, so that they can leave at once; the others as they are, waiting for that.
        """
        kept = self.leaving.send(rows) if self.leaving is not None else np.zeros(len(rows), np.bool_)
        kept[~kept] = self.writes.write_leaving(rows[~kept])
        return kept

    def _takes(self, number: int, ingestion: Ingestion) -> bool:
        return self.is_open and number == self.source_number and self.options.ingestion == ingestion

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def forget_chain(self, chain: StoredRecords, first: int, built: Keys) -> None:
        """Delete blocks of *chain* from number *first* on, and of the keys *built* on them, in the background."""
        if self.is_open:
            names = self.names.of(chain, range(first, chain.num_blocks))
            self.forget(list(dict.fromkeys([*names, *self.names.of_keys(built)])))

    def forget_keys(self, keys: Keys) -> None:
        """Delete the blocks of *keys* ``[n, 2]``, whosever model's they are, in the background."""
        if self.is_open:
            self.forget(self.names.of_keys(keys))

    def forget_ours(self) -> None:
        """Delete what this manager has written, as far back as it remembers, in the background."""
        if self.is_open:
            self.forget(self.names.take_written())

    def forget(self, names: Sequence[bytes]) -> None:
        """Delete *names* in the background, as far as there is room for that work and the store answers."""
        if self.leaving is not None:
            self.leaving.forget(names)
        step = 8 * self.options.op_batch
        for start in range(0, len(names), step):
            part = names[start : start + step]
            if self.io.submit(Lane.STORE, partial(self._delete, part)) is None:
                self.ledger.add(self.name, Event.ERROR, len(names) - start, reason="not_deleted")
                return

    def _delete(self, names: Sequence[bytes]) -> None:
        with self.timing("delete"):
            done = self.store.delete(names, self.options.max_wait_s)
        self.count(Event.DROPPED, counted(done), "deleted")
        if not done.done or done.count < len(names):
            self.ledger.add(self.name, Event.ERROR, len(names) - counted(done), reason="not_deleted")

    # -- figures ------------------------------------------------------------------------------------------------------

    def count(self, event: Event, blocks: int, reason: str = "") -> None:
        """Count *blocks* in the ledger; nothing when there are none."""
        if blocks:
            assert self.spec is not None
            self.ledger.add(self.name, event, blocks, blocks * self.spec.slot_bytes, reason)

    def _note_encoded(self, made: Encoded) -> None:
        assert self.coder is not None
        self.ledger.add(self.name, Event.ENCODED, 1, len(made.data), self.coder.name)
        self.ledger.note_worst(self.name, f"codec_error_{self.coder.name}", made.max_rel_error)

    def timing(self, operation: str) -> AbstractContextManager[None]:
        """Measure what is inside as an *operation* of this level, if durations are measured."""
        return self.ledger.timing(self.name, operation)

    def state(self) -> dict[str, Any]:
        """What it does, as plain data."""
        return {
            "tier": self.name,
            "ingestion": self.options.ingestion.value,
            "codec": self.coder.name if self.coder is not None else "raw",
            "waiting_jobs": self.io.pending,
            "tokens_in_flight": self.writes.tokens_in_flight if self.is_open else 0,
            **self.store.state(),
        }

    def check(self) -> list[str]:
        """Violated invariants of the ledger, as sentences."""
        asked, hit, miss = (self.ledger.total(e, self.name).blocks for e in (Event.ASKED, Event.HIT, Event.MISS))
        if asked != hit + miss:
            return [f"tier {self.name}: asked {asked} blocks, but hits {hit} + misses {miss}"]
        return []


def counted(operation: Operation) -> int:
    """Blocks that an operation has dealt with in time; one that goes on counts for none."""
    return operation.count if operation.done else 0
