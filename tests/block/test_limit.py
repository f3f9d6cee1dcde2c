"""A chain with a limit is the chain of a shorter sequence, whatever is done with it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.block.key import KEY_BUILDERS, KeyChain
from kvcache_factory.testing import tiny_identity, tiny_spec

SPEC = tiny_spec(block_tokens=4)
tokens = st.lists(st.integers(0, 3), max_size=30)


@given(st.sampled_from(KEY_BUILDERS), st.integers(0, 20), st.lists(st.tuples(st.booleans(), tokens), max_size=6))
def test_keys_end_at_the_limit_rounded_down(builder: str, limit: int, steps: list[tuple[bool, list[int]]]) -> None:
    """Extending and syncing give the first keys of the chain without a limit, and all tokens."""
    free = KeyChain(tiny_identity(SPEC), builder=builder)
    bounded = KeyChain(tiny_identity(SPEC), builder=builder, max_tokens=limit)
    for replace, new in steps:
        for chain in (free, bounded):
            chain.sync(new) if replace else chain.extend(new)
        assert bounded.num_blocks == min(free.num_blocks, limit // 4)
        assert np.array_equal(bounded.keys, free.keys[: bounded.num_blocks])
        assert np.array_equal(bounded.tokens, free.tokens)
