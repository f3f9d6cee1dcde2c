"""LRU and FIFO against slow references that look at every leaf."""

from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.policy.base import NO_HINT, EvictionPolicy, RequestHint, Rows
from kvcache_factory.policy.order import FIFOEvictionPolicy, LRUEvictionPolicy, StampOrderPolicy
from kvcache_factory.testing import Forest
from kvcache_factory.testing.policies import EVENTS, play

CAPACITY = 12


class Watched(Forest):
    """A forest that keeps the stamps that a policy should go by, in a dict, and checks who leaves by them."""

    def __init__(self, policy: StampOrderPolicy, by_use: bool) -> None:
        self.by_use = by_use
        self.stamp: dict[int, float] = {}
        self.last = float("-inf")
        super().__init__(policy, CAPACITY)
        remember = policy.on_request

        def on_request(now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
            self.last = max(self.last, now)  # a clock that goes back stands still
            for row in rows[0 if by_use else hit_len :].tolist():
                self.stamp[row] = self.last
            remember(now, rows, hit_len, hint)

        policy.on_request = on_request  # type: ignore[method-assign]

    def _remove(self, row: int) -> None:
        if self.asking:
            oldest = min(self.stamp[r] for r in self.evictable)
            assert self.stamp[row] == oldest, f"row {row} left at {self.stamp[row]}, another leaf is from {oldest}"
        super()._remove(row)

    asking = False

    def evict(self, count: int) -> list[int]:
        self.asking = True
        try:
            return super().evict(count)
        finally:
            self.asking = False


@given(EVENTS)
def test_lru_takes_the_least_recently_used_leaf(events: list[tuple[str, int, int]]) -> None:
    """Whatever happens, each victim is a leaf with the oldest use."""
    forest = Watched(LRUEvictionPolicy(), by_use=True)
    for event, pick, count in events:
        play(forest, event, pick, count)


@given(EVENTS)
def test_fifo_takes_the_leaf_that_came_first(events: list[tuple[str, int, int]]) -> None:
    """Whatever is used, each victim is a leaf with the oldest arrival."""
    forest = Watched(FIFOEvictionPolicy(), by_use=False)
    for event, pick, count in events:
        play(forest, event, pick, count)


def conversation(policy: EvictionPolicy) -> Forest:
    """Three chains of two blocks, stored one after the other; the first is used again."""
    forest = Forest(policy, 6)
    for _ in range(3):
        forest.tick()
        forest.grow(-1, 2)
    forest.tick()
    forest.use(1, NO_HINT)
    return forest


def test_what_was_used_stays_under_lru_and_leaves_under_fifo() -> None:
    """The difference between the two, in one picture."""
    assert conversation(LRUEvictionPolicy()).evict(6) == [3, 2, 5, 4, 1, 0]
    assert conversation(FIFOEvictionPolicy()).evict(6) == [1, 0, 3, 2, 5, 4]


@given(st.lists(st.integers(0, 5), max_size=200))
def test_the_queue_is_swept_before_it_is_long(uses: list[int]) -> None:
    """Every use of an evictable row leaves an entry behind; they are swept when they outnumber the rest."""
    policy = LRUEvictionPolicy()
    forest = Forest(policy, 6)
    for _ in range(6):
        forest.grow(-1, 1)
    for row in uses:
        forest.tick()
        forest.use(row)
        assert len(policy._heap) <= 2 * 6 + 64 + 1
    assert len(forest.evict(6)) == 6
