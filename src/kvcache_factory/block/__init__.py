"""What a block is: geometry, identity, keys, and the envelope around its bytes.  Nothing here needs torch."""

from __future__ import annotations

from .envelope import (
    FORMAT_VERSION,
    Fidelity,
    Header,
    HeaderError,
    Reason,
    checksum,
    pack_header,
    pack_headers,
    unpack_header,
)
from .identity import (
    Identity,
    config_fingerprint,
    fingerprint_directory,
    model_fingerprint,
    weights_fingerprint,
)
from .key import KEY_BUILDERS, KeyChain, MediaSpan, normalise_tokens, root_key
from .spec import PAGE, PLAIN_LAYOUTS, BlockSpec, KVDtype, Layout, RopeParameters, round_up, storage_block_tokens

__all__ = [
    "FORMAT_VERSION",
    "KEY_BUILDERS",
    "PAGE",
    "PLAIN_LAYOUTS",
    "BlockSpec",
    "Fidelity",
    "Header",
    "HeaderError",
    "Identity",
    "KVDtype",
    "KeyChain",
    "Layout",
    "MediaSpan",
    "Reason",
    "RopeParameters",
    "checksum",
    "config_fingerprint",
    "fingerprint_directory",
    "model_fingerprint",
    "normalise_tokens",
    "pack_header",
    "pack_headers",
    "root_key",
    "round_up",
    "storage_block_tokens",
    "unpack_header",
    "weights_fingerprint",
]
