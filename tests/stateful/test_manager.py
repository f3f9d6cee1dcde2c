"""The whole manager against a plain dict: any order of calls, with faults, lost requests and time passing."""

from __future__ import annotations

import threading
from typing import ClassVar, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache_factory.block.envelope import Fidelity
from kvcache_factory.block.key import KeyChain
from kvcache_factory.block.plan import Match
from kvcache_factory.engine.index import Reservation
from kvcache_factory.engine.io import Lane
from kvcache_factory.engine.ledger import Event
from kvcache_factory.engine.tree import READY
from kvcache_factory.errors import SessionExistsError, UnknownSessionError
from kvcache_factory.manager import CacheManager
from kvcache_factory.testing import Fail, FakeEngine, FaultyStore, at, small_cache

Blocks = tuple[int, ...]
"""A conversation as the numbers of its blocks: equal beginnings are equal prefixes."""

MAX_AGE = 100.0
POOL: list[Blocks] = [
    (0,),
    (0, 1, 2),
    (0, 1, 2, 0, 1),
    (0, 1, 2, 0, 1, 2, 2, 2),
    (0, 1, 0, 0),
    (1, 1, 1, 1, 1, 1),
    (1, 2),
    (2, 0, 0, 1, 2),
]
"""Few conversations with much in common, so that most requests meet something of an earlier one."""
conversations = st.sampled_from(POOL)
names = st.sampled_from(["a", "b"])
requests = st.sampled_from(["r0", "r1", "r2"])


class Held(NamedTuple):
    """A request's lease as the model sees it, and the versions that its blocks may have."""

    blocks: Blocks
    chain: KeyChain
    match: Match
    versions: list[set[int]]
    created: float


