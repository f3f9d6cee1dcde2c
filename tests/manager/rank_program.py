"""One tensor-parallel rank: a manager of its own, with fewer blocks the higher its number; prints what it sees."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from kvcache_factory import CacheManager
from kvcache_factory.testing import SmallCache, small_cache

TOKENS = list(range(32))


def loaded(cache: SmallCache, tokens: list[int], request: str) -> tuple[int, list[int | None]]:
    """What a request is promised, and what it then gets."""
    chain = cache.space.chain(tokens)
    match = cache.space.match(chain, request)
    cache.engine.erase()
    count = cache.space.load(match, cache.engine.region, cache.engine.positions(match.blocks))
    cache.space.release(request)
    return match.blocks, cache.engine.versions(chain, count)


def main(rank: int, ranks: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    cache = small_cache(64, process_group=dist.group.WORLD)
    agreement = cache.manager._context.agreement
    assert agreement is not None
    seen: list[object] = [loaded(cache, TOKENS, "cold")]
    cache.save(TOKENS)
    seen.append(loaded(cache, TOKENS, "all"))
    cache.manager.evict(rank)
    seen.append(loaded(cache, TOKENS, "fewer"))
    alone = small_cache(64)
    assert CacheManager.from_config(cache.manager.to_config()).to_config() == cache.manager.to_config()
    if rank == ranks - 1:
        cache.manager.reset()
    seen.append(loaded(cache, TOKENS, "one has nothing"))
    if rank == 0:
        cache.manager.close()
    seen.append(loaded(cache, TOKENS, "one is closed"))
    print(json.dumps({"seen": seen, "asked": agreement.asked}))
    alone.manager.close()
    cache.manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
