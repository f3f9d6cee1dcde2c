"""Sessions against a naive model: who references what, what quotas let, and who can read whose blocks."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache_factory import SessionSettings
from kvcache_factory.block.key import KeyChain
from kvcache_factory.testing import FakeEngine, sized_level, small_cache, tiny_identity, tiny_spec

Prefix = tuple[int, ...]
"""A block by the numbers of the blocks up to it."""

POOL: list[Prefix] = [(0,), (0, 1, 2), (0, 1, 3, 3), (1, 1, 1, 1, 1), (1, 2), (2, 0, 0), (3, 1, 2, 3, 4, 5)]
NAMES = ["a", "b", "c", "d"]
names = st.sampled_from(NAMES)
conversations = st.sampled_from(POOL)
SPEC = tiny_spec()


def gib(blocks: int) -> float:
    return float(sized_level(blocks, SPEC).size_gb or 0)


def prefixes(blocks: Prefix) -> list[Prefix]:
    return [blocks[:end] for end in range(1, len(blocks) + 1)]


class Naive:
    """A session as a list: references from the longest unused to the latest, the ends of a chain before its root."""

    def __init__(self, quota: int | None, tenant: str, refuse: bool) -> None:
        self.quota, self.tenant, self.refuse = quota, tenant, refuse
        self.pinned = False
        self.refs: list[Prefix] = []

    def use(self, chain: list[Prefix]) -> None:
        self.refs = [ref for ref in self.refs if ref not in chain] + [
            ref for ref in reversed(chain) if ref in self.refs
        ]


class SessionMachine(RuleBasedStateMachine):
    """One roomy tier, so that blocks leave by quotas only, and every reference of the model must be a real one."""

    sessions: ClassVar[SessionSettings]
    tenant_quota: ClassVar[int | None]
    total_quota: ClassVar[int | None]

    def __init__(self) -> None:
        super().__init__()
        self.cache = small_cache(256, spec=SPEC, sessions=self.sessions)
        self.manager = self.cache.manager
        self.time = 0.0
        self.manager._sessions.clock = self._tick
        self.model: dict[str, Naive] = {}
        self.age: dict[str, float] = {}

    def _tick(self) -> float:
        self.time += 1.0
        return self.time

    def teardown(self) -> None:
        self.manager.close()

    def _chain(self, blocks: Prefix) -> KeyChain:
        return self.cache.space.chain([10 * block + i for block in blocks for i in range(SPEC.block_tokens)])

    # -- the model ----------------------------------------------------------------------------------------------------

    def _groups(self, name: str) -> list[tuple[list[str], int | None]]:
        """Who shares a quota with *name*, itself first and then the longest idle, and that quota."""
        mine = self.model[name]
        others = sorted((n for n in self.model if n != name), key=lambda n: self.age[n])
        tenants = [n for n in others if self.model[n].tenant == mine.tenant]
        return [([name], mine.quota), ([name, *tenants], self.tenant_quota), ([name, *others], self.total_quota)]

    def _held(self, members: list[str]) -> set[Prefix]:
        return {ref for name in members for ref in self.model[name].refs}

    def _charge(self, name: str, chain: list[Prefix]) -> None:
        session = self.model[name]
        self.age[name] = self.time
        session.use(chain)
        fitting = len(chain)
        for members, quota in self._groups(name):
            if quota is None:
                continue
            for giver in members:
                self._give(giver, name, members, chain, quota)
                if session.refuse:
                    break
            held = self._held(members)
            new = 0
            for number, ref in enumerate(chain):
                new += ref not in held
                if len(held) + new > quota:
                    fitting = min(fitting, number)
                    break
        fits = chain[:fitting]
        session.refs = [ref for ref in session.refs if ref not in fits] + fits[::-1]

    def _give(self, giver: str, asker: str, members: list[str], chain: list[Prefix], quota: int) -> None:
        other = self.model[giver]
        if other.pinned or other.refuse:
            return
        for ref in [ref for ref in other.refs if giver != asker or ref not in chain]:
            if len(self._held(members) | set(chain)) <= quota:
                return
            other.refs.remove(ref)

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(name=names, quota=st.sampled_from([None, 1, 3, 5]), tenant=st.sampled_from("xy"), refuse=st.booleans())
    def create(self, name: str, quota: int | None, tenant: str, refuse: bool) -> None:
        if name in self.model:
            return
        options: dict[str, Any] = {} if quota is None else {"quota_gb": gib(quota)}
        answer = "refuse" if refuse else "evict"
        self.manager.create_session(name, labels={"tenant": tenant}, on_quota=answer, **options)
        self.model[name] = Naive(quota, tenant, refuse)
        self.age[name] = self.time

    @rule(name=names, blocks=conversations)
    def save(self, name: str, blocks: Prefix) -> None:
        if name not in self.model:
            return
        chain = self._chain(blocks)
        self.cache.space.save(chain, self.cache.engine.region, self.cache.engine.compute(chain), session=name)
        self._charge(name, prefixes(blocks))

    @rule(name=names, blocks=conversations)
    def find(self, name: str, blocks: Prefix) -> None:
        if name not in self.model:
            return
        match = self.cache.space.match(self._chain(blocks), "r", session=name)
        self.cache.space.release("r")
        self._charge(name, prefixes(blocks)[: match.blocks])

    @rule(source=names, name=names)
    def fork(self, source: str, name: str) -> None:
        if source not in self.model or name in self.model:
            return
        self.manager.fork_session(source, name)
        old = self.model[source]
        made = self.model[name] = Naive(None, old.tenant, self.sessions.on_quota == "refuse")
        made.refs = list(old.refs)  # those who share a quota with the source hold these already
        self.age[name] = self.time

    @rule(name=names, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if name in self.model:
            self.manager.pin_session(name, pinned)
            self.model[name].pinned = pinned
            self.age[name] = self.time

    @rule(name=names)
    def clear(self, name: str) -> None:
        if name in self.model:
            self.manager.clear_session(name)
            self.model[name].refs = []

    @rule(name=names)
    def destroy(self, name: str) -> None:
        assert self.manager.destroy_session(name) == (name in self.model)
        self.model.pop(name, None)

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def quotas_hold(self) -> None:
        """In bytes of each tier, and by the books' own account."""
        assert self.manager.check() == []
        for session in self.manager.state()["sessions"]:
            for tier, most in session["tier_quota_bytes"].items():
                assert session["tier_bytes"][tier] <= most
        for group in self.manager.state()["session_groups"]:
            most = {"tenant=x": self.tenant_quota, "tenant=y": self.tenant_quota, "total": self.total_quota}
            limit = most[group["group"]]
            assert limit is None or group["tier_bytes"]["cpu"] <= gib(limit) * (1 << 30)

    @invariant()
    def charges_are_those_of_the_model(self) -> None:
        """The same blocks, session by session; and what nobody references is not there."""
        for name, naive in self.model.items():
            held = self.manager.session(name).held
            assert len(naive.refs) == len(set(naive.refs))
            expected = [self._chain(ref).keys[-1] for ref in naive.refs]
            assert len(held) == len(expected), (name, naive.refs)
            assert all(held.knows(key[None]).all() for key in expected), name
        everything = self._held(list(self.model))
        assert self.manager._chain.tiers[0].index.ready == len(everything)


