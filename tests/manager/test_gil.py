"""What takes microseconds keeps the GIL: giving it away costs a change of threads, and locks are held meanwhile."""

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvcache_factory import jit
from kvcache_factory.jit import Kernel
from kvcache_factory.testing import Opener

pytestmark = pytest.mark.skipif(jit.numba_refused(), reason="numpy lets go of the GIL, compiled kernels do not")

Switches = Callable[[Callable[[], object]], int]


@pytest.fixture
def switches() -> Iterator[Switches]:
    """How often another thread, which always wants to run, got the GIL while something ran; it is never forced away."""
    turns, ended = [0], threading.Event()

    def want() -> None:
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)

    def count(run: Callable[[], object]) -> int:
        before = turns[0]
        run()
        return turns[0] - before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    other = threading.Thread(target=want, daemon=True)
    try:
        other.start()
        yield count
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        other.join()


def _spin(rows: object, count: int) -> int:
    total = 0
    for i in range(count):
        total += i % 7
    return total


def test_a_kernel_that_yields_lets_others_run_and_one_that_does_not_does_not(switches: Switches) -> None:
    """This is what tells that the fixture sees a thread that lets go."""
    rows = np.zeros(1, np.int32)
    for yields in (True, False):
        kernel = Kernel("i8(i4[::1], i8)", _spin, None, yields)
        kernel.compile()
        seen = 0
        for _ in range(1000):
            seen += switches(lambda kernel=kernel: kernel(rows, 1_000_000))
            if seen:
                break
        assert bool(seen) is yields


def test_a_request_keeps_the_gil_but_for_long_copies(open_cache: Opener, switches: Switches) -> None:
    """Look-up, lease, charge to a session, load, release, and a save of one new block for which others must leave."""
    jit.warm_up()
    cache = open_cache(250)
    space, region = cache.space, cache.engine.region
    cache.manager.create_session("s", quota_gb=1.0)
    cache.save(range(50_000, 50_128))  # what leaves
    chains = [space.chain(range(1000 * number, 1000 * number + 64)) for number in range(10)]
    blocks = chains[0].num_blocks
    tokens = np.arange(space.block_tokens)
    positions = cache.engine.positions(blocks + 10)
    for chain in chains:
        space.save(chain, region, positions[:blocks], session="s")

    def requests() -> None:
        for turn in range(7):  # so few that no table must grow
            for chain in chains:
                match = space.match(chain, "r", session="s", reuse_hint="returns")
                assert space.load(match, region, positions[: match.blocks]) == blocks + turn
                space.release("r")
                chain.extend(tokens)
                new = positions[match.blocks : chain.num_blocks]
                assert space.save(chain, region, new, first=match.blocks, session="s") == 1

    assert switches(requests) == 0
    assert sum(row["blocks"] for row in cache.manager.state()["events"] if row["event"] == "evicted") > 0
