"""`target="session"`: a whole idle session goes, from the ends of its chains, except what others share."""

from __future__ import annotations

from kvcache_factory import HybridPolicy, LRUEvictionPolicy, SizeAwarePolicy
from kvcache_factory.policy.base import RequestHint
from kvcache_factory.policy.hybrid import voice_of
from kvcache_factory.testing.forest import Forest


def says(session: str) -> RequestHint:
    return RequestHint(session=session)


def forest(rows: int = 16) -> Forest:
    return Forest(voice_of(LRUEvictionPolicy(target="session")), rows)


def swap(made: Forest, count: int) -> list[int]:
    made.departed = []
    return made.policy.swap_victims(count, made._unlink)


def test_a_whole_session_is_moved_and_nobody_else() -> None:
    """Asked for one block, the policy names all of the idle session, two branches included; the shared prompt stays."""
    made = forest()
    system = made.grow(-1, 2, says("a"))
    first = made.grow(int(system[1]), 2, says("a"))
    retry = made.grow(int(system[1]), 1, says("a"))
    made.tick()
    made.use(int(system[1]), says("b"))
    other = made.grow(int(system[1]), 2, says("b"))
    assert sorted(swap(made, 1)) == sorted([*first.tolist(), *retry.tolist()])
    assert set(made.rows) == {*system.tolist(), *other.tolist()}


def test_a_session_that_is_used_meanwhile_stays() -> None:
    """Half of it had left when it came back: the rest waits for its turn again."""
    made = forest()
    mine = made.grow(-1, 4, says("a"))
    made.tick()
    other = made.grow(-1, 2, says("b"))
    assert made.evict(2) == mine[:1:-1].tolist()
    made.tick()
    made.use(int(mine[1]), says("a"))
    assert made.evict(1) == other[1:].tolist()


def test_without_sessions_a_branch_goes() -> None:
    """Requests outside of sessions still belong together by their chain."""
    made = forest()
    trunk = made.grow(-1, 2)
    branch = made.grow(int(trunk[1]), 3)
    made.tick()
    other = made.grow(int(trunk[1]), 1)
    assert swap(made, 1) == branch[::-1].tolist()
    assert set(made.rows) == {*trunk.tolist(), *other.tolist()}


def test_sessions_that_have_gone_are_forgotten() -> None:
    """Names are kept for as long as a session has blocks."""
    made = forest(4)
    for number in range(50):
        made.evict(4)
        made.grow(-1, 3, says(f"session {number}"))
    policy = made.policy
    assert len(vars(policy)["_numbers"]) <= 2


def test_who_is_evicted_and_who_is_moved_can_differ() -> None:
    """Part of a document's example: room at once by size, ahead of need by idle session."""
    hybrid = HybridPolicy([SizeAwarePolicy(), LRUEvictionPolicy(target="session", action="swap_to_cpu")])
    made = Forest(hybrid.clone(), 16)
    idle = made.grow(-1, 2, says("idle"))
    made.tick()
    large = made.grow(-1, 5, says("busy"))
    assert made.evict(1) == large[4:].tolist()
    assert swap(made, 1) == idle[::-1].tolist()
    assert made.evict(9) == large[3::-1].tolist()
