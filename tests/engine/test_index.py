"""The index of one tier: reserve, fill, commit; verify, pin, evict, drop."""

from collections.abc import Iterable

import pytest

from kvcache_factory.block.envelope import Fidelity
from kvcache_factory.block.identity import Identity
from kvcache_factory.block.key import KeyChain, root_key
from kvcache_factory.engine.index import Index
from kvcache_factory.engine.roots import Roots
from kvcache_factory.engine.tree import Tree
from kvcache_factory.policy.order import LRUEvictionPolicy

TOKENS = 4
IDENTITY = Identity(model="m", kv_dtype="float32", block_tokens=TOKENS)
ROOTS = Roots()
ROOT = ROOTS.number(root_key(IDENTITY), IDENTITY.digest)


def chain(*blocks: int) -> KeyChain:
    """A chain whose blocks are numbers: equal numbers up to a block are an equal prefix."""
    made = KeyChain(IDENTITY)
    made.extend([block for block in blocks for _ in range(TOKENS)])
    return made


@pytest.fixture
def index() -> Iterable[Index]:
    """An index of eight rows under LRU whose clock ticks with each look; it must end sound."""
    now = iter(range(10**6))
    made = Index(8, TOKENS, LRUEvictionPolicy(), lambda: float(next(now)))
    yield made
    assert made.check() == []


def store(index: Index, what: KeyChain, **options: int) -> int:
    """Reserve and commit all blocks; returns how many were new."""
    return index.commit(index.reserve(what, ROOT, 0, what.num_blocks, **options).rows)


def found(index: Index, what: KeyChain) -> tuple[int, str]:
    """Length of the verified run and why it ends, without keeping the pin."""
    run = index.match(what, ROOT, what.num_blocks)
    if len(run.rows):
        index.unpin(int(run.rows[-1]))
    return len(run.rows), run.reason


def test_reserved_blocks_are_invisible_until_they_are_committed(index: Index) -> None:
    """A pending key is a miss for match and "in progress" for reserve: nobody copies it a second time."""
    mine = index.reserve(chain(1, 2), ROOT, 0, 2)
    assert found(index, chain(1, 2)) == (0, "in_progress")
    assert index.peek(chain(1, 2)) == 0
    again = index.reserve(chain(1, 2), ROOT, 0, 2)
    assert (len(again.rows), again.wanted) == (0, 0)
    assert index.commit(mine.rows) == 2
    assert found(index, chain(1, 2, 3)) == (2, "absent")


def test_what_is_aborted_takes_along_what_was_built_on_it(index: Index) -> None:
    """A copy failed while somebody had already stored on top: the child without its parent is not offered."""
    mine = index.reserve(chain(1), ROOT, 0, 1)
    assert store(index, chain(1, 2, 3)) == 2
    assert index.abort(mine.rows) == 2
    assert index.used == 0
    assert found(index, chain(1, 2, 3)) == (0, "absent")


def test_a_commit_of_blocks_that_were_dropped_meanwhile_shows_nothing(index: Index) -> None:
    """drop() during a copy hides the rows at once and frees them when the copy has ended."""
    mine = index.reserve(chain(1, 2, 3), ROOT, 0, 3)
    index.drop(mine.rows[1:2])
    assert index.used == 3
    assert index.commit(mine.rows) == 1
    assert index.used == 1
    assert found(index, chain(1, 2)) == (1, "absent")


def test_blocks_without_their_parent_are_not_taken(index: Index) -> None:
    """Closed under prefix: a save from block 2 on needs blocks 0 and 1 to be there."""
    store(index, chain(1))
    late = index.reserve(chain(1, 2, 3), ROOT, 2, 1)
    assert (len(late.rows), late.reason) == (0, "parent_absent")
    assert index.commit(index.reserve(chain(1, 2, 3), ROOT, 1, 2).rows) == 2


def test_a_full_index_lets_the_oldest_leaves_go_but_no_ancestor_of_the_newcomer(index: Index) -> None:
    """Reservation evicts exactly what it needs, and never the chain that it extends."""
    store(index, chain(1, 2))
    store(index, chain(3, 4, 5))
    store(index, chain(6, 7, 8))
    grown = index.reserve(chain(1, 2, 9, 10), ROOT, 0, 4)
    assert len(grown.rows) == 2
    assert len(grown.evicted) == 2
    index.commit(grown.rows)
    assert found(index, chain(1, 2, 9, 10))[0] == 4
    assert found(index, chain(3, 4, 5))[0] == 1
    assert found(index, chain(6, 7, 8))[0] == 3


def test_a_run_that_does_not_fit_is_shortened_and_says_why(index: Index) -> None:
    """Nobody waits for a slot: what cannot be reserved shortens the run at once."""
    store(index, chain(1, 2, 3, 4, 5, 6))
    held = index.match(chain(1, 2, 3, 4, 5, 6), ROOT, 6)
    short = index.reserve(chain(7, 8, 9), ROOT, 0, 3)
    assert (len(short.rows), short.wanted, short.reason) == (2, 3, "full")
    index.commit(short.rows)
    index.unpin(int(held.rows[-1]))


def test_a_pin_holds_the_chain_before_it_and_nothing_else(index: Index) -> None:
    """A lease in the middle of a conversation does not keep its end, nor other conversations."""
    store(index, chain(1, 2, 3, 4))
    store(index, chain(5, 6))
    held = index.match(chain(1, 2), ROOT, 2)
    assert len(index.evict(8)) == 4
    assert found(index, chain(1, 2, 3)) == (2, "absent")
    index.unpin(int(held.rows[-1]))
    assert len(index.evict(8)) == 2


