"""Roots: numbers that come and go with key spaces and blocks, and are never given twice."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.engine.roots import Roots
from kvcache_factory.keyspace import KeySpace
from kvcache_factory.testing import Opener, tiny_identity


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "hold", "let_go", "forget"]), st.integers(0, 9), st.sets(st.integers(0, 9)))
    )
)
def test_a_root_in_use_keeps_its_number_and_no_number_is_given_twice(steps: list[tuple[str, int, set[int]]]) -> None:
    """Whatever is asked for, held, let go and forgotten, in any order; *used* are the keys that blocks stand on."""
    roots = Roots(most_idle=3)
    numbers: dict[int, int] = {}
    holds = dict.fromkeys(range(10), 0)
    given_out: set[int] = set()
    for step, key, used in steps:
        name = bytes([key])
        if step == "ask":
            known = key in numbers
            number = roots.number(name, name)
            assert number == numbers.setdefault(key, number)
            assert known or number not in given_out
            assert number < -1
            given_out.add(number)
        elif step == "hold" and key in numbers:
            roots.hold(numbers[key])
            holds[key] += 1
        elif step == "let_go" and holds[key]:
            roots.let_go(numbers[key])
            holds[key] -= 1
        elif step == "forget":
            roots.forget({numbers[k] for k in used if k in numbers}, roots.asked)
            numbers = {k: n for k, n in numbers.items() if k in used or holds[k]}
        assert len(roots) == len(numbers)
        assert all(roots.origin(number) == (bytes([k]), bytes([k])) for k, number in numbers.items())


def test_what_is_asked_for_while_blocks_are_looked_up_stays() -> None:
    """A block may have come to stand on it since."""
    roots = Roots(most_idle=1)
    old, new = roots.number(b"old", b""), roots.number(b"new", b"")
    asked = roots.asked
    assert roots.number(b"new", b"") == new
    assert roots.forget(set(), asked) == 1
    assert roots.number(b"new", b"") == new
    assert roots.number(b"old", b"") != old


def test_a_thousand_salts_leave_no_roots_behind(open_cache: Opener) -> None:
    """What has blocks stays found, also by a key space made anew; what has none is forgotten with its key space."""
    manager, space, engine = open_cache(8)
    roots = manager._chain.roots
    roots._most_idle = roots._look_at = 16

    def salted(salt: str) -> KeySpace:
        return manager.register(space.spec, tiny_identity(space.spec, salt=salt))

    kept = salted("kept")
    chain = kept.chain(range(2 * kept.block_tokens))
    assert kept.save(chain, engine.region, engine.compute(chain)) == 2
    del kept
    for number in range(1000):
        salted(str(number))
    gc.collect()
    assert len(roots) <= 2 * 16 + 2
    again = salted("kept")
    match = again.match(again.chain(range(2 * again.block_tokens)), "a request")
    assert match.blocks == 2
    assert again.root == match.root
    assert again.release("a request")
