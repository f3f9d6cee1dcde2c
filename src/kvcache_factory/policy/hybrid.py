"""Several policies in one: each decides where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..errors import ConfigError
from .base import Action, EvictionPolicy, Keys, RequestHint, Target, Unlink
from .chorus import Chorus
from .names import as_data, as_policy
from .sessions import WholeSessions


class HybridPolicy(Chorus):
    """Combines policies by target and action.

    In each level those members decide whose target is that level, a session, or not given.  Of these, the first whose
    action is ``"evict"`` says who leaves when room is needed at once, and the first whose action is a swap or
    ``"compress"`` says who is moved down, or encoded, ahead of need; where only one kind is there, it does both.

    Parameters
    ----------
    policies:
        The members, the more important first: policies, names, or mappings with ``name`` and ``options``.
    target, action:
        Those of the members that are given none.
    """

    name: ClassVar[str] = "hybrid"

    def __init__(
        self,
        policies: Sequence[Any] = (),
        max_size_gb: float | None = None,
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        if isinstance(policies, str) or not isinstance(policies, Sequence):
            raise ConfigError(f"HybridPolicy({policies!r}): give a list of policies")
        self.policies = [self._under(as_policy(policy)) for policy in policies]
        if not self.policies:
            raise ConfigError("HybridPolicy([]): give at least one policy")
        self._voices = [voice_of(policy) for policy in self.policies]
        self.scorer = next((policy.scorer for policy in self.policies if policy.scorer is not None), None)
        swaps = [voice for voice in self._voices if voice.action.startswith("swap_to_") or voice.action == "compress"]
        others = [voice for voice in self._voices if voice not in swaps]
        self.bytes_per_row = sum(60 + voice.bytes_per_row for voice in self._voices)
        self._evictor = (others or swaps)[0]
        self._swapper = (swaps or others)[0]

    def _under(self, policy: EvictionPolicy) -> EvictionPolicy:
        """*policy* with the target and action that are said here, where it has none of its own."""
        target = self.target if policy.target is None else policy.target
        action = self.action if policy.action == "evict" else policy.action
        if (target, action) == (policy.target, policy.action):
            return policy
        return type(policy)(**policy.options() | {"target": target, "action": action})

    def options(self) -> dict[str, Any]:
        return {"policies": [as_data(policy) for policy in self.policies], **super().options()}

    def clone(self) -> EvictionPolicy:
        options = {**super().options(), "policies": [policy.clone() for policy in self.policies]}
        return type(self)(**options)

    def admit(self, now: float, keys: Keys, hint: RequestHint) -> int:
        return self._evictor.admit(now, keys, hint)

    def make_room(self, now: float, keys: Keys, hint: RequestHint, unlink: Unlink) -> tuple[int, list[int]]:
        return self._evictor.make_room(now, keys, hint, self._unlink_for(self._evictor, unlink))

    def overdue(self, now: float) -> int:
        return self._evictor.overdue(now)

    def next_victim(self) -> int:
        return self._next_of(self._evictor)

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        return self._evictor.victims(count, self._unlink_for(self._evictor, unlink))

    def swap_victims(self, count: int, unlink: Unlink) -> list[int]:
        return self._swapper.swap_victims(count, self._unlink_for(self._swapper, unlink))


def voice_of(policy: EvictionPolicy) -> EvictionPolicy:
    """A fresh *policy* as it works in a level: about whole sessions, where that is its target."""
    clone = policy.clone()
    return WholeSessions(clone) if policy.target == "session" and not isinstance(clone, WholeSessions) else clone
