"""OffloadingManager: the library without an engine's adapter, for programs that hold blocks as tensors themselves.

Calls take the tokens before (*prefix*) and those they are about (*query*), and answer by :class:`Status`.  Blocks are
tensors [layers, 2, tokens, heads, dim] over slots of the first tier: what is acquired is read where it lies, what is
allocated is written where it will lie.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .block.identity import Identity
from .block.key import KeyChain, normalise_tokens
from .block.plan import LoadPlan, Match, SavePlan
from .block.spec import BlockSpec, Layout
from .engine.remote import LEAST_CHUNK_BLOCKS
from .errors import CapacityError, ClosedError, ConfigError, LayoutError, TokenError
from .manager import CacheManager
from .memory.device import empty_blocks, slot_bytes, typed_block
from .memory.region import PagedRegion
from .status import Status, StatusCodes

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
DEFAULT_CHUNK_TOKENS = 512
_numbers = itertools.count(1)


class BlockHandle:
    """Blocks as tensors, until :meth:`release`.  Also a context manager.

    Attributes:
        start: tokens of the query before the first of these blocks.
        num_tokens: tokens of these blocks.
    """

    def __init__(
        self, tensors: list[torch.Tensor], start: int, num_tokens: int, release: Callable[[], object] | None
    ) -> None:
        self.start = start
        self.num_tokens = num_tokens
        self._tensors: list[torch.Tensor] | None = tensors
        # A handle that is forgotten must not keep its slots.
        self._finalizer = None if release is None else weakref.finalize(self, release)
        if self._finalizer is not None:
            self._finalizer.atexit = False

    def to_tensors(self) -> list[torch.Tensor]:
        """One tensor [layers, 2, tokens, heads, dim] for each block; ClosedError after :meth:`release`."""
        if self._tensors is None:
            raise ClosedError("the handle was released; its memory belongs to other blocks now")
        return self._tensors

    def release(self) -> None:
        """Give the memory back; idempotent.  Tensors of it must not be used any more."""
        self._tensors = None
        if self._finalizer is not None:
            self._finalizer()

    def __len__(self) -> int:
        """Number of blocks."""
        return 0 if self._tensors is None else len(self._tensors)

    def __enter__(self) -> BlockHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Allocated(BlockHandle):
    """Slots that were reserved for missing blocks."""

    def __init__(
        self, tensors: list[torch.Tensor], start: int, num_tokens: int, plan: SavePlan | None, chain: KeyChain,
        release: Callable[[], object] | None,
    ) -> None:  # fmt: skip
        super().__init__(tensors, start, num_tokens, release)
        self.plan = plan
        self.chain = chain

    def take(self) -> SavePlan | None:
        """The plan, which the caller ends now; the handle is released."""
        plan = self.plan if self._tensors is not None else None
        self._tensors = None
        if self._finalizer is not None and self._finalizer.detach() is None:
            return None
        return plan


class OffloadingManager:
    """Blocks of one model in a manager.

    Parameters
    ----------
    spec, identity:
        Geometry of the blocks, and whose they are.
    manager:
        Where they are kept; None: one that the environment describes, closed with this object.
    max_wait_s:
        Longest that a call waits for what slower tiers hold.

    Raises what ``manager.register`` raises, and ConfigError when the manager's ``block_tokens`` say otherwise than
    *spec*.  Every other method answers with a status: NOT_FOUND where nothing is stored, OUT_OF_MEMORY where nothing
    could leave, DENIED for blocks whose prefix is not stored, INVALID for wrong arguments, TIMEOUT, ERROR.
    """

    def __init__(
        self, spec: BlockSpec, identity: Identity, manager: CacheManager | None = None, *, max_wait_s: float = 2.0
    ) -> None:
        self._owned = manager is None
        self.manager = manager if manager is not None else CacheManager.from_env()
        asked = self.manager.config.block_tokens
        if asked > 0 and asked != spec.block_tokens:
            raise ConfigError(
                f"the manager wants blocks of {asked} tokens (block_tokens, BLOCK_SIZE), the spec says "
                f"{spec.block_tokens}; make the spec with {asked}"
            )
        self.space = self.manager.register(spec, identity)
        self.spec = spec
        self.max_wait_s = max_wait_s
        self._closed = False

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.spec.block_tokens

    @property
    def chunk_size(self) -> int:
        """Tokens that :meth:`chunks` puts into one operation: whole blocks, at least four."""
        asked = (self.manager.config.chunk_tokens or DEFAULT_CHUNK_TOKENS) // self.block_size
        return max(asked, LEAST_CHUNK_BLOCKS) * self.block_size

    def chunks(self, prefix: Any, query: Any) -> Iterator[tuple[Any, Any]]:
        """*query* in pieces of :attr:`chunk_size` tokens: (everything before, piece), for one operation each."""
        before, tokens = normalise_tokens(() if prefix is None else prefix), normalise_tokens(query)
        whole = np.concatenate((before, tokens))
        for start in range(len(before), len(whole), self.chunk_size):
            yield whole[:start], whole[start : start + self.chunk_size]

    # -- asking -------------------------------------------------------------------------------------------------------

    def exists(self, prefix: Any, query: Any) -> Status[int]:
        """Leading tokens of *query* that are stored; NOT_FOUND when there are none.

        What only a remote level holds is brought to memory for that.
        """
        return self._answer(lambda: self._exists(*self._chain(prefix, query)))

    def _exists(self, chain: KeyChain, first: int) -> Status[int]:
        found = self.space.peek(chain)
        if found < chain.num_blocks and self.space.asks_remotely:
            self._bring(chain)
            found = self.space.peek(chain)
        return self._tokens(found - first)

    def prefetch(self, prefix: Any, query: Any) -> Status[None]:
        """Begin to bring what slower tiers hold of *query* to memory; does not wait."""

        def begin() -> Status[None]:
            self.space.prefetch(self._chain(prefix, query)[0])
            return Status()

        return self._answer(begin)

    def acquire(self, prefix: Any, query: Any) -> Status[tuple[int, BlockHandle]]:
        """Leading tokens of *query* that are stored, and their blocks, to be read where they lie until released.

        A lease keeps them; like every lease it ends after the manager's ``lease_max_age_s``.
        """
        return self._answer(lambda: self._acquire(*self._chain(prefix, query)))

    def _acquire(self, chain: KeyChain, first: int) -> Status[tuple[int, BlockHandle]]:
        self._bring(chain)
        request_id = f"offloading-{next(_numbers)}"
        match = self.space.match(chain, request_id)
        if match.blocks <= first:
            self.space.release(request_id)
            code = StatusCodes.ERROR if match.reason in ("error", "closed") else StatusCodes.NOT_FOUND
            return Status(code, match.reason)
        try:
            tensors = self._tensors(match)[first:]
        except BaseException:
            self.space.release(request_id)
            raise
        if not tensors:
            self.space.release(request_id)
            return Status(StatusCodes.ERROR, "what is stored could not be read")
        tokens = len(tensors) * self.block_size
        release = partial(self.space.soon, partial(self.space.release, request_id))
        return Status.ok((tokens, BlockHandle(tensors, 0, tokens, release)))

    def get(self, prefix: Any, query: Any, tensors: Sequence[torch.Tensor] | torch.Tensor) -> Status[int]:
        """Copy leading blocks of *query* to *tensors*, one [layers, 2, tokens, heads, dim] for each block.

        Returns how many tokens were copied; tensors behind them are left as they were.
        """

        def copy() -> Status[int]:
            self._check(tensors)
            acquired = self.acquire(prefix, query)
            if not acquired.is_ok():
                return Status(acquired.error_code, acquired.value)  # type: ignore[arg-type]
            _, handle = acquired.get()
            with handle:
                pairs = list(zip(tensors, handle.to_tensors(), strict=False))
                for target, source in pairs:
                    target.copy_(source)
            return self._tokens(len(pairs))

        return self._answer(copy)

    # -- storing ------------------------------------------------------------------------------------------------------

    def allocate_for(self, prefix: Any, query: Any) -> Status[BlockHandle]:
        """Memory for the blocks of *query* that are not stored, to be filled and then :meth:`put`.

        ``handle.start`` tokens of the query are stored already.  The handle may have fewer blocks than are missing when
        room is short, and has none when nothing is missing.
        """
        return self._answer(lambda: self._allocate(*self._chain(prefix, query)))

    def _allocate(self, chain: KeyChain, first: int) -> Status[BlockHandle]:
        held = self.space.held_in_memory(chain)
        if held < first:  # only below memory, perhaps: a block needs its parent beside it
            self._bring(chain)
            held = self.space.held_in_memory(chain)
        if held < first:
            return Status(StatusCodes.DENIED, "the prefix is not stored; put it first")
        count = chain.num_blocks - first
        plan = self.space.plan_save(chain, first=first, count=count, tag=Layout.LCND) if count else None
        if plan is None:
            held = self.space.held_in_memory(chain)
            if held < chain.num_blocks:
                return Status(StatusCodes.OUT_OF_MEMORY, "no slot is free, and none can leave")
            return Status.ok(_Allocated([], count * self.block_size, 0, None, chain, None))
        views = [self._view(int(row), Layout.LCND) for row in plan.rows]
        start, tokens = (plan.first - first) * self.block_size, len(views) * self.block_size
        release = partial(self.space.soon, partial(self.space.finish_save, plan, 0))
        return Status.ok(_Allocated(views, start, tokens, plan, chain, release))

    def put(self, prefix: Any, query: Any, blocks: BlockHandle | Sequence[torch.Tensor] | torch.Tensor) -> Status[int]:
        """Store blocks of *query*: a filled handle of :meth:`allocate_for`, or tensors, one for each block.

        Returns how many leading tokens of *query* are stored now, those included that were before.
        """
        return self._answer(lambda: self._put(prefix, query, blocks))

    def _put(self, prefix: Any, query: Any, blocks: Any) -> Status[int]:
        if isinstance(blocks, _Allocated):
            return self._commit(*self._chain(prefix, query), blocks)
        if isinstance(blocks, BlockHandle):
            raise LayoutError("this handle was acquired, not allocated: its blocks are stored")
        self._check(blocks)
        chain, first = self._chain(prefix, query)
        if len(blocks) < chain.num_blocks - first:
            chain.truncate((first + len(blocks)) * self.block_size)
        allocated = self._allocate(chain, first)
        if not allocated.is_ok():
            return Status(allocated.error_code, allocated.value)  # type: ignore[arg-type]
        handle = allocated.get()
        assert isinstance(handle, _Allocated)
        skipped = handle.start // self.block_size
        with handle:
            for target, source in zip(handle.to_tensors(), blocks[skipped:], strict=False):
                target.copy_(source)
            return self._commit(chain, first, handle)

    def _commit(self, chain: KeyChain, first: int, handle: _Allocated) -> Status[int]:
        wanted, reserved = chain.num_blocks, handle.chain
        shared = min(wanted, reserved.num_blocks)
        if chain.key_bytes(shared - 1) != reserved.key_bytes(shared - 1):
            raise TokenError("the handle was allocated for other tokens")
        plan = handle.take()
        if plan is None:  # nothing was missing, or it was put already
            return self._tokens(self.space.held_in_memory(chain) - first)
        filled = min(len(plan.rows), max(wanted - plan.first, 0))
        self.space.finish_save(plan, filled)
        return self._tokens(plan.first + filled - first)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def delete(self, prefix: Any, query: Any) -> Status[int]:
        """Drop the blocks of *query* and all that was built on them, from every tier; returns how many in all."""

        def drop() -> Status[int]:
            chain, first = self._chain(prefix, query)
            return Status.ok(self.space.drop(chain, first))

        return self._answer(drop)

    def flush(self, timeout_s: float | None = None) -> Status[None]:
        """Wait until what was put has been written behind; TIMEOUT after *timeout_s* seconds."""
        return self._answer(lambda: Status() if self.manager.wait(timeout_s) else Status(StatusCodes.TIMEOUT))

    def close(self) -> Status[None]:
        """Finish background work, and close the manager if it is this object's own; idempotent."""
        self._closed = True
        if self._owned:
            self.manager.close()
        return Status()

    def __enter__(self) -> OffloadingManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _answer(self, work: Callable[[], Status[T]]) -> Status[T]:
        """What *work* answers; what it raises, as a status."""
        if self._closed:
            return Status(StatusCodes.ERROR, "the manager is closed")
        try:
            return work()
        except CapacityError as error:
            return Status(StatusCodes.OUT_OF_MEMORY, error)
        except (ConfigError, LayoutError, TokenError) as error:
            return Status(StatusCodes.INVALID, error)
        except Exception as error:
            return Status(StatusCodes.ERROR, error)

    def _chain(self, prefix: Any, query: Any) -> tuple[KeyChain, int]:
        """The chain of all tokens, and the blocks of its prefix."""
        chain = self.space.chain(() if prefix is None else prefix)
        if chain.num_tokens % self.block_size:
            raise TokenError(f"a prefix of {chain.num_tokens} tokens is not made of blocks of {self.block_size}")
        first = chain.num_tokens // self.block_size
        chain.extend(query)
        return chain, min(first, chain.num_blocks)

    def _tokens(self, blocks: int) -> Status[int]:
        if blocks <= 0:
            return Status(StatusCodes.NOT_FOUND)
        return Status.ok(blocks * self.block_size)

    def _bring(self, chain: KeyChain) -> None:
        """Bring what slower tiers hold to memory, as far as that can be done in time."""
        ticket = self.space.prefetch(chain, self.max_wait_s)
        if ticket is not None:
            ticket.wait(self.max_wait_s)

    def _tensors(self, match: Match) -> list[torch.Tensor]:
        """All matched blocks: where they lie or, what is not in the first tier or packed by an engine, copied."""
        plan: LoadPlan = self.space.plan_load(match, match.blocks)
        layouts = [Layout.of_code(code) for code in plan.codes.tolist()]
        if len(plan.rows) == match.blocks and not any(layout.packed_tokens for layout in layouts):
            return [self._view(row, layout) for row, layout in zip(plan.rows.tolist(), layouts, strict=True)]
        room = empty_blocks(match.blocks, self.spec, self.manager.first_slots.device)
        region = PagedRegion.from_cross_layer(room, self.spec)
        loaded = self.space.load(match, region, region.positions(np.arange(match.blocks)))
        return list(room[:loaded])

    def _view(self, row: int, layout: Layout) -> torch.Tensor:
        """A slot of the first tier as [layers, 2, tokens, heads, dim]."""
        data = slot_bytes(self.manager.first_slots, row)
        block = typed_block(data, self.manager.payload_offset, self.spec, layout)
        return block if layout == Layout.LCND else block.transpose(2, 3)

    def _check(self, tensors: Any) -> None:
        """Refuse tensors that are no blocks of this geometry."""
        s = self.spec
        shape = (s.num_layers, 2, s.block_tokens, s.num_kv_heads, s.head_dim)
        for number, tensor in enumerate(tensors):
            if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{s.dtype.value}":
                raise LayoutError(
                    f"block {number} is {tuple(tensor.shape)} of {tensor.dtype}; use {shape} of torch.{s.dtype.value}"
                )
