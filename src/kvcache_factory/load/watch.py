"""The generator's own count, taken where the model computes and not where the cache counts."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


class Counts(msgspec.Struct):
    """Sums over requests, in tokens."""

    requests: int = 0
    asked_tokens: int = 0
    """Of prompts, as far as they can be looked up: full blocks, without the last token."""
    reusable_tokens: int = 0
    """Of these, the beginning that was asked or answered before."""
    served_tokens: int = 0
    """Of these, tokens that the model did not compute."""


class Watch:
    """Sees what the model is given in each request, from hooks of its own.

    Parameters
    ----------
    model:
        A torch module whose forward takes ``input_ids``.
    block_tokens:
        Tokens of a block: the unit in which anything is reused.
    """

    def __init__(self, model: Any, block_tokens: int) -> None:
        self.counts = Counts()
        self.first_token_s: list[tuple[float, float]] = []
        """When a request came, and how long it took to its first token."""
        self._block_tokens = block_tokens
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._seen: set[bytes] = set()
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def begin(self) -> None:
        """A request begins in this thread."""
        self._mine.computed = -1
        self._mine.begun = time.perf_counter()
        self._mine.first_s = 0.0

    def end(self, prompt: Tokens, conversation: Tokens) -> None:
        """It has ended with the tokens of prompt and answer; the KV of all but the last is there to be kept."""
        asked = (len(prompt) - 1) // self._block_tokens
        served = len(prompt) - self._mine.computed
        digests = self._digests(conversation[:-1])
        with self._lock:
            reusable = next((i for i, digest in enumerate(digests[:asked]) if digest not in self._seen), asked)
            self._seen.update(digests)
            self.counts.requests += 1
            self.counts.asked_tokens += asked * self._block_tokens
            self.counts.reusable_tokens += reusable * self._block_tokens
            self.counts.served_tokens += served
            self.first_token_s.append((self._mine.begun, self._mine.first_s))

    def close(self) -> None:
        """Leave the model alone."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self._mine, "computed", 0) < 0:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._mine.computed = int(ids.shape[1])

    def _after(self, *_: object) -> None:
        if not getattr(self._mine, "first_s", 1.0):
            self._mine.first_s = time.perf_counter() - self._mine.begun

    def _digests(self, tokens: Tokens) -> list[bytes]:
        digest, digests = b"", []
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            block = tokens[start : start + self._block_tokens].tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=16).digest()
            digests.append(digest)
        return digests