def test_what_is_dropped_while_held_disappears_now_and_is_freed_later(index: Index) -> None:
    """A reader in flight keeps its bytes; everybody else sees a miss."""
    store(index, chain(1, 2, 3))
    held = index.match(chain(1, 2, 3), ROOT, 3)
    assert index.drop(held.rows[1:2]) == 2
    assert found(index, chain(1, 2, 3)) == (1, "absent")
    assert index.used == 3
    assert store(index, chain(1, 2, 3)) == 2
    index.unpin(int(held.rows[-1]))
    assert index.used == 3
    assert found(index, chain(1, 2, 3))[0] == 3


def test_a_remembered_match_does_not_outlive_its_rows(index: Index) -> None:
    """A chain object remembers rows it has verified; when a row has been given to another block, it looks again."""
    conversation = chain(1, 2)
    store(index, conversation)
    assert found(index, conversation)[0] == 2
    index.evict(8)
    store(index, chain(8, 9))
    assert found(index, conversation) == (0, "absent")
    conversation.extend([3] * TOKENS)
    store(index, conversation)
    assert found(index, conversation)[0] == 3
    assert found(index, chain(8, 9))[0] == 2


def test_a_chain_of_another_root_is_another_record(index: Index) -> None:
    """Keys alone never decide: the same keys under another identity's root are not the same blocks."""
    store(index, chain(1, 2))
    run = index.match(chain(1, 2), ROOT - 1, 2)
    assert (len(run.rows), run.reason) == (0, "record_differs")


def test_exact_blocks_replace_lossy_ones_and_what_was_computed_on_them(index: Index) -> None:
    """Quality only goes up: lossy never replaces exact, exact replaces lossy with all that hangs from it."""
    assert store(index, chain(1, 2, 3), fidelity=Fidelity.BOUNDED) == 3
    assert found(index, chain(1, 2, 3)) == (0, "not_exact")
    assert len(index.match(chain(1, 2, 3), ROOT, 3, Fidelity.BOUNDED).rows) == 3
    index.unpin(int(index.rows_of(chain(1, 2, 3).keys)[-1]))
    assert store(index, chain(1, 2), fidelity=Fidelity.EXACT) == 2
    assert found(index, chain(1, 2, 3)) == (2, "absent")
    assert store(index, chain(1, 2), fidelity=Fidelity.APPROXIMATE) == 0


def test_a_block_on_a_lossy_prefix_is_lossy(index: Index) -> None:
    """What was computed from approximate KV is approximate, whatever its writer says."""
    store(index, chain(1), fidelity=Fidelity.APPROXIMATE)
    index.commit(index.reserve(chain(1, 2), ROOT, 1, 1, Fidelity.EXACT).rows)
    assert int(index.fidelity[index.rows_of(chain(1, 2).keys)[1]]) == Fidelity.APPROXIMATE


def test_a_stored_chain_ends_where_a_writer_is_still_at_work(index: Index) -> None:
    """Blocks can hang from blocks that are not whole yet; nobody may copy those."""
    early = index.reserve(chain(1, 2), ROOT, 0, 2)
    store(index, chain(1, 2, 3))
    tip = int(index.rows_of(chain(1, 2, 3).keys)[2])
    assert index.stored_chain(tip, ROOTS).num_blocks == 0
    index.commit(early.rows)
    assert index.stored_chain(tip, ROOTS).num_blocks == 3


def test_selected_victims_stay_visible_until_they_leave_and_can_be_kept(index: Index) -> None:
    """Demotion selects, copies, removes: what somebody uses meanwhile stays."""
    store(index, chain(1, 2, 3))
    store(index, chain(4))
    rows = index.select_victims(3)
    assert found(index, chain(1, 2, 3))[0] == 3
    used = index.match(chain(1, 2), ROOT, 2)
    assert len(index.remove_selected(rows)) == 1
    assert found(index, chain(1, 2, 3))[0] == 2
    index.unpin(int(used.rows[-1]))
    assert len(index.evict(8)) == 3


def test_what_others_build_on_stays_when_a_session_goes(index: Index) -> None:
    """drop_unshared() frees what nothing else builds on and leaves shared prefixes."""
    store(index, chain(1, 2, 3))
    store(index, chain(1, 9))
    assert index.drop_unshared(index.rows_of(chain(1, 2, 3).keys)) == 2
    assert found(index, chain(1, 9))[0] == 2


def test_rows_that_left_since_they_were_looked_up_are_left_alone(index: Index) -> None:
    """Two sessions that end at the same time look up the same rows; the second finds nothing to do, and ends."""
    store(index, chain(1, 2, 3))
    rows = index.rows_of(chain(1, 2, 3).keys)
    held = index.match(chain(1, 2, 3), ROOT, 3)
    assert index.drop_unshared(rows) == 3
    assert index.drop_unshared(rows) == 0
    index.unpin(int(held.rows[-1]))
    assert index.drop_unshared(rows) == 0
    assert index.used == 0


@pytest.mark.parametrize("rows", [7, 1000, 4096])
def test_an_index_costs_no_more_than_it_says(rows: int) -> None:
    """The budget of a tier counts the index: its arrays fit into the bytes that were set aside for each row."""
    made = Index(rows, 16, LRUEvictionPolicy(), lambda: 0.0)
    assert made.nbytes <= rows * Tree.bytes_per_row(16) + 64
