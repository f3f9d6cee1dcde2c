"""Replays a workload through the tiers of a manager: the engine's index, leases, flow and policies, without bytes.

A request looks its blocks up (which leases what is found), loads and thereby promotes what slower tiers hold, saves
what was missing, and is released.  Background copies are done between two steps, so that a run is the same every time.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.envelope import Fidelity
from ..block.identity import Identity
from ..block.key import KeyChain
from ..block.plan import Match
from ..block.spec import BlockSpec, KVDtype
from ..engine.chain import TierChain
from ..engine.flow import FlowSettings
from ..engine.ledger import Event, Ledger
from ..engine.roots import Roots
from ..errors import CapacityError, KVCacheError
from ..policy.base import REUSE_HINTS, EvictionPolicy, RequestHint
from ..policy.placement import check_placement, policy_at, swap_level
from .cost import CostModel
from .still import NOWHERE, StillMover, StillPool, StillTier, TraceChain, positions
from .workload import NEVER, Progress, Workload

Hints = Literal["none", "trace", "oracle"]
Blocks = npt.NDArray[np.int32]

KINDS = {"gpu": "gpu", "hbm": "gpu", "nvme": "disk", "disk": "disk", "ssd": "disk"}
"""What a tier of this name is to a policy with a target; any other is memory of the host."""

REPORT_EVERY = 512
"""Requests between two calls of a progress function."""


class Size(NamedTuple):
    """Name and capacity in blocks of one tier."""

    name: str
    blocks: int


class Service(msgspec.Struct, frozen=True):
    """How long requests take: prefill of what was not found, then one token after the other."""

    cost: CostModel
    decode_tokens_per_s: float = 40.0


class Settings(msgspec.Struct, frozen=True):
    """What a replay has besides policy and capacity."""

    hints: Hints = "none"
    """Reuse hints of requests: none, what the trace says, or whether the session really returns."""
    service: Service | None = None
    """With it, requests take time, hold their leases meanwhile, and overlap."""
    spec: BlockSpec | None = None
    """Geometry, for bytes; a block weighs nothing without it."""
    demote_at: float = 0.95
    demote_to: float = 0.9


DEFAULTS = Settings()


class Outcome(msgspec.Struct):
    """What came of one replay.

    Attributes
    ----------
    hits:
        ``int32 [tiers, requests]``: blocks of the leading run that each tier served.
    block_hits:
        Blocks that were there, whether or not the run reached them.
    evicted, stored, moved:
        Blocks by tier that left, came, and were promoted or demoted.
    held:
        Blocks by tier at the end.
    seconds:
        CPU time of the replay.
    """

    policy: str
    sizes: list[Size]
    blocks: int
    hits: Blocks
    block_hits: int
    evicted: list[int]
    stored: list[int]
    moved: list[int]
    held: list[int]
    seconds: float

    @property
    def usable_hit(self) -> float:
        """Share of all block accesses that the leading runs served."""
        return float(self.hits.sum()) / self.blocks

    @property
    def block_hit(self) -> float:
        """Share of all block accesses that found their block somewhere."""
        return self.block_hits / self.blocks


class Clock:
    """The time of the trace; no two requests share one moment, so that each has its own place in every order."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, at_s: float) -> None:
        """Go to *at_s*, or just past the last moment."""
        self.now = max(at_s, math.nextafter(self.now, math.inf))


def reuse_hints(workload: Workload, hints: Hints) -> npt.NDArray[np.int8]:
    """Number in REUSE_HINTS of what is said about each request."""
    if hints == "trace":
        return workload.reuse
    if hints == "none":
        return np.zeros(len(workload), np.int8)
    # The next turn of a conversation repeats its prompt; what repeats less than half only shares a beginning.
    lengths = workload.lengths
    middle = workload.offsets[:-1] + lengths // 2
    returns = workload.next_uses()[np.minimum(middle, workload.blocks - 1)] != NEVER
    returns &= lengths > 0
    return np.where(returns, REUSE_HINTS.index("returns"), REUSE_HINTS.index("ended")).astype(np.int8)


