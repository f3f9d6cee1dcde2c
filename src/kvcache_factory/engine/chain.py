"""The tiers of one manager, the fastest first, and the verbs over them.

Decide here, move there: the indexes decide under their locks and hand out rows; the mover copies without any lock.

* Each tier is closed under prefix, so tier t serves the blocks [covered by faster tiers, its own run).
* What is saved goes to the first tier at once, and from there to the next by background jobs (write-behind), ancestors
  first; so eviction of a block that is already below is a drop.
* A job pins the chain it copies until it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..block.key import KeyChain
from ..block.spec import BlockSpec
from ..errors import ClosedError, ConfigError
from ..memory.ranges import find_ranges
from .finding import Finding, view_of
from .flow import Flow, FlowSettings
from .io import IOPool, Lane, Ticket
from .lasting import LastingTier
from .lease import LeaseBook, Usage
from .ledger import MANAGER, Event, Ledger
from .loading import Loading
from .mover import Mover
from .remote import RemoteLevel
from .roots import Roots
from .saving import Saving
from .seen import Seen
from .stages import Stages
from .table import Keys
from .tier import Tier
from .values import leading


class Dropped(NamedTuple):
    """What was dropped, in all tiers together."""

    blocks: int
    nbytes: int


class TierChain:
    """An ordered list of tiers: opened and closed together; *finding*, *loading* and *saving* are its verbs.

    Parameters
    ----------
    tiers:
        The fastest first, unopened.
    on_error:
        Called with whatever a background job raised.
    io:
        Who runs background jobs; by default threads of its own.
    mover:
        Who copies payloads.
    remote:
        The level below all tiers that is asked by name, unopened.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: FlowSettings,
        roots: Roots,
        ledger: Ledger,
        clock: Callable[[], float],
        on_error: Callable[[Exception], None],
        io: IOPool | None = None,
        mover: Mover | None = None,
        remote: RemoteLevel | None = None,
    ) -> None:
        assert tiers, "a chain needs a tier"
        self.tiers = list(tiers)
        self.roots = roots
        self.flow = Flow(self.tiers, settings, self.roots, on_error, io)
        self.flow.stages = Stages(ledger, settings.measure_stages)
        self.flow.remote = self.remote = remote
        self.ledger = ledger
        self._history = ledger.pair(MANAGER, Event.REUSABLE, Event.SERVED)
        self.mover = mover or Mover()
        self.leases = LeaseBook(settings.lease_max_age_s, clock, self._count_expired, self._count_usage)
        self.finding = Finding(self.tiers, self.flow, self.leases, ledger)
        self.loading = Loading(self.tiers, self.flow, self.leases, self.mover, ledger)
        self.saving = Saving(self.tiers, self.flow, self.leases, self.mover, roots)
        self._spec: BlockSpec | None = None
        self._open_lock = threading.Lock()
        self._closed = False

    # -- open and close -----------------------------------------------------------------------------------------------

    def open(self, spec: BlockSpec) -> None:
        """Allocate every tier for blocks of *spec*; a second geometry is a ConfigError."""
        with self._open_lock:
            if self._closed:
                raise ClosedError("this manager is closed; make a new one")
            if self._spec is not None:
                self._check_same_geometry(self._spec, spec)
                return
            opened: list[Tier] = []
            try:
                for tier in self.tiers:
                    opened.append(tier)
                    tier.open(spec)
                if self.remote is not None:
                    self.remote.landed = self._landed
                    self.remote.written = self._written
                    self.remote.open(spec, self.tiers)
            except BaseException:
                for tier in opened:
                    tier.close()
                raise
            for tier in self.tiers:
                tier.index.accepts = self.finding.worst
            self.flow.open(spec)
            self.flow.stages.ranges = find_ranges() if self.flow.stages.wanted else None
            self.finding.seen = self.saving.seen = Seen(sum(tier.index.capacity for tier in self.tiers))
            self._spec = spec

    def check_model(self, fingerprint: str) -> None:
        """ConfigError where a codec of the open chain is calibrated for another model than that of *fingerprint*."""
        for coder in [tier.coder for tier in self.tiers] + [self.remote.coder if self.remote is not None else None]:
            if coder is not None:
                coder.check_model(fingerprint)

    @staticmethod
    def _check_same_geometry(opened: BlockSpec, spec: BlockSpec) -> None:
        same = (opened.payload_bytes, opened.block_tokens) == (spec.payload_bytes, spec.block_tokens)
        if not same:
            raise ConfigError(
                f"this manager holds blocks of {opened.block_tokens} tokens and {opened.payload_bytes:,} bytes; a "
                f"model with blocks of {spec.block_tokens} tokens and {spec.payload_bytes:,} bytes needs its own"
            )

    @property
    def is_open(self) -> bool:
        """Whether tiers are allocated and not closed."""
        return self._spec is not None and not self._closed

    @property
    def closed(self) -> bool:
        """Whether it was closed, open before or not."""
        return self._closed

    def in_background(self, job: Callable[[], object]) -> Ticket | None:
        """Run *job* in a thread of the pool; None when there is no room for it."""
        return self.flow.io.submit(Lane.STORE, job)

    def wake_in(self, seconds: float, job: Callable[[], object]) -> None:
        """Run *job* in a thread of the pool in so many *seconds*, unless an earlier job is to come first."""
        self.flow.io.wake_at(time.monotonic() + seconds, job)

    def _landed(self, tip: int) -> None:
        assert self.remote is not None
        self.flow.stored(self.remote.source_number, tip, 0)

    def _written(self) -> None:
        assert self.remote is not None
        self.flow.encode_soon(self.remote.source_number)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for background work; False when *timeout* seconds were not enough."""
        return self._closed or self.flow.wait(timeout)

    def close(self) -> None:
        """Stop intake, end background work, free everything; idempotent."""
        with self._open_lock:
            if self._closed:
                return
            self._closed = True
        self.flow.close()
        self.mover.close()
        self.leases.clear()
        for tier in self.tiers:
            tier.close()

    def disown(self) -> None:
        """In a forked child: be as closed, and leave threads, files and locks to the process whose they are."""
        self._closed = True
        if self.remote is not None:
            self.remote.is_open = False

    # -- asking -------------------------------------------------------------------------------------------------------

    def peek(self, chain: KeyChain) -> int:
        """Leading blocks of *chain* that some tier holds, by key alone."""
        return max(tier.index.peek(chain) for tier in self.tiers) if self.is_open else 0

    def ready(self, chain: KeyChain) -> int:
        """Leading blocks of *chain* that can be copied out of the first tier's slots as they are, by key alone."""
        tier = self.tiers[0]
        held = tier.index.peek(chain) if self.is_open else 0
        rows = tier.index.rows_of(chain.keys[:held])
        return leading((rows >= 0) & tier.ready(rows))

    def refresh(self) -> None:
        """Learn now what other processes have stored in shared tiers."""
        for tier in self.tiers:
            if isinstance(tier, LastingTier):
                tier.refresh()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 0 before a model is registered."""
        return self._spec.block_tokens if self._spec is not None else 0

    # -- leaving ------------------------------------------------------------------------------------------------------

    def release(self, request_id: str, output_tokens: int = 0) -> bool:
        """Give back what a request holds, saying how much it generated; False when it holds nothing (any more)."""
        released = self.leases.release(request_id, output_tokens)
        self.flow.settle()
        if released:
            self.flow.encode_all_soon()
        return released

    def evict(self, blocks: int, number: int = 0) -> int:
        """Let up to *blocks* blocks leave tier *number* by policy; returns how many did."""
        if self.remote is not None and self.remote.takes_leaving(number):
            return self.flow.demotion.move_out(number, blocks)
        tier = self.tiers[number]
        keys = tier.evict(blocks)
        tier.count_evicted(keys, self.flow.below(number))
        return len(keys)

    def number_of(self, name: str) -> int:
        """The number of the tier of this *name*; ConfigError when there is none."""
        names = [tier.name for tier in self.tiers]
        if name not in names:
            raise ConfigError(f"there is no tier {name!r}; there are {', '.join(names)}")
        return names.index(name)

    def drop_tier(self, number: int) -> int:
        """Drop every block of tier *number*; returns how many.  Copies of them in other tiers stay."""
        tier = self.tiers[number]
        dropped = tier.index.clear()
        tier.count(Event.DROPPED, dropped, "asked")
        tier.settle()
        return dropped

    def drop(self, chain: KeyChain, first: int = 0, reason: str = "asked") -> int:
        """Drop the blocks of *chain* from number *first* on, and all that was built on them, from every tier."""
        dropped = 0
        built: list[Keys] = []
        for tier in self._tiers_twice():
            rows = tier.index.rows_of(chain.keys[first:])
            if self.remote is not None:
                built.append(tier.index.keys_below(rows[rows >= 0]))
            dropped += tier.drop(rows[rows >= 0], reason)
        if self.remote is not None:
            self.remote.forget_chain(view_of(chain, chain.num_blocks), first, np.concatenate(built))
        return dropped

    def drop_unshared(self, keys: Keys, reason: str, wipe: bool = False) -> Dropped:
        """Drop the blocks of *keys* ``[n, 2]`` that nothing else is built on, from every tier; copies on their way too.

        *wipe*: stores overwrite their bytes, and remote ones delete them.
        """
        blocks = nbytes = 0
        for tier in self._tiers_twice() if self.is_open else ():
            gone = tier.drop_unshared(keys, reason, wipe)
            blocks += gone
            nbytes += gone * tier.block_bytes
        if wipe and self.is_open and self.remote is not None:  # only now: what is dropped begins no way out any more
            self.remote.forget_keys(keys)
        return Dropped(blocks, nbytes)

    def _tiers_twice(self) -> list[Tier]:
        """For dropping: a copy that began before the first look ends before the second, or sees its source gone."""
        return [*self.tiers, *self.tiers[:-1]]

    def holds(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of *keys* ``[n, 2]`` some tier can find, or is about to."""
        held = np.zeros(len(keys), np.bool_)
        for tier in self.tiers:
            held |= tier.index.knows(keys)
        return held

    def clear(self, reason: str) -> None:
        """Drop every block from every tier, and forget what was seen."""
        self.flow.wait()
        if self.finding.seen is not None:
            self.finding.seen.clear()
        for tier in self.tiers:
            if tier.is_open:
                tier.count(Event.DROPPED, tier.index.clear(), reason)
                tier.settle()
        if self.remote is not None:
            self.remote.forget_ours()

    @property
    def compression(self) -> str:
        """The codecs that tiers encode with, by name; ``none`` without any."""
        coders = [tier.coder for tier in self.tiers] + [self.remote.coder if self.remote is not None else None]
        names = dict.fromkeys(coder.name for coder in coders if coder is not None and coder.encodes)
        return ",".join(names) or "none"

    def check(self) -> list[str]:
        """Violated invariants of indexes and ledger, as sentences."""
        problems = []
        for tier in self.tiers:
            if not tier.is_open:
                continue
            problems += [f"tier {tier.name}: {sentence}" for sentence in tier.index.check()]
            asked, hit, miss = (self.ledger.total(e, tier.name).blocks for e in (Event.ASKED, Event.HIT, Event.MISS))
            if asked != hit + miss:
                problems.append(f"tier {tier.name}: asked {asked} blocks, but hits {hit} + misses {miss}")
            came, left = (
                sum(self.ledger.total(event, tier.name).blocks for event in events)
                for events in ((Event.STORED, Event.FOUND), (Event.EVICTED, Event.DROPPED))
            )
            if came != tier.index.ready + left:
                problems.append(f"tier {tier.name}: {came} blocks came, but {tier.index.ready} are held, {left} left")
        for whole, parts in (
            (Event.ASKED, (Event.HIT, Event.MISS)),
            (Event.REUSABLE, (Event.SERVED, Event.RECOMPUTED)),
        ):
            total = self.ledger.total(whole, MANAGER).blocks
            counted = {part.value: self.ledger.total(part, MANAGER).blocks for part in parts}
            if total != sum(counted.values()):
                problems.append(f"manager: {whole} {total} blocks, but {counted}")
        return problems + (self.remote.check() if self.remote is not None else [])

    def _count_expired(self) -> None:
        self.ledger.add(MANAGER, Event.LEASE_EXPIRED)

    def _count_usage(self, usage: Usage) -> None:
        """A request has ended: what there was of its history, and what became of that."""
        if not usage.reusable:
            return
        served = min(usage.served, usage.found)
        self._history.add(usage.reusable, served)
        if served == usage.reusable:
            return
        chosen = min(usage.chosen, usage.found - served)
        rest = {"chosen": chosen, "not_loaded": usage.found - served - chosen, "gone": usage.reusable - usage.found}
        for reason, blocks in rest.items():
            if blocks:
                self.ledger.add(MANAGER, Event.RECOMPUTED, blocks, reason=reason)
