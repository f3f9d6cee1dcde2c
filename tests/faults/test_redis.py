"""A real Redis that is killed, frozen and torn apart under load: engines go on, and all comes back by itself."""

from __future__ import annotations

import random
import runpy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.remote_harness import RemoteCache
from tests.servers import Server, program, redis_answers, redis_cluster, redis_server, until

from kvcache_factory import HierarchicalBackend, RemoteBackend
from kvcache_factory.engine.ledger import Event
from kvcache_factory.manager import CacheManager
from kvcache_factory.testing import FakeEngine, sized_level, tiny_identity, tiny_spec

SPEC = tiny_spec()
CONVERSATIONS = [list(range(1000 * number, 1000 * number + 32)) for number in range(24)]
"""Of eight blocks each; the memory above holds eight of them."""


@contextmanager
def caches(url: str, count: int = 1, **options: Any) -> Iterator[list[RemoteCache]]:
    """Caches over one Redis, as engines of one model; at the end none has lost a buffer or broken an invariant."""
    patience = {"per_token_timeout_ms": 60_000.0, "max_wait_s": 0.5}
    given = {"ingestion": "all", **patience, "double_get_blocks": 0, "double_get_ratio": 0.0, **options}
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            backend = RemoteBackend(connector="REDIS", options={"url": url, "timeout_s": 1.0}, **given)
            manager = CacheManager(HierarchicalBackend([sized_level(64, SPEC), backend]))
            stack.callback(manager.close)
            made.append(RemoteCache(manager, manager.register(SPEC, tiny_identity(SPEC)), FakeEngine(SPEC, 64)))
        yield made
        for cache in made:
            assert cache.manager.wait(60)
            until(lambda c=cache: state(c)["abandoned_blocks"] == 0, "every buffer is given back")
            assert state(cache)["operations_in_flight"] == 0
            assert cache.manager.check() == []


def state(cache: RemoteCache) -> dict[str, Any]:
    """What the remote store says of itself."""
    store: Any = cache.level.store
    said: dict[str, Any] = store.state()
    return said


class Load:
    """Engines at work: each turn stores a conversation, asks for another one, and checks every byte that comes."""

    def __init__(self, made: list[RemoteCache]) -> None:
        self.turns = [0] * len(made)
        self.problems: list[str] = []
        self._made = made
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(len(made))]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        draw, cache = random.Random(number), self._made[number]
        try:
            while not self._stop.is_set():
                cache.save(draw.choice(CONVERSATIONS))
                asked = draw.choice(CONVERSATIONS)
                cache.fetch(asked)
                got = cache.load(asked)
                if got != [0] * len(got):
                    self.problems.append(f"wrong bytes: {got}")
                self.turns[number] += 1
        except BaseException as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            raise

    def goes_on(self, turns: int = 5) -> None:
        """Wait until every engine has done some more turns."""
        goal = [done + turns for done in self.turns]
        until(lambda: all(d >= g for d, g in zip(self.turns, goal, strict=True)) or bool(self.problems), "turns go on")
        assert self.problems == []


def opened(made: list[RemoteCache]) -> bool:
    return all(state(cache)["breaker"] == "open" for cache in made)


def closed(made: list[RemoteCache]) -> bool:
    return all(state(cache)["breaker"] == "closed" for cache in made)


def hits(made: list[RemoteCache]) -> int:
    """Blocks that came from the server so far."""
    return sum(cache.total(Event.HIT) for cache in made)


def _kill(server: Server) -> Callable[[], None]:
    server.kill()
    return server.start


def _freeze(server: Server) -> Callable[[], None]:
    server.freeze()
    return server.thaw


@pytest.mark.parametrize("harm", [_kill, _freeze], ids=["kill -9", "SIGSTOP"])
def test_engines_go_on_without_the_server_and_use_it_again(harm: Any) -> None:
    """Turns go on while it is gone, the breaker opens and, when it is back, closes by itself; nothing wrong ever comes.

    A killed server has lost everything; what is stored afterwards is found again.
    """
    with redis_server() as server, caches(server.url, 2) as made, Load(made) as load:
        load.goes_on(20)
        until(lambda: hits(made) > 0, "blocks come from the server")
        heal = harm(server)
        until(lambda: opened(made), "the breakers open")
        load.goes_on(20)
        assert opened(made)
        heal()
        until(lambda: redis_answers(server.port), "the server is back")
        until(lambda: closed(made), "the breakers close by themselves")
        before = hits(made)
        until(lambda: hits(made) > before, "blocks come from the server again")
        load.goes_on(20)


def test_a_server_that_flickers_leaves_nothing_behind() -> None:
    """Frozen and released many times, for moments and for longer than the deadline."""
    with redis_server() as server, caches(server.url, 2, max_wait_s=0.1) as made, Load(made) as load:
        for pause_s in (0.01, 0.2, 0.05, 0.3, 0.01):
            server.freeze()
            time.sleep(pause_s)
            server.thaw()
            load.goes_on(3)
        until(lambda: closed(made), "the breakers close by themselves")


def test_a_node_of_a_cluster_is_killed_in_the_middle() -> None:
    """Three masters, one dies under load: engines go on, and blocks on the other two are used."""
    with (
        redis_cluster() as servers,
        caches(f"{servers[0].url},127.0.0.1:{servers[2].port}", 2, max_wait_s=20.0) as made,
    ):
        with Load(made) as load:
            load.goes_on(20)
            until(lambda: hits(made) > 0, "blocks come from the servers")
            servers[1].kill()
            load.goes_on(40)
        fresh_keys = [list(range(100_000 + 100 * number, 100_000 + 100 * number + 4)) for number in range(60)]
        for tokens in fresh_keys:
            made[0].save(tokens)
        assert made[0].manager.wait(60)
        found = 0
        for tokens in fresh_keys:
            made[1].fetch(tokens)
            got = made[1].load(tokens)
            assert got == [0] * len(got)
            found += len(got)
        assert 0.4 < found / len(fresh_keys) < 0.9  # one key in three is of the dead node
        assert all(state(cache)["breaker_openings"] == 0 for cache in made)


def test_an_engine_that_starts_while_the_server_is_away_says_so() -> None:
    """Opening is the one moment that is an error, with what to do."""
    from kvcache_factory.errors import StoreError

    with redis_server() as server:
        server.kill()
        with pytest.raises(StoreError, match="start its server"), caches(server.url):
            pass


def test_the_example_of_an_outage_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """As a user would run it, in a hurry: every phase has turns, and nothing is wrong at the end."""
    program("redis-server")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "redis_outage.py"))
    example["main"](0.5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(int(line.split(" turns")[0].split()[-1]) > 0 for line in lines[:5])
    assert lines[5] == "problems found in the cache: none"
