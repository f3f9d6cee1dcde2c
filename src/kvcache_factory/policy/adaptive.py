"""A policy that follows whichever of several would have had the most hits lately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from .base import NO_HINT, Action, EvictionPolicy, Keys, RequestHint, Rows, Target, Unlink
from .chorus import Chorus
from .names import as_data, as_policy

_FORGET = 0.5
_LEAD = 1.02
"""Hits of the best in multiples of those of the policy in charge, from which on it takes over."""


class AdaptivePolicy(Chorus):
    """Evicts by the member whose shadow has had the most hits lately.

    Each member has a shadow: a cache of a sample of the keys, scaled to the sample, that holds no blocks, and only
    counts hits up to the first that misses in a request.  Sampling by key is that of SHARDS (Waldspurger et al., FAST
    2015); choosing by simulated hits that of Adaptive Replacement by shadow caches (as in Ari et al., ACME, 2002).
    Deviations: the sample's chains have gaps, so that shadows evict by age where the real rows leave leaves first.

    Parameters
    ----------
    policies:
        The members; the first is in charge until something is known.
    sample:
        One key in this many is simulated; fewer rows than 64 times this many are simulated whole.
    """

    name: ClassVar[str] = "adaptive"

    def __init__(
        self,
        policies: Sequence[Any] = ("lru", "gre", "s3fifo"),
        max_size_gb: float | None = None,
        sample: int = 16,
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        if isinstance(policies, str) or len(policies) < 2:
            raise ConfigError(f"AdaptivePolicy({policies!r}): give at least two policies")
        if not isinstance(sample, int) or isinstance(sample, bool) or not 1 <= sample <= 1024:
            raise ConfigError(f"AdaptivePolicy(sample={sample!r}): use 1 to 1024")
        self.policies = [as_policy(policy) for policy in policies]
        self.sample = sample
        self._voices = [policy.clone() for policy in self.policies]
        self.scorer = next((policy.scorer for policy in self.policies if policy.scorer is not None), None)
        # Shadows of few rows are whole; those of many cost a share of this.
        self.bytes_per_row = sum(60 + 2 * voice.bytes_per_row for voice in self._voices)

    def options(self) -> dict[str, Any]:
        own = {"policies": [as_data(policy) for policy in self.policies], "sample": self.sample}
        return {**super().options(), **own}

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._keys = keys
        self._every = max(min(self.sample, rows // 64), 1)
        self._shadows = [Shadow(policy.clone(), max(rows // self._every, 1)) for policy in self.policies]
        self._in_charge = 0
        self._window = 4 * rows
        self._seen = 0
        self._asked: Keys | None = None

    @property
    def in_charge(self) -> str:
        """Name of the member that chooses now."""
        return self.policies[self._in_charge].name

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        super().on_request(now, rows, hit_len, hint)
        self._simulate(now, self._keys[rows], hint)

    def _simulate(self, now: float, keys: Keys, hint: RequestHint) -> None:
        self._seen += len(keys)
        sampled = keys[keys[:, 0] % np.uint64(self._every) == 0]
        for shadow in self._shadows:
            shadow.use(now, sampled, new_request=not hint.first_block)
        if self._seen >= self._window:
            self._seen = 0
            hits = [shadow.hits for shadow in self._shadows]
            best = int(np.argmax(hits))
            if hits[best] > _LEAD * hits[self._in_charge]:
                self._in_charge = best
            for shadow in self._shadows:
                shadow.hits *= _FORGET

    def admit(self, now: float, keys: Keys, hint: RequestHint) -> int:
        return self._voices[self._in_charge].admit(now, keys, hint)

    def make_room(self, now: float, keys: Keys, hint: RequestHint, unlink: Unlink) -> tuple[int, list[int]]:
        asked = self._voices[self._in_charge]
        admitted, leaving = asked.make_room(now, keys, hint, self._unlink_for(asked, unlink))
        self._simulate(now, keys[admitted:], hint)  # what is not stored never comes as rows
        return admitted, leaving

    def overdue(self, now: float) -> int:
        return self._voices[self._in_charge].overdue(now)

    def next_victim(self) -> int:
        return self._next_of(self._voices[self._in_charge])

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        asked = self._voices[self._in_charge]
        return asked.victims(count, self._unlink_for(asked, unlink))


class Shadow:
    """A cache without blocks: which keys would be there under a policy, and how often they would be found."""

    def __init__(self, policy: EvictionPolicy, rows: int) -> None:
        self.hits = 0.0
        self._policy = policy
        self._keys = np.zeros((rows, 2), np.uint64)
        self._row_of: dict[int, int] = {}
        self._free = list(range(rows - 1, -1, -1))
        self._whole = True
        policy.bind(rows, self._keys)

    def use(self, now: float, keys: Keys, new_request: bool) -> None:
        """A request asks for *keys*, in this order; hits behind a miss do not count."""
        self._whole |= new_request
        for i, word in enumerate(keys[:, 0].tolist()):
            row = self._row_of.get(word, -1)
            self._whole &= row >= 0
            if row >= 0:
                self.hits += self._whole
                self._policy.on_request(now, np.array([row], np.int32), 1, NO_HINT)
            else:
                self._store(now, keys[i : i + 1], word)

    def _store(self, now: float, key: Keys, word: int) -> None:
        if not self._free:
            for row in self._policy.make_room(now, key, NO_HINT, _no_parent)[1]:
                del self._row_of[int(self._keys[row, 0])]
                self._free.append(row)
        if self._free:
            row = self._free.pop()
            self._row_of[word] = row
            self._keys[row] = key[0]
            self._policy.on_request(now, np.array([row], np.int32), 0, NO_HINT)
            self._policy.on_evictable(row, True)


def _no_parent(row: int) -> int:
    return -1
