"""Sessions: whose blocks, in which thread or task, and how they end."""

import asyncio
import gc
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest

from kvcache_factory import SessionExistsError, UnknownSessionError
from kvcache_factory.engine.ledger import Event
from kvcache_factory.errors import ConfigError
from kvcache_factory.session import current_session
from kvcache_factory.session.book import ENDED
from kvcache_factory.testing import FakeEngine, Opener, SmallCache

A = list(range(16))
B = [*range(8), 91, 92, 93, 94]


def blocks_of(cache: SmallCache) -> dict[str, int]:
    """Blocks that each session references."""
    return {row["session"]: row["blocks"] for row in cache.manager.state()["sessions"]}


def test_unknown_and_taken_ids_are_typed_errors(open_cache: Opener) -> None:
    """Both say the id and what to do."""
    manager = open_cache(4).manager
    manager.create_session("one")
    with pytest.raises(SessionExistsError, match="'one' exists already"):
        manager.create_session("one")
    for call in (manager.session, manager.use_session, manager.clear_session):
        with pytest.raises(UnknownSessionError, match=r"create_session\('two'\)"):
            call("two")
    for bad in ("", None, 3):
        with pytest.raises(ConfigError):
            manager.create_session(bad)  # type: ignore[arg-type]


def test_a_session_takes_along_what_only_it_references(open_cache: Opener) -> None:
    """Shared prefixes stay for the others; the id of a cleared session stays valid."""
    cache = open_cache(16, 16)
    one, _ = cache.manager.create_session("one"), cache.manager.create_session("two")
    one.data["history"] = [1, 2, 3]
    with cache.manager.use_session("one"):
        cache.save(A)
    cache.save(B, session="two")
    cache.manager.wait()
    assert blocks_of(cache) == {"one": 4, "two": 3}
    assert cache.manager.clear_session("one") == 4  # two blocks, in two tiers
    assert one.data == {}
    assert cache.load(A) == [0, 0]
    assert cache.load(B) == [0, 0, 0]
    assert blocks_of(cache) == {"one": 0, "two": 3}
    assert cache.manager.destroy_session("two") is True
    assert cache.manager.destroy_session("two") is False
    cache.manager.wait()
    assert [tier.index.used for tier in cache.manager._chain.tiers] == [0, 0]
    cache.manager.create_session("two")


def test_a_session_that_ends_while_its_blocks_are_on_their_way_leaves_none_below(open_cache: Opener) -> None:
    """Write-behind of a destroyed session finds nothing to copy."""
    cache = open_cache(16, 16)
    gate = threading.Event()
    cache.manager.create_session("s")
    cache.manager._chain.flow.io.submit(0, gate.wait)  # type: ignore[arg-type]
    cache.save(A, session="s")
    cache.manager.destroy_session("s")
    gate.set()
    cache.manager.wait()
    assert [tier.index.used for tier in cache.manager._chain.tiers] == [0, 0]


def test_a_dismissed_session_leaves_its_blocks(open_cache: Opener) -> None:
    """Nobody is charged for them any more, and the id is free again."""
    cache = open_cache(8)
    cache.manager.create_session("one")
    cache.save(A, session="one")
    assert cache.manager.dismiss_session("one") is True
    assert cache.manager.dismiss_session("one") is False
    assert blocks_of(cache) == {}
    assert cache.load(A) == [0, 0, 0, 0]
    cache.manager.create_session("one")


def test_a_leased_block_outlives_its_session(open_cache: Opener) -> None:
    """A request in flight keeps its bytes when the session is destroyed under it."""
    cache = open_cache(16)
    cache.manager.create_session("s")
    cache.save(A, session="s")
    chain = cache.space.chain(A)
    match = cache.space.match(chain, "r")
    cache.manager.destroy_session("s")
    cache.engine.erase()
    assert cache.space.load(match, cache.engine.region, cache.engine.positions(4)) == 4
    assert cache.engine.versions(chain, 4) == [0] * 4
    cache.space.release("r")
    assert cache.manager._chain.tiers[0].index.used == 0


@pytest.mark.parametrize("purge", [False, True])
@pytest.mark.parametrize("scoped", [False, True])
def test_a_running_request_leaves_nothing_of_a_destroyed_session(open_cache: Opener, purge: bool, scoped: bool) -> None:
    """It goes on with what it was given; what it computes is not stored, until the session is there again."""
    cache = open_cache(16, 16)
    cache.manager.create_session("s")
    cache.save(A[:8], session="s")
    chain = cache.space.chain(A)
    scope = cache.manager.use_session("s") if scoped else nullcontext()
    name = None if scoped else "s"
    with scope:
        match = cache.space.match(chain, "r", session=name)
        assert cache.manager.destroy_session("s", purge=purge) is True
        assert cache.space.load(match, cache.engine.region, cache.engine.positions(match.blocks)) == 2
        cache.save(A, session=name)
        cache.space.release("r")
    cache.manager.wait()
    assert [tier.index.used for tier in cache.manager._chain.tiers] == [0, 0]
    assert cache.manager.ledger.total(Event.NOT_STORED, reason="session_destroyed").blocks == 4
    assert blocks_of(cache) == {}
    cache.manager.create_session("s")
    assert cache.save(A, session="s") == 4


