"""The generator's own count, taken where the model computes and not where the cache counts."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .users import Tokens


class Counts(msgspec.Struct):
    """Sums over requests, in tokens."""

    requests: int = 0
    asked_tokens: int = 0
    """Of prompts, as far as they can be looked up: full blocks, without the last token."""
    reusable_tokens: int = 0
    """Of these, the beginning that was asked or answered before."""
    served_tokens: int = 0
    """Of these, tokens that the model did not compute."""
    computed_tokens: int = 0
    """Of prompts, tokens that the model did compute."""
    answered_tokens: int = 0
    first_token_s: float = 0.0
    """Times to the first token."""
    first_pass_s: float = 0.0
    """Of these, within the model: whoever measures from a request's coming has no less."""
    first_return_s: float = 0.0
    """Times until the model was called again, or the answer was there: whoever measures inside has no more."""


class Thinned:
    """Points in time with a value, in memory that never grows: when it is full, every other one goes.

    From then on every second one is taken, then every fourth: they stay evenly spread over all that came.
    """

    def __init__(self, places: int = 1 << 14) -> None:
        self._points = np.full((places, 2), np.nan)
        self._kept = 0
        self._came = 0
        self._every = 1

    def add(self, at: float, value: float) -> None:
        """Take note of a point, or not."""
        if self._came % self._every == 0:
            if self._kept == len(self._points):
                self._kept = (self._kept + 1) // 2
                self._points[: self._kept] = self._points[::2].copy()
                self._every *= 2
            if self._came % self._every == 0:
                self._points[self._kept] = at, value
                self._kept += 1
        self._came += 1

    def between(self, low: float, high: float) -> npt.NDArray[np.float64]:
        """Values of the points that were kept, from *low* to *high* in time."""
        kept = self._points[: self._kept]
        values: npt.NDArray[np.float64] = kept[(kept[:, 0] >= low) & (kept[:, 0] <= high), 1]
        return values

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, however much came."""
        return int(self._points.nbytes)


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
        self.first_tokens = Thinned()
        """When a request came, by the clock ``time.perf_counter``, and seconds to its first token."""
        self._block_tokens = block_tokens
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def begin(self) -> None:
        """A request begins in this thread."""
        self._mine.computed = -1
        self._mine.begun = time.perf_counter()
        self._mine.entered = self._mine.first_s = self._mine.returned_s = 0.0

    def end(self, prompt: Tokens, repeated: int, answered: int) -> None:
        """It has ended with *answered* tokens; the first *repeated* ones of its prompt had been said before."""
        block, mine = self._block_tokens, self._mine
        self._returned()
        asked = (len(prompt) - 1) // block
        with self._lock:
            self.counts.requests += 1
            self.counts.asked_tokens += asked * block
            self.counts.reusable_tokens += min(repeated // block, asked) * block
            self.counts.served_tokens += len(prompt) - mine.computed
            self.counts.computed_tokens += mine.computed
            self.counts.answered_tokens += answered
            self.counts.first_token_s += mine.first_s
            self.counts.first_pass_s += mine.begun + mine.first_s - mine.entered
            self.counts.first_return_s += mine.returned_s
            self.first_tokens.add(mine.begun, mine.first_s)

    def close(self) -> None:
        """Leave the model alone."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        computed = getattr(self._mine, "computed", 0)
        if computed < 0:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._mine.computed = int(ids.shape[1])
            self._mine.entered = time.perf_counter()
        elif computed:
            self._returned()

    def _after(self, *_: object) -> None:
        if not getattr(self._mine, "first_s", 1.0):
            self._mine.first_s = time.perf_counter() - self._mine.begun

    def _returned(self) -> None:
        if not self._mine.returned_s:
            self._mine.returned_s = time.perf_counter() - self._mine.begun
