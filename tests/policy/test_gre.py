"""GRE: what it learns, whom it evicts, and that its loops do the same in Python as compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvcache_factory import GREEvictionPolicy, jit
from kvcache_factory.policy import hazard, spells
from kvcache_factory.policy.base import RequestHint
from kvcache_factory.testing.forest import Forest

KERNELS = (hazard._count, hazard._gittins, spells.touch, spells.finish, spells.bid, spells.leave)


@pytest.fixture
def in_python() -> Iterator[None]:
    """The fallbacks, also where numba has compiled the loops."""
    compiled = [kernel.compiled for kernel in KERNELS]
    for kernel in KERNELS:
        kernel.compiled = None
    yield
    for kernel, before in zip(KERNELS, compiled, strict=True):
        kernel.compiled = before


def ring(count: int, seed: int = 0) -> np.ndarray:
    """Spells of a few classes, in the order of their beginnings, some of them ended."""
    random = np.random.default_rng(seed)
    made = np.zeros((count, 5))
    made[:, hazard.START] = np.sort(random.uniform(0, 5000, count))
    made[:, hazard.END] = np.where(random.random(count) < 0.3, random.integers(0, 20, count), -1)
    made[:, hazard.CLASS] = random.choice([0, 7, 400, 1574], count)
    made[:, hazard.WEIGHT] = random.uniform(0.1, 1, count)
    made[:, hazard.NUMBER] = np.arange(count)
    return made


def test_the_table_is_the_same_in_numpy_and_compiled(in_python: None) -> None:
    """Where numba is not there, the same things are learned."""
    spells_so_far = ring(2000)
    plain = hazard.index_table(spells_so_far, 6000.0)
    assert jit.warm_up()
    for kernel in KERNELS:
        kernel.compile()
    np.testing.assert_allclose(hazard.index_table(spells_so_far, 6000.0), plain, rtol=1e-9)


def test_the_index_is_the_best_ratio_over_all_horizons() -> None:
    """Step 7, written out."""
    hazards = np.random.default_rng(1).uniform(0, 0.6, (3, hazard.BUCKETS))
    widths = np.diff(hazard.EDGES[:-1], prepend=0.0).tolist()
    widths.append(widths[-1] * hazard.GROWTH)
    found = hazard._indices(hazards)
    for row, at in ((0, 0), (1, 5), (2, 27)):
        alive, hits, spent, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(at, hazard.BUCKETS):
            chance = hazards[row, bucket]
            hits += alive * chance
            spent += alive * widths[bucket] * (1 - chance / 2)
            alive *= 1 - chance
            best = max(best, hits / spent)
        assert found[row, at] == pytest.approx(best)


def test_a_class_without_spells_has_the_index_of_its_coarse_class() -> None:
    """New classes fall back smoothly, and with no spells at all every class is worth the same."""
    nothing = hazard.index_table(ring(0), 0.0)
    assert np.ptp(nothing, axis=0).max() == 0
    table = hazard.index_table(ring(2000), 6000.0)
    np.testing.assert_array_equal(table[1], table[34])  # both in the coarse class of 0 and 7, and never seen
    assert (table[0] != table[1]).any()


def busy(policy: GREEvictionPolicy, turns: int = 600) -> list[int]:
    """Chats that return beside prompts that never do; returns who left."""
    random = np.random.default_rng(3)
    made, left = Forest(policy, 200), []
    tips: list[int] = []
    for _ in range(turns):
        made.tick(3.0)
        if len(made.rows) > 180:
            left += made.evict(20)
        tips = [tip for tip in tips if tip in made.parent]
        if tips and random.random() < 0.4:
            made.use(tips[int(random.integers(len(tips)))])
        else:
            tips.append(int(made.grow(-1, int(random.integers(1, 5)))[-1]))
    return left


def test_victims_are_the_same_in_python_and_compiled(in_python: None) -> None:
    """Random numbers included: a run can be repeated anywhere."""
    plain = busy(GREEvictionPolicy())
    assert jit.warm_up()
    for kernel in KERNELS:
        kernel.compile()
    assert busy(GREEvictionPolicy()) == plain
    assert busy(GREEvictionPolicy(seed=2)) != plain


def test_before_anything_is_learned_the_least_recently_used_leaves() -> None:
    """A flat table is a tie, and ties are broken by age, then by depth."""
    made = Forest(GREEvictionPolicy(), 12)
    first, second = made.grow(-1, 3), made.grow(-1, 3)
    made.tick()
    made.use(int(first[2]))
    assert made.evict(4) == [*second[::-1], first[2]]


def learned(policy: GREEvictionPolicy) -> Forest:
    """Sessions that are said to return do, within a minute; those that ended do not."""
    made = Forest(policy, 400)
    for _ in range(150):
        kept = made.grow(-1, 2, RequestHint(reuse="returns"))
        made.grow(-1, 2, RequestHint(reuse="ended"))
        made.tick(20)
        made.use(int(kept[1]), RequestHint(reuse="returns"))
        made.tick(2)
        if len(made.rows) > 380:
            made.evict(40)
    return made


def test_a_newcomer_that_is_worth_less_than_every_victim_is_refused() -> None:
    """Step 9: what never comes back is not stored in the place of what does; what may is."""
    made = learned(GREEvictionPolicy())
    for row in [row for row, above in made.parent.items() if above < 0]:
        made.drop(row)
    for _ in range(5):
        made.grow(-1, 2, RequestHint(reuse="returns"))
    made.tick(5)
    assert made.make_room(2, RequestHint(reuse="ended", total_blocks=2)) == (0, [])
    idle = made.grow(-1, 2, RequestHint(reuse="ended"))
    assert made.make_room(2, RequestHint(reuse="returns", total_blocks=2)) == (2, idle[::-1].tolist())


def test_learning_is_put_off_to_a_worker() -> None:
    """The index's lock is not held for it; one table at a time, and one that was not taken is asked for again."""
    policy = GREEvictionPolicy()
    jobs: list[Callable[[], None]] = []
    takes = True

    def worker(job: Callable[[], None]) -> bool:
        if takes:
            jobs.append(job)
        return takes

    policy.use_worker(worker)
    made = Forest(policy, 12)
    table = policy._table[0]
    made.grow(-1, 1)
    made.tick(5)
    made.grow(-1, 1)
    assert len(jobs) == 1  # the first is still on its way
    assert policy._table[0] is table
    jobs.pop()()
    assert policy._table[0] is not table
    takes = False
    made.tick(5)
    made.grow(-1, 1)
    takes = True
    made.tick(5)
    made.grow(-1, 1)
    assert len(jobs) == 1


def test_what_was_generated_is_part_of_the_class_from_the_end_of_the_request_on() -> None:
    """Step 3: output tokens in seven steps, in the book and in the open spell."""
    policy = GREEvictionPolicy()
    made = Forest(policy, 4)
    rows = made.grow(-1, 1)
    classes = []
    for tokens in (0, 15, 16, 100, 5000):
        policy.on_finish(rows, tokens)
        classes.append(int(policy._book[rows[0], spells.CLASS]) % hazard.OUTPUTS)
        assert int(policy._ring[0, hazard.CLASS]) % hazard.OUTPUTS == classes[-1]
    assert classes == [0, 1, 1, 3, 6]
