"""Digests that must hold against strangers, and the one way in which parts are put together before hashing."""

from __future__ import annotations

import hashlib
import struct

DIGEST_BYTES = 16


def length_prefixed(*parts: bytes) -> bytes:
    """Each part after its length (u32, little endian), so that no two lists of parts give the same bytes."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def digest128(*parts: bytes) -> bytes:
    """16 bytes of BLAKE2b over length-prefixed *parts*; the first part names the domain."""
    return hashlib.blake2b(length_prefixed(*parts), digest_size=DIGEST_BYTES).digest()
