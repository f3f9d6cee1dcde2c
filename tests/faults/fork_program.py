"""A process that holds a manager and forks, at any moment; the children use it, or do not, and end as they like."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from pathlib import Path

import numpy as np

from kvcache_factory import CPUBackend, DiskBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.manager import CacheManager
from kvcache_factory.testing import FakeEngine, SmallCache, tiny_identity, tiny_spec

CHILDREN = 12
SPEC = tiny_spec()


def opened(place: Path) -> SmallCache:
    """A cache with every kind of level, whose metrics are served."""
    disk = DiskBackend(str(place), size_gb=8 / 1024, segment_mb=1)
    remote = RemoteBackend(connector="MOCK", ingestion="all")
    backend = HierarchicalBackend([CPUBackend(size_gb=1 / 1024, huge_pages=False), disk, remote])
    manager = CacheManager(backend, enable_metrics=True, metrics_port=0)
    return SmallCache(manager, manager.register(SPEC, tiny_identity(SPEC)), FakeEngine(SPEC, 64))


def tokens_of(number: int) -> list[int]:
    """A prompt of eight blocks."""
    return np.random.default_rng(number).integers(0, 1000, 32).tolist()


def child(cache: SmallCache, way: int) -> None:
    """Nothing is found or kept here, and nothing of the parent's is touched."""
    manager = cache.manager
    assert cache.load(tokens_of(0)) == []
    assert cache.save(tokens_of(10_000 + way)) == 0
    manager.clear_session("s")
    manager.destroy_session("s", purge=True)
    assert manager.evict(100) == 0
    assert manager.wait()
    if way % 3 == 0:
        manager.close()
    elif way % 3 == 1:
        del cache, manager
        gc.collect()
    atexit._run_exitfuncs()
    os._exit(0)  # as children of multiprocessing end: the rest is that of libraries, and takes seconds


def main() -> None:
    cache = opened(Path(sys.argv[1]))
    cache.manager.create_session("s")
    cache.save(tokens_of(0), session="s")
    stop = threading.Event()

    def work() -> None:
        engine = SmallCache(cache.manager, cache.space, FakeEngine(SPEC, 64))
        number = 1
        while not stop.is_set():
            engine.save(tokens_of(number))
            engine.load(tokens_of(number))
            number = number % 20 + 1

    busy = threading.Thread(target=work)
    busy.start()
    for way in range(CHILDREN):
        pid = os.fork()
        if not pid:
            child(cache, way)
        assert os.waitpid(pid, 0)[1] == 0, f"child {way} failed"
    stop.set()
    busy.join()
    assert cache.load(tokens_of(0)) == [0] * 8, "the parent has lost what a child dropped"
    assert cache.manager.wait(60)
    assert cache.manager.check() == []
    cache.manager.close()
    again = opened(Path(sys.argv[1]))
    ticket = again.space.prefetch(again.space.chain(tokens_of(0)))
    assert ticket is None or ticket.wait(60)
    assert again.load(tokens_of(0)) == [0] * 8, "the disk has lost it"
    again.manager.close()
    print("well")


if __name__ == "__main__":
    main()
