"""When blocks are encoded: what a compression policy says, as the engine needs it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Exactly = Callable[[int], bool]
"""Whether the block of this depth stays as it is."""


def NOTHING(depth: int) -> bool:
    """No block has to stay as it is."""
    return False


class CompressionRule(msgspec.Struct, frozen=True):
    """Which blocks of a chain may be encoded.

    Attributes
    ----------
    keep_first:
        Blocks at the beginning of a chain that stay exact: attention sinks are there.
    behind_tokens:
        Tokens that must follow a block in its chain.
    min_age_s:
        Seconds since the block was stored or last used.
    max_hits:
        Blocks that were hit more often stay exact; None: however hot.
    """

    keep_first: int = 1
    behind_tokens: int = 0
    min_age_s: float = 0.0
    max_hits: int | None = None
    when_full: bool = False
    """Only when room runs out, in the order in which the policy would have blocks leave."""

    def exactly(self, chain_blocks: int, block_tokens: int) -> Exactly:
        """Which blocks, of a chain that has so many, stay exact because of their place in it."""

        def keep(depth: int) -> bool:
            return depth < self.keep_first or (chain_blocks - 1 - depth) * block_tokens < self.behind_tokens

        return keep
