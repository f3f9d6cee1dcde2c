"""Names of policies in configurations."""

from __future__ import annotations

from .policy.importance import register_scorer
from .policy.names import known_policies, make_policy, register_policy

__all__ = ["make_policy", "register_policy", "register_scorer"]

known_policies()  # their kernels are there, then, when the others are compiled
