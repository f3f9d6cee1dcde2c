"""How large blocks are and where prompts end, as a manager is told."""

from __future__ import annotations

import pytest

from kvcache_factory import CacheManager, ConfigError
from kvcache_factory.testing import Opener


def test_nothing_behind_the_limit_is_stored_or_found(open_cache: Opener) -> None:
    """MAX_SEQ_LEN: 10 tokens are two blocks of four, for saving, looking up and loading alike."""
    cache = open_cache(16, max_tokens=10)
    assert cache.save(range(40)) == 2
    assert cache.load(range(40)) == [0, 0]
    match = cache.space.match(cache.space.chain(range(40)), "again")
    assert (match.blocks, match.tokens, match.reason) == (2, 8, "")
    cache.space.release("again")


@pytest.mark.parametrize(
    ("asked", "engine", "tokens"),
    [(0, 16, 64), (0, 48, 96), (0, 0, 64), (-1, 16, 16), (-1, 0, 64), (32, 16, 32), (7, 0, 7)],
)
def test_tokens_of_a_storage_block(asked: int, engine: int, tokens: int) -> None:
    """0: a multiple of the engine's with at least 64; -1: the engine's own, where it has one; else what is asked."""
    assert CacheManager(block_tokens=asked).config.storage_tokens(engine) == tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_tokens": -2},
        {"block_tokens": 1.5},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"chunk_tokens": -1},
        {"profiling_server": "localhost:4040"},
    ],
)
def test_wrong_limits_are_named(wrong: dict[str, object]) -> None:
    """Each message begins with the argument."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CacheManager(**wrong)  # type: ignore[arg-type]
