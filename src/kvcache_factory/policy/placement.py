"""Which policy decides in which level of a hierarchy, and where it moves things."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import ConfigError
from .base import EvictionPolicy
from .hybrid import HybridPolicy, voice_of
from .order import LRUEvictionPolicy

_SWAP = "swap_to_"


def check_placement(policy: EvictionPolicy, kinds: Sequence[str]) -> None:
    """Refuse targets and actions that the levels of *kinds* (``"gpu"``, ``"cpu"``, ``"disk"``) do not have."""
    for member in _members(policy):
        shown = f"{type(member).__name__}(target={member.target!r}, action={member.action!r})"
        if member.action == "compress" and not any(compresses(member, kind) for kind in kinds):
            raise ConfigError(
                f"{shown}: only levels in memory encode what they have; the backend has {', '.join(kinds)}"
            )
        if _is_level(member.target) and member.target not in kinds:
            raise ConfigError(f"{shown}: there is no such level; the backend has {', '.join(kinds)}")
        reaches = [n for n, kind in enumerate(kinds) if _decides(member, kind) and _below(member, n, kinds) is not None]
        if member.action.startswith(_SWAP) and not reaches:
            raise ConfigError(
                f"{shown}: below what it decides about there is no level of kind {member.action[len(_SWAP) :]}; the "
                f"backend has {', '.join(kinds)}, the fastest first"
            )


def policy_at(policy: EvictionPolicy, kind: str) -> EvictionPolicy:
    """A fresh policy for a level of *kind*; leaf-first LRU where *policy* decides about other levels only."""
    if not _decides(policy, kind):
        return LRUEvictionPolicy()
    if isinstance(policy, HybridPolicy):
        members = [member for member in policy.policies if _decides(member, kind)]
        if not members:
            return LRUEvictionPolicy()
        return HybridPolicy(members) if len(members) > 1 else voice_of(members[0])
    return voice_of(policy)


def compresses(policy: EvictionPolicy, kind: str) -> bool:
    """Whether what *policy* chooses in a level of *kind* is encoded there before anything leaves."""
    return kind in ("gpu", "cpu") and any(m.action == "compress" and _decides(m, kind) for m in _members(policy))


def swap_level(policy: EvictionPolicy, number: int, kinds: Sequence[str]) -> int | None:
    """The level to which what leaves level *number* is moved first, by the first member that says so."""
    for member in _members(policy):
        below = _below(member, number, kinds)
        if _decides(member, kinds[number]) and below is not None:
            return below
    return None


def size_cap_gb(policy: EvictionPolicy, kind: str | None) -> float | None:
    """GiB that *policy* allows the levels of *kind* together (None: all levels in memory together)."""
    caps = [
        member.max_size_gb
        for member in {id(p): p for p in (policy, *_members(policy))}.values()
        if member.max_size_gb is not None and (member.target if _is_level(member.target) else None) == kind
    ]
    return min(caps, default=None)


def _members(policy: EvictionPolicy) -> Iterator[EvictionPolicy]:
    if isinstance(policy, HybridPolicy):
        for member in policy.policies:
            yield from _members(member)
    else:
        yield policy


def _is_level(target: str | None) -> bool:
    return target is not None and target != "session"


def _decides(policy: EvictionPolicy, kind: str) -> bool:
    return not _is_level(policy.target) or policy.target == kind


def _below(policy: EvictionPolicy, number: int, kinds: Sequence[str]) -> int | None:
    if not policy.action.startswith(_SWAP):
        return None
    wanted = policy.action[len(_SWAP) :]
    return next((n for n in range(number + 1, len(kinds)) if kinds[n] == wanted), None)
