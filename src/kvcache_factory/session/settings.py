"""What sessions may hold and how long they live: rules of a manager, and of one session."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from ..errors import ConfigError

Size = float | dict[str, float]
"""GiB that may be held in each tier: one number for every tier, or numbers by the names of tiers."""

OnQuota = Literal["evict", "refuse"]
"""At a quota: let own blocks go, the oldest ends of chains first, or store nothing more."""

EVERY = "*"
"""As the value of a label: each value that has no quota of its own."""


class SessionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rules for all sessions of a manager; sizes are GiB in each tier, or by name of tier."""

    quota_gb: Size | None = None
    """Quota of each session that is not given one of its own; None: no quota."""
    total_gb: Size | None = None
    """Quota of all sessions together, each block counted once."""
    label_gb: dict[str, dict[str, Size]] = {}
    """Quotas of all sessions with a label together: ``{"tenant": {"acme": 4.0, "*": 1.0}}``; ``*``: any other."""
    on_quota: OnQuota = "evict"
    """At a quota: ``"evict"`` own blocks, the oldest ends of chains first, or ``"refuse"`` to store more."""
    ttl_s: float | None = None
    """Seconds without use after which a session is destroyed; None: never."""

    def __post_init__(self) -> None:
        check_size("quota_gb", self.quota_gb)
        check_size("total_gb", self.total_gb)
        for label, values in self.label_gb.items():
            for value, size in values.items():
                check_size(f"label_gb[{label!r}][{value!r}]", size)
        check_on_quota(self.on_quota)
        check_ttl(self.ttl_s)

    def check_tiers(self, names: Collection[str]) -> None:
        """Refuse sizes for tiers that the manager does not have."""
        check_tiers("quota_gb", self.quota_gb, names)
        check_tiers("total_gb", self.total_gb, names)
        for label, values in self.label_gb.items():
            for value, size in values.items():
                check_tiers(f"label_gb[{label!r}][{value!r}]", size, names)


def check_size(name: str, size: Any) -> None:
    """Refuse what is no size in GiB."""
    for part in size.values() if isinstance(size, Mapping) else (size,):
        if part is None and not isinstance(size, Mapping):
            return
        if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part < float("inf"):
            raise ConfigError(f"{name}={size!r}: give GiB above 0, or a dict of them by names of tiers, or None")


def check_tiers(name: str, size: Size | None, names: Collection[str]) -> None:
    """Refuse a size for a tier that is not there."""
    for tier in size if isinstance(size, Mapping) else ():
        if tier not in names:
            raise ConfigError(f"{name}: there is no tier {tier!r}; this manager has {', '.join(names)}")


def check_on_quota(value: Any) -> None:
    """Refuse what is no answer to a quota."""
    if value not in ("evict", "refuse"):
        raise ConfigError(f"on_quota={value!r}: use 'evict' or 'refuse'")


def check_ttl(value: Any) -> None:
    """Refuse what is no time to live."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ConfigError(f"ttl_s={value!r}: give seconds above 0, or None")


def is_name(value: Any) -> bool:
    """Whether *value* is text that can be shown and sent: not empty, and UTF-8."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def check_labels(labels: Any) -> dict[str, str]:
    """Labels as a dict of their own; ConfigError when they are not strings by name."""
    labels = {} if labels is None else labels
    texts = isinstance(labels, Mapping) and all(is_name(text) for pair in labels.items() for text in pair)
    if not texts:
        raise ConfigError(f"labels={labels!r}: give a dict of strings, such as {{'tenant': 'acme', 'route': 'chat'}}")
    return dict(labels)
