"""A process that uses a directory until it is killed.

    python -m tests.store.disk.worker PATH SEED SEGMENTS [BLOCKS]

Without BLOCKS it writes, reads and frees for ever; with it, it writes that many blocks and waits.  It says one line
when there is something to kill.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from tests.store.disk.blocks import Cache, open_store

from kvcache_factory.errors import StoreError


def churn(cache: Cache, seed: int) -> None:
    """Fill the store, then reuse slots for ever; every read must prove itself or be a miss."""
    chance = np.random.default_rng(seed)
    number = seed * 1_000_000
    turn = 0
    while True:
        count = int(chance.integers(1, 12))
        try:
            cache.save(*range(number, number + count))
        except StoreError as error:
            if error.reason != "full":
                raise
        number += count
        if cache.store.room() < 12:
            own = np.array(sorted(cache.number_of), np.int32)
            own = own[cache.store.owned(own)]
            cache.free(chance.permutation(own)[:20].astype(np.int32))
        if turn % 5 == 0:
            cache.refresh()
            some = chance.permutation(np.array(sorted(cache.number_of), np.int32))[:20]
            for row, found in zip(some.tolist(), cache.load(some), strict=True):
                assert found is None or found == cache.number_of[row] or not cache.store.owned(some).all()
        turn += 1
        if turn == 12:
            print("busy", flush=True)


def main() -> None:
    path, seed, segments, *blocks = sys.argv[1:]
    cache = Cache(open_store(Path(path), segments=int(segments)))
    if not blocks:
        churn(cache, int(seed))
    first = int(seed) * 1_000_000
    cache.save(*range(first, first + int(blocks[0])))
    print("done", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
