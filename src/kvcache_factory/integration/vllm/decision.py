"""Load, or compute?  Two predictions from what was measured, starting from what such machines usually do."""

from __future__ import annotations

from typing import Literal, Protocol

from ..base import MIN_TOKENS, Rate

EXPLORE_EVERY = 32
"""One in so many loads that look too slow is done anyway: a wrong belief must be able to end."""


class Book(Protocol):
    """Where decisions and outcomes are counted."""

    def decided(self, choice: Literal["load", "recompute", "explore"]) -> None: ...
    def compare(self, kind: Literal["load", "recompute"], predicted_s: float, actual_s: float) -> None: ...


class LoadDecision:
    """Whether blocks are brought from slower tiers for a request.

    Parameters
    ----------
    mode:
        ``"auto"`` compares predictions, ``"always"`` and ``"never"`` do not.
    bytes_per_token:
        Of keys and values.
    read_bytes_per_s, prefill_tokens_per_s:
        What is believed before anything was measured.
    book:
        Where decisions are counted, and predictions beside what came of them.
    """

    def __init__(
        self,
        mode: Literal["auto", "always", "never"],
        bytes_per_token: int,
        *,
        read_bytes_per_s: float = 0.5e9,
        prefill_tokens_per_s: float = 5000.0,
        book: Book | None = None,
    ) -> None:
        self.mode = mode
        self._book = book
        self.reads = Rate(read_bytes_per_s)
        self.prefill = Rate(prefill_tokens_per_s)
        self._bytes_per_token = bytes_per_token
        self._waiting_bytes = 0
        self._declined = 0

    @property
    def never(self) -> bool:
        """Whether nothing is ever loaded."""
        return self.mode == "never"

    def worth_it(self, tokens: int) -> bool:
        """Whether *tokens* tokens are brought sooner than computed, behind the reads that are on their way."""
        if self.mode != "auto" or not tokens:
            return self.mode != "never"
        load = self.reads.seconds(self._waiting_bytes + tokens * self._bytes_per_token)
        choice: Literal["load", "recompute", "explore"] = "load"
        if load >= self.prefill.seconds(tokens):
            self._declined += 1
            choice = "recompute" if self._declined % EXPLORE_EVERY else "explore"
        if self._book is not None:
            self._book.decided(choice)
        return choice != "recompute"

    def patience_s(self, tokens: int) -> float:
        """Seconds after which it would have been quicker to compute *tokens* tokens."""
        return self.prefill.seconds(tokens) if self.mode == "auto" else float("inf")

    def begun(self, tokens: int) -> None:
        """*tokens* tokens are on their way."""
        self._waiting_bytes += tokens * self._bytes_per_token

    def ended(self, tokens: int, brought: int, seconds: float) -> None:
        """Of *tokens* tokens that were on their way, *brought* came, in so many *seconds*."""
        if self._book is not None and brought > 0 and seconds > 0:
            self._book.compare("load", self.reads.seconds(self._waiting_bytes), seconds)
        self._waiting_bytes = max(self._waiting_bytes - tokens * self._bytes_per_token, 0)
        self.reads.measured(brought * self._bytes_per_token, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has computed *tokens* tokens in so many *seconds*."""
        if tokens >= MIN_TOKENS:
            if self._book is not None and seconds > 0:
                self._book.compare("recompute", self.prefill.seconds(tokens), seconds)
            self.prefill.measured(tokens, seconds)
