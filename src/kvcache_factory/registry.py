"""Names of policies in configurations."""

from __future__ import annotations

import difflib
from typing import Any

from .errors import ConfigError
from .policy.base import EvictionPolicy
from .policy.order import FIFOEvictionPolicy, LRUEvictionPolicy

_POLICIES: dict[str, type[EvictionPolicy]] = {}


def register_policy(policy: type[EvictionPolicy]) -> type[EvictionPolicy]:
    """Make a policy class known by its ``name``; usable as a decorator.  A taken name is a ConfigError."""
    if not policy.name:
        raise ConfigError(f"{policy.__name__} has no name; set the class attribute `name`")
    if _POLICIES.setdefault(policy.name, policy) is not policy:
        raise ConfigError(f"the policy name {policy.name!r} is taken by {_POLICIES[policy.name].__name__}")
    return policy


def make_policy(name: str, **options: Any) -> EvictionPolicy:
    """An unbound policy by name; ConfigError with the nearest names when there is none, or an option is wrong."""
    policy = _POLICIES.get(name.lower())
    if policy is None:
        near = difflib.get_close_matches(name.lower(), _POLICIES, 3, 0.3) or sorted(_POLICIES)
        raise ConfigError(f"there is no eviction policy {name!r}; did you mean {' or '.join(near)}?")
    try:
        return policy(**options)
    except TypeError as error:
        raise ConfigError(f"eviction policy {name!r}: {error}") from None


for _policy in (LRUEvictionPolicy, FIFOEvictionPolicy):
    register_policy(_policy)
