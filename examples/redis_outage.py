"""A Redis below the cache that freezes, dies and comes back, while turns go on: what each of them costs.

Run it where redis-server is installed: ``python examples/redis_outage.py``.  It starts a server of its own.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import time

from kvcache_factory import CacheManager, HierarchicalBackend, RemoteBackend
from kvcache_factory.testing import FakeEngine, SmallCache, sized_level, tiny_identity, tiny_spec

SPEC = tiny_spec()
PROMPTS = [list(range(1000 * n, 1000 * n + 32)) for n in range(24)]  # eight blocks each; memory holds eight prompts
DEADLINE_S = 0.5


def start_server(port: int) -> subprocess.Popen[bytes]:
    """A server that keeps nothing on a disk, once it answers."""
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--maxmemory", "64mb"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.02)


def open_cache(port: int) -> SmallCache:
    """DRAM above the server, with an engine that computes recognisable bytes instead of attention."""
    remote = RemoteBackend(
        connector="REDIS",
        options={"url": f"redis://127.0.0.1:{port}"},
        ingestion="all",
        per_token_timeout_ms=1000 * DEADLINE_S,
        max_wait_s=DEADLINE_S,
    )
    manager = CacheManager(HierarchicalBackend([sized_level(64, SPEC), remote]))
    return SmallCache(manager, manager.register(SPEC, tiny_identity(SPEC)), FakeEngine(SPEC, 64))


def turn(cache: SmallCache, draw: random.Random) -> None:
    """What an engine does with a prompt: ask ahead, load what is there, store the rest."""
    tokens = draw.choice(PROMPTS)
    ticket = cache.space.prefetch(cache.space.chain(tokens))
    if ticket is not None:
        ticket.wait(DEADLINE_S)
    loaded = cache.load(tokens)
    assert loaded == [0] * len(loaded), "wrong bytes"
    cache.save(tokens)


def phase(cache: SmallCache, name: str, seconds: float, draw: random.Random) -> None:
    """Turns for a while, and one line about them."""
    before, turns, slowest_s, end_s = hits(cache), 0, 0.0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        turn(cache, draw)
        turns, slowest_s = turns + 1, max(slowest_s, time.monotonic() - began_s)
    remote = cache.manager.state()["remote"]
    print(
        f"{name:<20} {turns:>6} turns, slowest {1000 * slowest_s:>5.0f} ms, "
        f"{hits(cache) - before:>6} blocks from Redis, breaker {remote['breaker']}, "
        f"{remote['abandoned_blocks']} blocks held by calls that nobody waits for"
    )


def hits(cache: SmallCache) -> int:
    """Blocks that came from the server so far."""
    events = cache.manager.state()["events"]
    return sum(row["blocks"] for row in events if (row["tier"], row["event"]) == ("remote", "hit"))


def main(seconds: float = 4.0) -> None:
    """All phases, of *seconds* each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server, draw = start_server(port), random.Random(0)
    cache = open_cache(port)
    try:
        phase(cache, "Redis answers", seconds, draw)
        server.send_signal(signal.SIGSTOP)
        phase(cache, "frozen (SIGSTOP)", seconds, draw)
        server.send_signal(signal.SIGCONT)
        phase(cache, "goes on (SIGCONT)", seconds, draw)
        server.kill()
        server.wait()
        phase(cache, "killed (kill -9)", seconds, draw)
        server = start_server(port)
        phase(cache, "started again, empty", seconds, draw)
        cache.manager.wait(10)
        print("problems found in the cache:", cache.manager.check() or "none")
    finally:
        cache.manager.close()
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
