"""Policies by name, and as plain data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..errors import ConfigError, instead_of
from .base import EvictionPolicy

_POLICIES: dict[str, type[EvictionPolicy]] = {}
_SHIPPED = {
    "order": ("LRUEvictionPolicy", "FIFOEvictionPolicy", "LFUEvictionPolicy", "TTLEvictionPolicy"),
    "s3fifo": ("S3FIFOEvictionPolicy", "SIEVEEvictionPolicy"),
    "arc": ("ARCEvictionPolicy", "MQEvictionPolicy"),
    "scored": ("GDSFEvictionPolicy", "HeuristicEvictionPolicy"),
    "size": ("SizeAwarePolicy",),
    "gre": ("GREEvictionPolicy",),
    "hybrid": ("HybridPolicy",),
    "adaptive": ("AdaptivePolicy",),
}


def register_policy(policy: type[EvictionPolicy]) -> type[EvictionPolicy]:
    """Make a policy class known by its ``name``; usable as a decorator.  A taken name is a ConfigError."""
    if not policy.name:
        raise ConfigError(f"{policy.__name__} has no name; set the class attribute `name`")
    known = known_policies()
    if known.setdefault(policy.name, policy) is not policy:
        raise ConfigError(f"the policy name {policy.name!r} is taken by {known[policy.name].__name__}")
    return policy


def known_policies() -> dict[str, type[EvictionPolicy]]:
    """Policy classes by name."""
    if not _POLICIES:
        for module, classes in _SHIPPED.items():
            home = import_module(f".{module}", __package__)
            for name in classes:
                policy = getattr(home, name)
                _POLICIES[policy.name] = policy
    return _POLICIES


def make_policy(name: str, **options: Any) -> EvictionPolicy:
    """An unbound policy by name; ConfigError with the nearest names when there is none, or an option is wrong."""
    known = known_policies()
    policy = known.get(name.lower())
    if policy is None:
        raise ConfigError(f"there is no eviction policy {name!r}; {instead_of(name, known)}")
    allowed = inspect.signature(policy).parameters
    unknown = [repr(option) for option in options if option not in allowed]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in allowed.values()):
        raise ConfigError(f"eviction policy {name!r} has no option {', '.join(unknown)}; use {', '.join(allowed)}")
    try:
        return policy(**options)
    except TypeError as error:
        raise ConfigError(f"eviction policy {name!r}: {error}") from None


def as_policy(given: Any) -> EvictionPolicy:
    """A policy from itself, its name, or what :func:`as_data` made of one."""
    if isinstance(given, EvictionPolicy):
        return given
    if isinstance(given, str):
        return make_policy(given)
    if isinstance(given, Mapping) and set(given) <= {"name", "options"} and "name" in given:
        return make_policy(given["name"], **given.get("options", {}))
    raise ConfigError(f"{given!r} is no eviction policy; give one, its name, or a mapping with 'name' and 'options'")


def as_data(policy: EvictionPolicy) -> dict[str, Any]:
    """A policy's name and options."""
    return {"name": policy.name, "options": policy.options()}