class CacheMachine(RuleBasedStateMachine):
    """Rules over one small cache; subclasses say how many blocks each tier has.

    ``may`` maps a prefix to the versions of exact bytes that were stored under it since it was last dropped: nothing
    else may ever come back.  ``must`` holds prefixes that have no excuse to be missing; an eviction from the only place
    where they are, or a fault, is an excuse.
    """

    levels: ClassVar[tuple[int, ...]]
    roomy: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        cache = small_cache(*self.levels, integrity="full", lease_max_age_s=MAX_AGE, prepare=self._prepare)
        self.manager, self.space, self.engine = cache
        self.chain = self.manager._chain
        self.other_engine = FakeEngine(self.engine.spec, 16, kind="paged")
        self.may: dict[Blocks, set[int]] = {}
        self.must: set[Blocks] = set()
        self.charged: dict[str, set[Blocks]] = {}
        self.ended: set[str | None] = set()
        self.held: dict[str, Held] = {}
        self.damaged: set[Blocks] = set()
        self.copied_down = len(self.levels) > 1
        self.pending: list[tuple[KeyChain, Blocks, Reservation]] = []
        self.chains: dict[Blocks, KeyChain] = {}
        self.gate: threading.Event | None = None
        self.version = 0

    def _prepare(self, manager: CacheManager) -> None:
        for tier in manager._chain.tiers:
            tier.store = FaultyStore(tier.store)
            tier._clock = lambda: self.now
        manager._chain.leases._clock = lambda: self.now

    # -- what the model says ------------------------------------------------------------------------------------------

    def _chain_of(self, blocks: Blocks) -> KeyChain:
        if blocks not in self.chains:  # kept, so that what a chain object remembers of its rows is tested as well
            self.chains[blocks] = self.space.chain(
                [10 * block + i for block in blocks for i in range(self.space.block_tokens)]
            )
        return self.chains[blocks]

    def _leading(self, blocks: Blocks, known: set[Blocks] | dict[Blocks, set[int]]) -> int:
        ends = range(1, len(blocks) + 1)
        return next((end - 1 for end in ends if blocks[:end] not in known), len(blocks))

    def _forget(self, prefix: Blocks) -> None:
        for known in [p for p in self.may if p[: len(prefix)] == prefix]:
            del self.may[known]
        self.must = {p for p in self.must if p[: len(prefix)] != prefix}

    def _stored(self, blocks: Blocks, first: int, *, complete: bool) -> None:
        """Note that blocks *first* .. may now be stored as the current version; *complete*: that they must be."""
        waiting = {prefix[:end] for _, prefix, _ in self.pending for end in range(1, len(prefix) + 1)}
        for end in range(first + 1, len(blocks) + 1):
            self.may.setdefault(blocks[:end], set()).add(self.version)
        if not self.roomy or not complete or self._leading(blocks[:first], self.must) < first:
            return
        for end in range(first + 1, len(blocks) + 1):
            if blocks[:end] in waiting:
                break
            self.must.add(blocks[:end])

    def _charge(self, session: str | None, blocks: Blocks) -> None:
        if session in self.charged:
            self.charged[session] |= {blocks[:end] for end in range(1, len(blocks) + 1)}

    def _expire(self) -> None:
        """What every look-up does with leases of lost requests."""
        self.held = {request: held for request, held in self.held.items() if held.created > self.now - MAX_AGE}

    def _store_of(self, number: int) -> FaultyStore:
        store = self.chain.tiers[number].store
        assert isinstance(store, FaultyStore)
        return store

    def _break_next(self, number: int, op: str) -> None:
        self._resume()
        store = self._store_of(number)
        store.schedule = at({(op, store.calls[op]): Fail()})

    def _repair(self) -> None:
        self.manager.wait()
        for number in range(len(self.levels)):
            self._store_of(number).schedule = at({})

    @initialize(first=conversations, second=conversations)
    def begin(self, first: Blocks, second: Blocks) -> None:
        """Start with something to find."""
        self.save(first, 0, None, False)
        self.save(second, 0, None, True)

    # -- background work ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.levels) > 1 and self.gate is None)
    @rule()
    def stop_background(self) -> None:
        """Copies between tiers queue up: calls meet blocks that have not arrived below yet."""
        began, gate = threading.Event(), threading.Event()
        self.gate = gate
        self.chain.flow.io.submit(Lane.LOAD, lambda: (began.set(), gate.wait()))
        assert began.wait(60)

    @precondition(lambda self: self.gate is not None)
    @rule()
    def resume_background(self) -> None:
        """They go on, whatever has become of their blocks."""
        self._resume()

    def _settle(self) -> None:
        """Let background work end unless it is stopped: a rule of several calls must do the same in every run."""
        assert self.gate is not None or self.manager.wait(60)

    def _resume(self) -> None:
        if self.gate is not None:
            self.gate.set()
            self.gate = None
            assert self.manager.wait(60)

    # -- saving -------------------------------------------------------------------------------------------------------

    @rule(blocks=conversations, first=st.sampled_from([0, 0, 0, 1, 3]), session=st.none() | names, paged=st.booleans())
    def save(self, blocks: Blocks, first: int, session: str | None, paged: bool) -> None:
        """Store what is missing, from any block on, out of either kind of engine."""
        self.version += 1
        chain, engine = self._chain_of(blocks), self.other_engine if paged else self.engine
        part = engine.compute(chain, self.version)[first:]
        self.space.save(chain, engine.region, part, first=first, session=session)
        self._settle()
        if len(part) and session not in self.ended:
            self._stored(blocks, first, complete=True)
            self._charge(session, blocks)

    @rule(blocks=conversations)
    def save_lossy(self, blocks: Blocks) -> None:
        """Lossy blocks may rest anywhere; nobody who asks for exact ones gets them."""
        self.version += 1
        chain = self._chain_of(blocks)
        positions = self.engine.compute(chain, self.version)
        self.space.save(chain, self.engine.region, positions, fidelity=Fidelity.BOUNDED)

    @rule(blocks=conversations)
    def save_while_memory_fails(self, blocks: Blocks) -> None:
        """A copy that fails leaves nothing visible."""
        self.version += 1
        chain = self._chain_of(blocks)
        positions = self.engine.compute(chain, self.version)
        self._break_next(0, "memory")
        assert self.space.save(chain, self.engine.region, positions) == 0
        self._repair()
        self._excuse_evictions()

    @precondition(lambda self: len(self.levels) > 1)
    @rule(blocks=conversations)
    def save_while_the_next_tier_fails(self, blocks: Blocks) -> None:
        """Write-behind fails: what was saved stays in the first tier."""
        self._break_next(1, "write")
        self.save(blocks, 0, None, False)
        self._repair()
        self.copied_down = False

    @precondition(lambda self: len(self.pending) < 2)
    @rule(blocks=conversations)
    def begin_a_slow_save(self, blocks: Blocks) -> None:
        """An operation reserves rows and takes its time."""
        chain = self._chain_of(blocks)
        reserved = self.chain.tiers[0].index.reserve(chain, self.space.root, 0, chain.num_blocks)
        self.chain.tiers[0].count_left(reserved, self.chain.flow.below(0))
        if len(reserved.rows):
            self.pending.append((chain, blocks[: reserved.first + len(reserved.rows)], reserved))

    @precondition(lambda self: self.pending)
    @rule(succeed=st.booleans())
    def end_a_slow_save(self, succeed: bool) -> None:
        """Its copy succeeds, or is given up, whatever has happened to its rows meanwhile."""
        chain, blocks, reserved = self.pending.pop(0)
        tier = self.chain.tiers[0]
        if not succeed:
            tier.abort(reserved.rows)
            self.must = {p for p in self.must if p[: reserved.first + 1] != blocks[: reserved.first + 1]}
            return
        self.version += 1
        span = slice(reserved.first, reserved.first + len(reserved.rows))
        region, positions = self.engine.region, self.engine.compute(chain, self.version)[span]
        self.chain.mover.gather(tier, reserved.rows, region, positions)
        tier.index.layout[reserved.rows] = self.chain.mover.layout_code(region.tag)
        tier.seal(reserved.rows, "full")
        committed = tier.index.commit(reserved.rows)
        tier.count(Event.STORED, committed)
        self._stored(blocks[: reserved.first + committed], reserved.first, complete=False)

    # -- matching and loading -----------------------------------------------------------------------------------------

    @rule(request=requests, blocks=conversations, session=st.none() | names, limit=st.none() | st.integers(0, 5))
    def match(self, request: str, blocks: Blocks, session: str | None, limit: int | None) -> None:
        """Nothing comes back that was not stored, and nothing is missing without an excuse."""
        chain = self._chain_of(blocks)
        tokens = None if limit is None else limit * self.space.block_tokens + 1
        asked = blocks if limit is None else blocks[:limit]
        peeked = self.space.peek(chain)
        match = self.space.match(chain, request, max_tokens=tokens, session=session)
        assert self._leading(asked, self.must) <= match.blocks <= self._leading(asked, self.may), match
        assert match.tokens == match.blocks * self.space.block_tokens
        assert match.blocks <= peeked
        self._charge(session, asked[: match.blocks])
        versions = [set(self.may[asked[: end + 1]]) for end in range(match.blocks)]
        self.held[request] = Held(blocks, chain, match, versions, self.now)
        self._expire()

    @rule(request=requests, blocks=conversations, session=st.none() | names, paged=st.booleans(), end=st.booleans())
    def turn(self, request: str, blocks: Blocks, session: str | None, paged: bool, end: bool) -> None:
        """What an engine does: look up, load, compute the rest, save it, and mostly give back."""
        self.match(request, blocks, session, None)
        self._load(request, paged, False, 0)
        self.save(blocks, self.held[request].match.blocks, session, paged)
        if end:
            self.release(request)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 5), paged=st.booleans(), fail=st.booleans(), fewer=st.integers(0, 2))
    def load(self, pick: int, paged: bool, fail: bool, fewer: int) -> None:
        """What a lease holds comes back byte for byte, also after it was dropped, evicted above or forgotten."""
        self._load(sorted(self.held)[pick % len(self.held)], paged, fail, fewer)

    def _load(self, request: str, paged: bool, fail: bool, fewer: int) -> None:
        blocks, chain, match, versions, _ = self.held[request]
        count = max(match.blocks - fewer, 0)
        engine = self.other_engine if paged else self.engine
        engine.erase()
        if fail and count:
            tier = match.segments[0].tier
            self._break_next(tier, "memory")
            assert self.space.load(match, engine.region, engine.positions(count)) == 0
            self._repair()
            self._excuse_damage()
        loaded = self.space.load(match, engine.region, engine.positions(count))
        self._settle()
        sound = next((end for end in range(count) if blocks[: end + 1] in self.damaged), count)
        assert sound <= loaded <= count
        got = engine.versions(chain, loaded, set().union(*versions))
        assert all(version in allowed for version, allowed in zip(got, versions, strict=False)), (got, versions)
        if loaded < count:
            self._excuse_damage()

    @rule(request=requests)
    def release(self, request: str) -> None:
        """Giving back is idempotent and says whether there was anything to give."""
        assert self.space.release(request) == (self.held.pop(request, None) is not None)

    @rule(request=requests)
    def load_after_release(self, request: str) -> None:
        """A request that has ended loads nothing."""
        held = self.held.pop(request, None)
        if held is None:
            return
        self.space.release(request)
        assert self.space.load(held.match, self.engine.region, self.engine.positions(held.match.blocks)) == 0

    @rule(seconds=st.sampled_from([1.0, 60.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        """Leases of lost requests end with the next match after their time."""
        self.now += seconds

    @rule(blocks=conversations)
    def prefetch(self, blocks: Blocks) -> None:
        """Bringing blocks up changes nothing that can be seen."""
        self.space.prefetch(self._chain_of(blocks))
        self._resume()  # until it has ended, a prefetch holds a lease of its own
        self._expire()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _excuse_evictions(self) -> None:
        if not self.copied_down or self.gate is not None:
            self.must.clear()

    def _excuse_damage(self) -> None:
        self.must = {p for p in self.must if not any(p[: len(d)] == d for d in self.damaged)}

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        """What leaves the first tier is still in the next, if it got there."""
        assert 0 <= self.manager.evict(count) <= count
        self._excuse_evictions()

    @rule(blocks=conversations, first=st.integers(0, 2))
    def drop(self, blocks: Blocks, first: int) -> None:
        """What is dropped is gone from every tier, with all that was built on it, and does not come back."""
        self.space.drop(self._chain_of(blocks), first)
        if first < len(blocks):
            self._forget(blocks[: first + 1])

    @rule()
    def reset(self) -> None:
        """Everything is gone, sessions stay."""
        self._resume()
        self.manager.reset()
        self.may.clear()
        self.must.clear()
        self.charged = {session: set() for session in self.charged}

    @rule(pick=st.integers(0, 1000), bit=st.integers(0, 3000))
    def flip_a_bit(self, pick: int, bit: int) -> None:
        """A bit of a resting block changes: it is a miss from now on, never an answer."""
        tier = self.chain.tiers[pick % len(self.levels)]
        rows = [row for row in range(tier.index.capacity) if tier.index.state[row] == READY]
        if not rows:
            return
        row = rows[pick % len(rows)]
        payload = tier.store.payload(row)
        assert payload is not None
        payload[bit // 8] ^= 1 << bit % 8
        tokens = tier.index.stored_chain(row, self.chain.roots).token_blocks
        self.damaged.add(tuple(int(first) // 10 for first in tokens[:, 0]))
        self._excuse_damage()

    # -- sessions -----------------------------------------------------------------------------------------------------

    @rule(name=names)
    def create_session(self, name: str) -> None:
        """An id can be taken once."""
        try:
            self.manager.create_session(name)
            assert name not in self.charged
            self.charged[name] = set()
            self.ended.discard(name)
        except SessionExistsError:
            assert name in self.charged

    @rule(name=names, destroy=st.booleans())
    def end_session(self, name: str, destroy: bool) -> None:
        """A session takes along at most what only it references."""
        others = set().union(*(held for other, held in self.charged.items() if other != name))
        alone = self.charged.get(name, set()) - others
        try:
            if destroy:
                assert self.manager.destroy_session(name) == (name in self.charged)
                if self.charged.pop(name, None) is not None:
                    self.ended.add(name)
            else:
                self.manager.clear_session(name)
                self.charged[name] = set()
        except UnknownSessionError:
            assert name not in self.charged
        self.must -= alone

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        """No invariant is broken, budgets are kept, and the manager knows of as many leases as the model."""
        self._settle()
        assert self.manager.check() == []
        state = self.manager.state()
        assert all(tier["held_bytes"] <= tier["budget_bytes"] for tier in state["tiers"])
        assert state["leases"] == len(self.held)
        assert {row["session"]: row["blocks"] for row in state["sessions"]} == {
            name: len(held) for name, held in self.charged.items()
        }

    def teardown(self) -> None:
        """When all is given back, every block can leave: no pin was lost."""
        self._resume()
        while self.pending:
            self.end_a_slow_save(False)
        for request in list(self.held):
            self.release(request)
        self.sound()
        for number in reversed(range(len(self.levels))):
            self.chain.evict(self.levels[number], number)
            assert self.chain.tiers[number].index.used == 0
        self.sound()
        self.manager.close()
        self.manager.close()


class OneRoomyTier(CacheMachine):
    """Nothing has to leave: every block that was stored is found."""

    levels = (200,)
    roomy = True


class OneTightTier(CacheMachine):
    """Everything has to leave all the time."""

    levels = (7,)
    roomy = False


class TwoRoomyTiers(CacheMachine):
    """Eviction from the first tier loses nothing."""

    levels = (200, 400)
    roomy = True


class TwoTightTiers(CacheMachine):
    """Blocks move up and down and fall out below."""

    levels = (5, 9)
    roomy = False


class ThreeTightTiers(CacheMachine):
    """A tier in the middle is both above and below."""

    levels = (4, 6, 9)
    roomy = False


FEW = settings(max_examples=50, stateful_step_count=40)


class TestOneRoomyTier(OneRoomyTier.TestCase):
    settings = FEW


class TestOneTightTier(OneTightTier.TestCase):
    settings = FEW


class TestTwoRoomyTiers(TwoRoomyTiers.TestCase):
    settings = FEW


class TestTwoTightTiers(TwoTightTiers.TestCase):
    settings = FEW


class TestThreeTightTiers(ThreeTightTiers.TestCase):
    settings = FEW