def test_the_sessions_destroyed_last_are_remembered_and_no_more(open_cache: Opener) -> None:
    """Names of those that ended do not pile up, and one that is cleared or dismissed is none of them."""
    cache = open_cache(16)
    book = cache.manager._sessions
    for number in range(ENDED + 5):
        cache.manager.create_session(f"s{number}")
        cache.manager.destroy_session(f"s{number}", purge=number % 2 == 1)
    assert [book.ended(f"s{number}") for number in (4, 5, 6, ENDED + 4)] == [None, True, False, False]
    assert len(book._ended) == ENDED
    cache.manager.create_session("t")
    cache.manager.dismiss_session("t")
    assert cache.save(A, session="t") == 4


def test_a_planned_save_leaves_nothing_of_a_destroyed_session(open_cache: Opener) -> None:
    """Slots were reserved for it before it ended; what another session references as well stays."""
    cache = open_cache(16)
    space, manager = cache.space, cache.manager
    chain, other = space.chain(A), space.chain(B)
    manager.create_session("s")
    manager.create_session("t")
    tag = cache.engine.region.tag
    plans = [space.plan_save(c, first=0, count=c.num_blocks, tag=tag, session="s") for c in (chain, other)]
    assert [len(plan.rows) for plan in plans if plan is not None] == [4, 1]
    assert cache.save(B, session="t") == 0  # on its way already
    manager.destroy_session("s")
    for plan in plans:
        assert plan is not None
        space.finish_save(plan, len(plan.rows))
    manager.wait()
    assert manager._chain.tiers[0].index.used == 3
    manager.destroy_session("t")
    assert manager._chain.tiers[0].index.used == 0


def test_many_requests_run_while_their_sessions_are_destroyed(open_cache: Opener) -> None:
    """Nothing of a session that has ended is left, whatever moment it ended at."""
    cache = open_cache(32, 64)
    engines = [FakeEngine(cache.engine.spec, 16) for _ in range(3)]
    failures: list[BaseException] = []

    def talk(number: int) -> None:
        try:
            for turn in range(60):
                name = f"{number}.{turn}"
                cache.manager.create_session(name)
                chain = cache.space.chain([1000 * number + turn, *A])
                ender = threading.Thread(target=cache.manager.destroy_session, args=(name,))
                match = cache.space.match(chain, name, session=name)
                ender.start()
                cache.space.load(match, engines[number].region, engines[number].positions(match.blocks))
                cache.space.save(chain, engines[number].region, engines[number].compute(chain), session=name)
                cache.space.release(name)
                ender.join()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.manager.wait()
    assert failures == []
    assert blocks_of(cache) == {}
    assert [tier.index.used for tier in cache.manager._chain.tiers] == [0, 0]


def test_requests_and_reuse_are_counted_per_session(open_cache: Opener) -> None:
    """asked and reused tokens of a session are its own."""
    cache = open_cache(16)
    cache.manager.create_session("s")
    cache.save(A)
    with cache.manager.use_session("s") as session:
        cache.load([*A, 1, 2])
    assert (session.requests, session.asked_tokens, session.reused_tokens) == (1, 18, 16)


def test_reset_drops_blocks_and_histories_and_keeps_ids(open_cache: Opener) -> None:
    """A clean sheet, also below, with every session still valid."""
    cache = open_cache(16, 16)
    cache.manager.create_session("s").data["x"] = 1
    cache.save(A, session="s")
    cache.manager.reset()
    assert cache.manager.session("s").data == {}
    assert blocks_of(cache) == {"s": 0}
    assert [tier.index.used for tier in cache.manager._chain.tiers] == [0, 0]
    assert cache.save(A, session="s") == 4


# -- threads and tasks ------------------------------------------------------------------------------------------------


def test_threads_are_in_sessions_of_their_own(open_cache: Opener) -> None:
    """use_session() in one thread does not reach another, whatever the order of entering and leaving."""
    manager = open_cache(16).manager
    number, seen, meet = manager._number, {}, threading.Barrier(4)
    for name in "abcd":
        manager.create_session(name)

    def work(name: str) -> None:
        meet.wait(60)
        with manager.use_session(name):
            meet.wait(60)
            seen[name] = current_session(number)
            meet.wait(60)
        seen[name] = (seen[name], current_session(number))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {name: (name, None) for name in "abcd"}


