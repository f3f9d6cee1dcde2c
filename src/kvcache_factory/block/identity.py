"""Identity: everything beside the tokens that decides what a block's keys and values are.

Two engines share blocks exactly when their identities are equal, so an identity holds what changes the numbers (model,
dtype, scales, adapter), what must stay apart on purpose (salt, namespace), and the tokens of a block.  How a copy lies
in memory, who wrote it and how it was compressed belong to the stored copy, never to the identity.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from ..errors import ConfigError
from .digest import digest128, length_prefixed
from .fingerprint import config_fingerprint, fingerprint_directory, model_fingerprint, weights_fingerprint
from .spec import KVDtype

__all__ = [
    "Identity",
    "config_fingerprint",
    "fingerprint_directory",
    "model_fingerprint",
    "weights_fingerprint",
]

_RECORD_TAG = b"kvcache-factory identity 1"


class Identity(msgspec.Struct, frozen=True, dict=True):
    """Whose KV a key names.

    Attributes:
        model: fingerprint of configuration and weights, from :func:`model_fingerprint`.
        kv_dtype: element type of keys and values; any spelling of a :class:`KVDtype` is taken.
        block_tokens: tokens of one storage block.
        kv_scales: digest of the scales of a quantised KV cache, empty without.
        lora: digest of the *content* of the active adapter (a name is not enough), empty without.
        salt: keeps tenants apart that must not profit from each other's prefixes, or learn of them by timing.
        namespace: keeps deployments apart that share a store.
    """

    model: str
    kv_dtype: str
    block_tokens: int
    kv_scales: str = ""
    lora: str = ""
    salt: str = ""
    namespace: str = "default"

    def __post_init__(self) -> None:
        for name in ("model", "kv_scales", "lora", "salt", "namespace"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"Identity.{name} must be text, not {type(getattr(self, name)).__name__}")
        if not self.model:
            raise ConfigError("Identity.model is empty; pass model_fingerprint(...) or a model_id of your own")
        if type(self.block_tokens) is not int or not 0 < self.block_tokens < 2**32:
            raise ConfigError(f"Identity.block_tokens must be a positive integer, not {self.block_tokens!r}")
        msgspec.structs.force_setattr(self, "kv_dtype", KVDtype.of(self.kv_dtype).value)

    def record(self) -> bytes:
        """The length-prefixed record that keys start from; ``docs/format.md`` fixes its order."""
        first = (self.model, self.kv_dtype, str(self.block_tokens), self.kv_scales)
        texts = (*first, self.lora, self.salt, self.namespace)
        return length_prefixed(_RECORD_TAG, *(text.encode("utf-8", "surrogatepass") for text in texts))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for the record; the root of every rolling key.

        Cryptographic: salts and adapters may come from strangers, and nothing else is compared when identities are.
        """
        return digest128(b"identity", self.record())

    def __repr__(self) -> str:
        salt = "***" if self.salt else ""  # a salt in a log would undo what it is for
        return (
            f"Identity(model={self.model!r}, kv_dtype={self.kv_dtype!r}, block_tokens={self.block_tokens}, "
            f"kv_scales={self.kv_scales!r}, lora={self.lora!r}, salt={salt!r}, namespace={self.namespace!r})"
        )