class Unlimited(SessionMachine):
    sessions = SessionSettings()
    tenant_quota = total_quota = None


class Limited(SessionMachine):
    sessions = SessionSettings(total_gb=gib(9), label_gb={"tenant": {"*": gib(6)}})
    tenant_quota, total_quota = 6, 9


STEPS = settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestUnlimited = Unlimited.TestCase
TestUnlimited.settings = STEPS
TestLimited = Limited.TestCase
TestLimited.settings = STEPS


# -- quotas by tier ---------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.sampled_from(["save", "load", "clear", "fork", "pin"]), names, conversations), max_size=25
)


@settings(max_examples=40, deadline=None)
@given(steps=steps)
def test_no_tier_ever_holds_more_than_its_quota(steps: list[tuple[str, str, Prefix]]) -> None:
    """Whatever is stored, found, promoted and copied down, in whatever order, also in the background."""
    rules = SessionSettings(total_gb={"gpu": gib(5)}, label_gb={"tenant": {"x": {"cpu": gib(6)}}})
    cache = small_cache(12, 64, spec=SPEC, sessions=rules)
    tokens = SPEC.block_tokens
    for name in NAMES:
        tenant = "x" if name in "ab" else "y"
        cache.manager.create_session(name, quota_gb={"gpu": gib(2)}, labels={"tenant": tenant})
    for number, (verb, name, blocks) in enumerate(steps):
        chain = [10 * block + i for block in blocks for i in range(tokens)]
        if verb == "save":
            cache.save(chain, session=name)
        elif verb == "load":
            with cache.manager.use_session(name):
                assert set(cache.load(chain)) <= {0}
        elif verb == "clear":
            cache.manager.clear_session(name)
        elif verb == "fork":
            cache.manager.fork_session(name, f"fork {number}", quota_gb={"gpu": gib(1)})
        else:
            cache.manager.pin_session(name, bool(number % 2))
        # A background copy is found a moment before it is counted; counts are compared below, at rest.
        assert [problem for problem in cache.manager.check() if "blocks came" not in problem] == []
    cache.manager.wait()
    assert cache.manager.check() == []
    cache.manager.close()


# -- salts ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(POOL)), min_size=1, max_size=12),
    forks=st.booleans(),
)
def test_no_session_reads_blocks_of_another_salt(said: list[tuple[int, Prefix]], forks: bool) -> None:
    """Three tenants say the same things into one manager: each finds what it said itself, and nothing else.

    The bytes of a block depend on the identity that it was computed under, so that a foreign block would be seen even
    where its key were found.
    """
    cache = small_cache(256, spec=SPEC)
    salts = ["", "one", "two"]
    spaces = [cache.manager.register(SPEC, tiny_identity(SPEC, salt=salt)) for salt in salts]
    engine = FakeEngine(SPEC, 16)
    for salt in salts:
        cache.manager.create_session(f"tenant {salt}")
    stored: list[set[Prefix]] = [set(), set(), set()]
    for number, (who, blocks) in enumerate(said):
        session = f"tenant {salts[who]}"
        if forks:
            cache.manager.fork_session(session, f"{session} {number}")
            session = f"{session} {number}"
        chain = spaces[who].chain([10 * block + i for block in blocks for i in range(SPEC.block_tokens)])
        with cache.manager.use_session(session):
            match = spaces[who].match(chain, "r")
            engine.erase()
            loaded = spaces[who].load(match, engine.region, engine.positions(match.blocks))
            spaces[who].release("r")
            own = [prefix in stored[who] for prefix in prefixes(blocks)]
            assert match.blocks == loaded == (own.index(False) if False in own else len(own))
            assert engine.versions(chain, loaded) == [0] * loaded
            spaces[who].save(chain, engine.region, engine.compute(chain))
        stored[who] |= set(prefixes(blocks))
    cache.manager.close()