class Replay:
    """One policy on one set of tiers."""

    def __init__(
        self, workload: Workload, policy: EvictionPolicy, sizes: Sequence[Size], settings: Settings = DEFAULTS
    ) -> None:
        if not sizes or min(size.blocks for size in sizes) < 1:
            raise CapacityError(f"a tier of less than one block cannot be replayed: {[tuple(size) for size in sizes]}")
        self.workload = workload
        self.sizes = list(sizes)
        self.policy = policy
        self.settings = settings
        self.clock = Clock()
        self.ledger = Ledger()
        self.pool = StillPool(_fail)
        spec = settings.spec or BlockSpec(KVDtype.FP8_E4M3, 1, 1, 1, workload.block_tokens)
        self._identity = Identity(model=workload.name, kv_dtype=spec.dtype.value, block_tokens=spec.block_tokens)
        self.tiers = self._open_tiers(spec)
        longest = int(workload.lengths.max())
        self._zeros = np.zeros((longest, 2), np.uint64)
        self._no_tokens = np.zeros((longest, 0), np.uint32)
        self.hits = np.zeros((len(sizes), len(workload)), np.int32)
        self._reuse = [RequestHint(reuse=cast(Any, name)) for name in REUSE_HINTS]
        self._said = reuse_hints(workload, settings.hints).tolist()

    def _open_tiers(self, spec: BlockSpec) -> TierChain:
        # More rows than there are blocks cost memory and change nothing.
        rows = [min(size.blocks, 2 * self.workload.unique) for size in self.sizes]
        kinds = [KINDS.get(size.name, "cpu") for size in self.sizes]
        check_placement(self.policy, kinds)
        made = [
            StillTier(size.name, count, policy_at(self.policy, kind), self.ledger, self.clock)
            for size, count, kind in zip(self.sizes, rows, kinds, strict=True)
        ]
        for number, tier in enumerate(made):
            tier.swap_to = swap_level(self.policy, number, kinds)
        flow = FlowSettings(demote_at=self.settings.demote_at, demote_to=self.settings.demote_to)
        roots = Roots()
        chain = TierChain(made, flow, roots, self.ledger, self.clock, _fail, self.pool, StillMover())
        chain.open(spec)
        self._root = roots.number(self._identity.digest, self._identity.digest)
        return chain

    def run(self, progress: Progress = lambda done, total: None) -> Outcome:
        """Replay everything; *progress* is told how many requests are done."""
        begun = time.process_time()
        if self.settings.service is None:
            self._run_at_once(progress)
        else:
            self._run_in_flight(self.settings.service, progress)
        seconds = time.process_time() - begun
        outcome = self._outcome(seconds)
        self.tiers.close()
        return outcome

    # -- one after the other ------------------------------------------------------------------------------------------

    def _run_at_once(self, progress: Progress) -> None:
        times, outputs = self.workload.at_s.tolist(), self.workload.outputs.tolist()
        for number, at_s in enumerate(times):
            self.clock.advance(at_s)
            chain = self._chain(number)
            match = self._ask(number, chain)
            self._save(number, chain, match, outputs[number])
            self.tiers.release(match.request_id, outputs[number])
            if number % REPORT_EVERY == 0:
                progress(number, len(times))

    def _chain(self, number: int) -> KeyChain:
        keys = self.workload.book.keys[self.workload.request(number)]
        return cast(KeyChain, TraceChain(self._identity, keys, self._zeros, self._no_tokens))

    def _ask(self, number: int, chain: KeyChain) -> Match:
        hint = self._reuse[self._said[number]]
        match = self.tiers.finding.match(chain, self._root, str(number), chain.num_blocks, Fidelity.EXACT, hint)
        for segment in match.segments:
            self.hits[segment.tier, number] = len(segment.rows)
        if match.segments and match.segments[-1].tier:
            self.tiers.loading.load(match, NOWHERE, positions(match.blocks))
        self.pool.run()
        return match

    def _save(self, number: int, chain: KeyChain, match: Match, output_tokens: int) -> None:
        missing = chain.num_blocks - match.blocks
        if missing:
            hint = self._reuse[self._said[number]]
            if output_tokens:
                hint = msgspec.structs.replace(hint, output_tokens=output_tokens)
            place = positions(missing)
            arguments = NOWHERE, place, match.blocks, Fidelity.EXACT, hint, match.request_id
            self.tiers.saving.save(chain, self._root, *arguments)
            self.pool.run()

    # -- overlapping --------------------------------------------------------------------------------------------------

    def _run_in_flight(self, service: Service, progress: Progress) -> None:
        times, outputs = self.workload.at_s.tolist(), self.workload.outputs.tolist()
        due: list[tuple[float, int, Callable[[], None]]] = []
        steps = 0

        def later(at_s: float, step: Callable[[], None]) -> None:
            nonlocal steps
            steps += 1
            heapq.heappush(due, (at_s, steps, step))

        def catch_up(until_s: float) -> None:
            while due and due[0][0] <= until_s:
                at_s, _, step = heapq.heappop(due)
                self.clock.advance(at_s)
                step()

        def arrive(number: int, at_s: float) -> None:
            chain = self._chain(number)
            match = self._ask(number, chain)
            prompt = int(self.workload.inputs[number])
            known = min(match.blocks * self.workload.block_tokens, prompt)
            ready = at_s + float(service.cost.prefill_s(known, prompt))
            later(ready, lambda: self._save(number, chain, match, 0))
            done = ready + outputs[number] / service.decode_tokens_per_s
            later(done, lambda: self._release(match, outputs[number]))

        for number, at_s in enumerate(times):
            catch_up(at_s)
            self.clock.advance(at_s)
            arrive(number, at_s)
            if number % REPORT_EVERY == 0:
                progress(number, len(times))
        catch_up(math.inf)

    def _release(self, match: Match, output_tokens: int) -> None:
        self.tiers.release(match.request_id, output_tokens)
        self.pool.run()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _outcome(self, seconds: float) -> Outcome:
        def totals(*events: Event) -> list[int]:
            return [sum(self.ledger.total(e, size.name).blocks for e in events) for size in self.sizes]

        problems = self.tiers.check()
        assert not problems, problems
        return Outcome(
            policy=self.policy.name,
            sizes=self.sizes,
            blocks=self.workload.blocks,
            hits=self.hits,
            # Tiers are closed under prefix: what is there at all is in the leading run.
            block_hits=int(self.hits.sum()),
            evicted=totals(Event.EVICTED),
            stored=totals(Event.STORED),
            moved=totals(Event.PROMOTED, Event.DEMOTED),
            held=[tier.index.ready for tier in self.tiers.tiers],
            seconds=seconds,
        )


def _fail(error: Exception) -> None:
    if isinstance(error, KVCacheError):
        raise error
    raise AssertionError(f"a background job failed: {error!r}") from error
