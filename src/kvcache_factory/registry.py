"""Names of policies and codecs in configurations."""

from __future__ import annotations

from .codec.base import BlockCodec
from .codec.names import register_codec as _register
from .policy.compression import METHODS
from .policy.importance import register_scorer
from .policy.names import known_policies, make_policy, register_policy

__all__ = ["make_policy", "register_codec", "register_policy", "register_scorer"]

known_policies()  # their kernels are there, then, when the others are compiled


def register_codec(codec: type[BlockCodec]) -> type[BlockCodec]:
    """Make a codec of your own known by its name, to levels and to CompressionPolicy, in this process.

    A process that reads what it has encoded must do the same; where it has not, such blocks are misses.
    """
    METHODS.add(_register(codec).name)
    return codec
