"""The contract of :class:`~kvcache_factory.policy.base.EvictionPolicy` as tests to inherit."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..errors import CapacityError
from ..policy.base import EvictionPolicy, RequestHint, ReuseHint
from .forest import Forest

HINTS = [RequestHint(reuse=reuse) for reuse in get_args(ReuseHint)]
CAPACITY = 12
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "use", "pin", "unpin", "drop", "evict", "tick", "finish"]),
        st.integers(0, 1000),
        st.integers(0, 6),
    ),
    max_size=60,
)


class PolicyTests(ABC):
    """Subclass in a test module, implement :meth:`make_policy`, inherit the suite."""

    @abstractmethod
    def make_policy(self, **options: Any) -> EvictionPolicy:
        """A fresh policy with these constructor arguments."""

    # -- description --------------------------------------------------------------------------------------------------

    def test_options_describe_the_policy_completely(self) -> None:
        """clone() and a trip through JSON give equal descriptions, which is what configurations rest on."""
        for policy in (self.make_policy(), self.make_policy(max_size_gb=2.5)):
            again = type(policy)(**json.loads(json.dumps(policy.options())))
            for copy in (policy.clone(), again):
                assert type(copy) is type(policy)
                assert copy is not policy
                assert (copy.options(), repr(copy)) == (policy.options(), repr(policy))
                assert copy.max_size_gb == policy.max_size_gb

    def test_a_policy_has_a_name_for_configurations(self) -> None:
        """Names are short, lower-case and stable."""
        name = self.make_policy().name
        assert name
        assert name == name.lower().strip()

    @pytest.mark.parametrize("size", [0, -1, float("nan")])
    def test_a_cap_that_holds_nothing_is_refused(self, size: float) -> None:
        """A cap of zero or less is a mistake, not a very small cache."""
        with pytest.raises(CapacityError):
            self.make_policy(max_size_gb=size)

    def test_clones_share_nothing(self) -> None:
        """Each tier works on its own clone: events of one are not seen by another."""
        policy = self.make_policy()
        first, second = Forest(policy.clone(), 4), Forest(policy.clone(), 4)
        first.grow(-1, 2)
        assert second.evict(4) == []
        assert len(first.evict(4)) == 2

    def test_binding_again_forgets_everything(self) -> None:
        """bind() is a new beginning, also with another number of rows."""
        policy = self.make_policy()
        Forest(policy, 8).grow(-1, 8)
        for rows in (8, 3, 20):
            again = Forest(policy, rows)
            assert again.evict(rows) == []
            again.grow(-1, rows)
            assert len(again.evict(rows)) == rows

    # -- victims ------------------------------------------------------------------------------------------------------

    def test_a_chain_leaves_from_its_end(self) -> None:
        """Children before parents, so that what remains is still a prefix."""
        forest = Forest(self.make_policy(), 6)
        rows = forest.grow(-1, 6)
        assert forest.evict(4) == rows[:1:-1].tolist()
        assert forest.evict(9) == [rows[1], rows[0]]

    def test_leased_rows_and_their_ancestors_stay(self) -> None:
        """A pin in the middle of a chain holds what is before it and lets go of what is behind it."""
        forest = Forest(self.make_policy(), 6)
        rows = forest.grow(-1, 6)
        forest.pin(int(rows[2]))
        assert forest.evict(6) == rows[:2:-1].tolist()
        forest.unpin(int(rows[2]))
        assert len(forest.evict(6)) == 3

    def test_nobody_leaves_twice(self) -> None:
        """A victim is gone: it is not named again until its number was used again."""
        forest = Forest(self.make_policy(), 4)
        forest.grow(-1, 4)
        assert len(set(forest.evict(2)) | set(forest.evict(2))) == 4
        assert forest.evict(4) == []

    def test_repeated_news_is_no_news(self) -> None:
        """on_evictable is idempotent: saying the same thing twice queues nobody twice."""
        policy = self.make_policy()
        forest = Forest(policy, 3)
        row = int(forest.grow(-1, 1)[0])
        for evictable in (True, True, False, False, True, True):
            policy.on_evictable(row, evictable)
        assert forest.evict(3) == [row]
        assert policy.next_victim() == -1

    def test_what_was_forgotten_is_not_a_victim(self) -> None:
        """forget() ends a row's stay, and its number starts afresh."""
        forest = Forest(self.make_policy(), 4)
        rows = forest.grow(-1, 3)
        forest.drop(int(rows[1]))
        assert forest.evict(4) == [rows[0]]
        again = forest.grow(-1, 4)
        assert sorted(forest.evict(4)) == sorted(again.tolist())

    def test_admission_is_between_none_and_all(self) -> None:
        """admit() says how many of the new blocks are worth evicting others for."""
        policy = self.make_policy()
        forest = Forest(policy, 4)
        forest.grow(-1, 4)
        for count in (1, 5, 1000):
            for hint in HINTS:
                assert 0 <= policy.admit(forest.now, forest.new_keys(count), hint) <= count

    def test_room_is_made_for_what_is_admitted(self) -> None:
        """Nobody leaves for a block that does not come: there are at most as many victims as admitted blocks."""
        for count in (1, 3, 9):
            forest = Forest(self.make_policy(), 4)
            forest.grow(-1, 4)
            admitted, left = forest.make_room(count)
            assert 0 <= admitted <= count
            assert left == forest.departed
            assert len(left) == min(admitted, 4)

    def test_time_may_stand_still_or_go_back(self) -> None:
        """Clocks are injected and need not be good; a policy still finds every victim."""
        forest = Forest(self.make_policy(), 6)
        for seconds in (0.0, -5.0, 1e9, -1e9, 0.0, 0.0):
            forest.tick(seconds)
            forest.grow(-1, 1)
        assert len(forest.evict(6)) == 6

    # -- any order of events ------------------------------------------------------------------------------------------

    @settings(
        max_examples=80,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(EVENTS)
    def test_any_order_of_events_keeps_the_contract(self, events: list[tuple[str, int, int]]) -> None:
        """Random events on a plain tree: every victim may leave, and whoever may leave can be found."""
        forest = Forest(self.make_policy(), CAPACITY)
        for event, pick, count in events:
            play(forest, event, pick, count)
        for row in forest.rows:
            while forest.pins[row]:
                forest.unpin(row)
        forest.evict(CAPACITY)
        assert forest.rows == []

    # -- cost ---------------------------------------------------------------------------------------------------------

    def test_books_do_not_grow_with_the_number_of_events(self) -> None:
        """Queues, ghosts and counts are bounded by the rows, however long the cache runs."""
        policy = self.make_policy()
        forest = Forest(policy, CAPACITY)
        busy(forest, 300)
        early = footprint(policy)
        busy(forest, 6000)
        assert footprint(policy) <= 2 * early + 4096

    def test_finding_a_victim_costs_the_same_however_many_are_leased(self) -> None:
        """Work is counted in lines of Python that run, not in time: leased rows are out of the way, not skipped."""
        few, many = (victim_lines(self.make_policy(), leased) for leased in (64, 4096))
        assert many <= 2 * few + 50


def play(forest: Forest, event: str, pick: int, count: int) -> None:
    """Let one event happen to a row chosen by *pick*, if it can."""
    rows = forest.rows
    row = rows[pick % len(rows)] if rows else -1
    if event == "grow":
        forest.grow(row if pick % 3 else -1, count, HINTS[pick % len(HINTS)])
    elif event == "evict":
        forest.evict(count)
    elif event == "tick":
        forest.tick(count - 1)
    elif row < 0:
        return
    elif event == "use":
        forest.use(row, HINTS[count % len(HINTS)])
    elif event == "pin":
        forest.pin(row)
    elif event == "unpin" and forest.pins[row]:
        forest.unpin(row)
    elif event == "drop":
        forest.drop(row)
    elif event == "finish":
        forest.policy.on_finish(forest.chain(row), count)


def busy(forest: Forest, turns: int) -> None:
    """A cache at work: chains come, are used and leave, with rows leased meanwhile."""
    for turn in range(turns):
        forest.tick()
        rows = forest.rows
        if len(rows) > CAPACITY - 3:
            forest.evict(4)
        elif rows and turn % 2:
            forest.use(rows[turn * 7 % len(rows)])
        else:
            forest.grow(-1 if turn % 4 else (rows or [-1])[0], 1 + turn % 3)


def victim_lines(policy: EvictionPolicy, leased: int) -> int:
    """Lines of Python that run while 16 of 64 free rows leave beside *leased* leased ones."""
    rows = np.arange(leased + 64, dtype=np.int32)
    policy.bind(len(rows), np.arange(2 * len(rows), dtype=np.uint64).reshape(-1, 2))
    for row in rows.tolist():
        policy.on_request(float(row), rows[row : row + 1], 0, HINTS[0])
        policy.on_evictable(row, True)
    for row in rows[:leased].tolist():
        policy.on_request(float(len(rows) + row), rows[row : row + 1], 1, HINTS[0])
        policy.on_evictable(row, False)
    policy.victims(1, lambda row: -1)  # what was put off until now is paid for once
    return lines_run(lambda: policy.victims(16, lambda row: -1))


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python *call* executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def footprint(policy: EvictionPolicy) -> int:
    """Bytes of a policy's attributes, containers included."""
    return _bytes_of(vars(policy), set())


def _bytes_of(thing: object, seen: set[int]) -> int:
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    parts: Iterable[object] = ()
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        parts = list(thing)  # type: ignore[call-overload]
    elif hasattr(thing, "__dict__") and not callable(thing):
        parts = [vars(thing)]
    return sys.getsizeof(thing) + sum(_bytes_of(part, seen) for part in parts)
