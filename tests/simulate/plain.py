"""Caches of prefixes in the plainest Python there is, to compare with."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

Block = tuple[int, ...]
Chains = Sequence[Sequence[int]]


def blocks_of(chain: Sequence[int]) -> list[Block]:
    """Each block of a chain is the chain up to it."""
    return [tuple(chain[: i + 1]) for i in range(len(chain))]


class Tree:
    """A set of prefixes that is closed under prefix, and who of them can leave."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cached: set[Block] = set()

    def leaves(self, running: list[Block]) -> Iterator[Block]:
        inner = {block[:-1] for block in self.cached}
        return (block for block in self.cached if block not in inner and block not in running)

    def leading(self, blocks: list[Block]) -> int:
        return next((i for i, block in enumerate(blocks) if block not in self.cached), len(blocks))


def leaf_lru(chains: Chains, capacity: int) -> list[int]:
    """Hits of each request with leaf-first LRU."""
    tree, used, hits = Tree(capacity), {}, []
    for now, chain in enumerate(chains):
        blocks = blocks_of(chain)
        hits.append(tree.leading(blocks))
        used.update(dict.fromkeys(blocks, now))
        for block in blocks[hits[-1] :]:
            if len(tree.cached) >= capacity:
                victim = min(tree.leaves(blocks), key=lambda b: (used[b], -len(b)), default=None)
                if victim is None:
                    break
                tree.cached.remove(victim)
            tree.cached.add(block)
    return hits


def clairvoyant(chains: Chains, capacity: int) -> int:
    """Hits of the cache that lets the farthest next use go first, and does not store what is used later still."""
    every = [blocks_of(chain) for chain in chains]
    tree, upcoming, hits = Tree(capacity), {}, 0

    def next_use(block: Block, after: int) -> float:
        return next((i for i in range(after + 1, len(every)) if block in every[i]), math.inf)

    for now, blocks in enumerate(every):
        found = tree.leading(blocks)
        hits += found
        upcoming.update({block: next_use(block, now) for block in blocks})
        for block in blocks[found:]:
            if len(tree.cached) >= capacity:
                victim = max(tree.leaves(blocks), key=lambda b: (upcoming[b], len(b)), default=None)
                if victim is None or upcoming[block] >= upcoming[victim]:
                    break
                tree.cached.remove(victim)
            tree.cached.add(block)
    return hits


def flat_lru(chains: Chains, capacity: int) -> int:
    """Hits of block accesses with LRU that knows no prefixes."""
    cache: OrderedDict[Block, None] = OrderedDict()
    hits = 0
    for chain in chains:
        for block in blocks_of(chain):
            if block in cache:
                hits += 1
                cache.move_to_end(block)
                continue
            if len(cache) >= capacity:
                cache.popitem(last=False)
            cache[block] = None
    return hits