def test_one_scope_can_be_entered_by_several_threads(open_cache: Opener) -> None:
    """A scope keeps nothing itself: who leaves first does not restore the other's session."""
    manager = open_cache(16).manager
    number = manager._number
    manager.create_session("outer")
    manager.create_session("shared")
    scope, inside, leave = manager.use_session("shared"), threading.Event(), threading.Event()
    seen: list[str | None] = []

    def other() -> None:
        with scope:
            inside.set()
            leave.wait(60)
        seen.append(current_session(number))

    thread = threading.Thread(target=other)
    with manager.use_session("outer"):
        thread.start()
        inside.wait(60)
        with scope, scope:
            leave.set()
            thread.join()
            seen.append(current_session(number))
        seen.append(current_session(number))
    assert seen == [None, "shared", "outer"]
    assert current_session(number) is None


def test_tasks_are_in_sessions_of_their_own(open_cache: Opener) -> None:
    """Tasks that take turns keep their sessions; a child starts in its parent's."""
    cache = open_cache(64)
    number = cache.manager._number
    for name in "ab":
        cache.manager.create_session(name)

    async def child() -> str | None:
        await asyncio.sleep(0)
        return current_session(number)

    async def work(name: str, tokens: list[int]) -> str | None:
        with cache.manager.use_session(name):
            await asyncio.sleep(0)
            cache.save(tokens)
            await asyncio.sleep(0)
            assert current_session(number) == name
            return await asyncio.create_task(child())

    async def main() -> list[str | None]:
        return list(await asyncio.gather(work("a", A), work("b", [500 + t for t in A])))

    assert asyncio.run(main()) == ["a", "b"]
    assert blocks_of(cache) == {"a": 4, "b": 4}
    assert current_session(number) is None


def test_managers_do_not_share_sessions(open_cache: Opener) -> None:
    """A scope of one manager says nothing to another."""
    one, two = open_cache(8), open_cache(8)
    one.manager.create_session("s")
    with one.manager.use_session("s"):
        assert current_session(two.manager._number) is None
        assert two.save(A) == 4


def test_sessions_are_created_and_destroyed_by_many_threads_at_once(open_cache: Opener) -> None:
    """Any order of create, save, clear and destroy leaves a sound manager."""
    cache = open_cache(64)
    chain = cache.space.chain(A)
    positions = cache.engine.compute(chain)

    def work(name: str) -> None:
        for turn in range(20):
            cache.manager.create_session(name)
            cache.space.save(chain, cache.engine.region, positions, session=name)
            if turn % 2:
                cache.manager.clear_session(name)
            assert cache.manager.destroy_session(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.manager._chain.tiers[0].index.used == 0


# -- the end ----------------------------------------------------------------------------------------------------------


class Conversation:
    """What users write: an object whose destructor ends its session."""

    def __init__(self, cache: SmallCache, name: str) -> None:
        self.cache, self.name, self.me = cache, name, self
        cache.manager.create_session(name)

    def __del__(self) -> None:
        self.cache.manager.destroy_session(self.name)


def test_a_destructor_may_end_a_session(open_cache: Opener) -> None:
    """From the collector, in a cycle, more than once, after close: never an error."""
    cache = open_cache(16)
    conversation = Conversation(cache, "s")
    cache.save(A, session="s")
    del conversation
    gc.collect()
    assert blocks_of(cache) == {}
    assert cache.manager._chain.tiers[0].index.used == 0
    late = Conversation(cache, "late")
    cache.manager.close()
    del late
    gc.collect()
    assert blocks_of(cache) == {}


def test_what_cannot_be_a_session_is_no_session(open_cache: Opener) -> None:
    """destroy_session() never raises, whatever it is given."""
    manager = open_cache(4).manager
    for nonsense in (None, 3, [], {}):
        assert manager.destroy_session(nonsense) is False  # type: ignore[arg-type]


EXIT = """
import atexit, sys, threading
from kvcache_factory.testing import small_cache

class Conversation:
    def __init__(self, cache, name):
        self.cache, self.name, self.me = cache, name, self
        cache.manager.create_session(name)
    def __del__(self):
        self.cache.manager.destroy_session(self.name)

cache = small_cache(16, 16)
keep = [Conversation(cache, "a"), Conversation(cache, "b")]
sys.keep_beyond_modules = Conversation(cache, "c")
cache.save(list(range(16)), session="a")
atexit.register(cache.manager.destroy_session, "b")
print("done")
"""


def test_a_program_that_closes_nothing_ends_quietly() -> None:
    """Interpreter exit with open managers, queued copies, sessions in globals and in cycles: no output, code 0."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", EXIT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
