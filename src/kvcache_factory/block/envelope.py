"""The envelope: what stands in front of a payload in every tier, so that a copy proves by itself what it is.

A slot image is ``[header | payload]``.  The header names the identity, key and record of the block, how the payload was
written, and checksums of both; ``docs/format.md`` has every offset and is never changed for a version in use.  Reading
trusts nothing: sizes are checked before they are used, and one damaged bit anywhere is a :class:`HeaderError`.
"""

from __future__ import annotations

import struct
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import FormatError
from .spec import HEADER_FIXED, PAGE

if TYPE_CHECKING:
    from collections.abc import Buffer

MAGIC = b"KVCFSLOT"
FORMAT_VERSION = 1
READABLE_VERSIONS = frozenset({1})
"""Version N reads N and N-1; there was no version 0."""


class Fidelity(IntEnum):
    """How close a payload is to what the model computed.  Larger is worse; a block inherits the worst of its prefix."""

    EXACT = 0
    BOUNDED = 1
    APPROXIMATE = 2


class Reason(StrEnum):
    """Why a header was refused."""

    MAGIC = "magic"
    VERSION = "version"
    TRUNCATED = "truncated"
    SIZE = "size"
    CHECKSUM = "checksum"
    FIELD = "field"


class HeaderError(FormatError):
    """A header that cannot be read, with the :class:`Reason`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Header(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What a slot image says about itself.

    Attributes:
        identity_digest, key, parent_key, extras: 16 bytes each; extras are zeros where no media touch the block.
        tokens: token ids of the block, ``uint32 [block_tokens]``.
        layout: name of the order of the payload's bytes, at most 31 bytes of ASCII.
        fidelity, generation: how close the payload is to the original, and how many lossy codings it went through.
        codec, codec_params: what undoes the coding, at most 31 bytes of ASCII and 256 bytes.
        payload_bytes: length of the payload as stored, without padding.
        payload_checksum: :func:`checksum` of exactly those bytes.
    """

    identity_digest: bytes
    key: bytes
    parent_key: bytes
    tokens: npt.NDArray[np.uint32]
    payload_bytes: int
    payload_checksum: int
    layout: str
    extras: bytes = bytes(16)
    fidelity: Fidelity = Fidelity.EXACT
    generation: int = 0
    codec: str = "raw"
    codec_params: bytes = b""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Header):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__struct_fields__ if name != "tokens")
        return all(a == b for a, b in pairs) and np.array_equal(self.tokens, other.tokens)


# magic, version, offset of the tokens, header bytes, header checksum, tokens, fidelity, generation, identity, key,
# parent, extras, payload bytes, payload checksum, layout, codec, length and bytes of the codec's parameters
_FIXED = struct.Struct("<8s H H I Q I H H 16s 16s 16s 16s Q Q 16x 32s 32s H 6x 256s")
_PROLOGUE = struct.Struct("<8s H H I Q I")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = 16
_KEY_WORD = 48 // 8
_PAYLOAD_CHECKSUM_WORD = 104 // 8
_NAME_BYTES = 31
_PARAM_BYTES = 256
assert _FIXED.size <= HEADER_FIXED


def checksum(payload: Buffer) -> int:
    """XXH3-64 of a payload (any contiguous buffer): finds damage, proves nothing about who wrote it."""
    return xxhash.xxh3_64_intdigest(payload)


def pack_header(header: Header, header_bytes: int, out: memoryview) -> None:
    """Write *header* into the first *header_bytes* bytes of *out* (``BlockSpec.header_bytes``), unused bytes as zeros.

    A header that does not fit, or values that the format has no room for, are misuse: assertions.
    """
    view = memoryview(out).cast("B")
    count = len(header.tokens)
    assert header_bytes % PAGE == 0
    assert HEADER_FIXED + 4 * count <= header_bytes <= len(view)
    fixed = _fixed_part(header, header_bytes)
    tokens = np.ascontiguousarray(header.tokens, "<u4").tobytes()
    image = bytearray((fixed.ljust(HEADER_FIXED, b"\0") + tokens).ljust(header_bytes, b"\0"))
    _CHECKSUM.pack_into(image, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(image))
    view[:header_bytes] = image


def pack_headers(
    template: Header,
    slots: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    parents: npt.NDArray[np.uint64],
    tokens: npt.NDArray[np.uint32],
    extras: npt.NDArray[np.uint64],
    payload_checksums: npt.NDArray[np.uint64],
    header_bytes: int,
) -> None:
    """Write the headers of many blocks that differ from *template* only in what is given per block.

    The same bytes as :func:`pack_header` would write, at a fraction of its cost for each block.

    Args:
        template: identity, layout, fidelity, codec and payload length of all blocks; its record is not used.
        slots: slot images, ``uint8 [slots, slot_bytes]``; *rows* ``[n]`` says which of them to write.
        keys, parents, extras: ``uint64 [n, 2]``, as :class:`KeyChain` gives them.
        tokens: ``uint32 [n, block_tokens]``.
        payload_checksums: ``uint64 [n]``.
    """
    count, block_tokens = tokens.shape
    assert HEADER_FIXED + 4 * block_tokens <= header_bytes <= slots.shape[1]
    assert header_bytes % PAGE == 0
    assert len(rows) == len(keys) == len(parents) == len(extras) == len(payload_checksums) == count
    fixed = _fixed_part(msgspec.structs.replace(template, tokens=tokens[0]), header_bytes) if count else b""
    images = np.zeros((count, header_bytes), np.uint8)
    images[:, : len(fixed)] = np.frombuffer(fixed, np.uint8)
    images[:, HEADER_FIXED : HEADER_FIXED + 4 * block_tokens] = tokens.astype("<u4", order="C").view(np.uint8)
    words = images.view("<u8")
    words[:, _KEY_WORD : _KEY_WORD + 2] = keys
    words[:, _KEY_WORD + 2 : _KEY_WORD + 4] = parents
    words[:, _KEY_WORD + 4 : _KEY_WORD + 6] = extras
    words[:, _PAYLOAD_CHECKSUM_WORD] = payload_checksums
    whole, digest = memoryview(images.reshape(-1)), xxhash.xxh3_64_intdigest
    words[:, _CHECKSUM_AT // 8] = [digest(whole[at : at + header_bytes]) for at in range(0, len(whole), header_bytes)]
    slots[rows, :header_bytes] = images


def _fixed_part(header: Header, header_bytes: int) -> bytes:
    digests = (header.identity_digest, header.key, header.parent_key, header.extras)
    assert all(len(digest) == 16 for digest in digests)
    assert len(header.codec_params) <= _PARAM_BYTES
    return _FIXED.pack(
        *(MAGIC, FORMAT_VERSION, HEADER_FIXED, header_bytes, 0),
        *(len(header.tokens), int(header.fidelity), header.generation),
        *digests,
        *(header.payload_bytes, header.payload_checksum, _name(header.layout), _name(header.codec)),
        *(len(header.codec_params), header.codec_params),
    )


def _name(text: str) -> bytes:
    encoded = text.encode("ascii")
    assert 0 < len(encoded) <= _NAME_BYTES
    assert text.isprintable()
    return encoded


def unpack_header(view: Buffer) -> Header:
    """Read the header at the start of *view* (at least the whole header; a slot image will do).

    Raises :class:`HeaderError` for anything but an intact header of a version this library reads.  The result copies
    what it needs and is no larger than *view*.
    """
    data = memoryview(view).cast("B")
    header_bytes, count = _check_prologue(data)
    _check_sum(data[:header_bytes])
    fields = _FIXED.unpack_from(data)
    fidelity, generation, identity, key, parent, extras, payload_bytes, payload_checksum = fields[6:14]
    layout, codec, params_length, params = fields[14:]
    if fidelity not in Fidelity._value2member_map_ or params_length > _PARAM_BYTES:
        raise HeaderError(Reason.FIELD, f"the header holds fidelity {fidelity} and {params_length} bytes of parameters")
    return Header(
        identity_digest=identity,
        key=key,
        parent_key=parent,
        extras=extras,
        tokens=np.frombuffer(data, "<u4", count, HEADER_FIXED).astype(np.uint32),
        layout=_text(layout, "layout"),
        fidelity=Fidelity(fidelity),
        generation=generation,
        codec=_text(codec, "codec"),
        codec_params=params[:params_length],
        payload_bytes=payload_bytes,
        payload_checksum=payload_checksum,
    )


def _check_prologue(data: memoryview) -> tuple[int, int]:
    """Header bytes and number of tokens, once they are known to lie inside *data*."""
    if len(data) < HEADER_FIXED:
        raise HeaderError(Reason.TRUNCATED, f"{len(data)} bytes are no header; it has at least {HEADER_FIXED}")
    magic, version, tokens_at, header_bytes, _, count = _PROLOGUE.unpack_from(data)
    if magic != MAGIC:
        raise HeaderError(Reason.MAGIC, f"no slot image begins with {magic!r}")
    if version not in READABLE_VERSIONS:
        raise HeaderError(Reason.VERSION, f"format version {version}; this library reads {sorted(READABLE_VERSIONS)}")
    if tokens_at != HEADER_FIXED or header_bytes % PAGE or HEADER_FIXED + 4 * count > header_bytes:
        raise HeaderError(Reason.SIZE, f"{count} tokens at {tokens_at} do not fit a header of {header_bytes} bytes")
    if header_bytes > len(data):
        raise HeaderError(Reason.TRUNCATED, f"the header has {header_bytes} bytes, of which {len(data)} are here")
    return header_bytes, count


def seal_header(view: memoryview) -> None:
    """Make the checksum of a whole header right again after fields were changed in place."""
    _CHECKSUM.pack_into(view, _CHECKSUM_AT, _sum_of(view))


def _check_sum(data: memoryview) -> None:
    if _sum_of(data) != _CHECKSUM.unpack_from(data, _CHECKSUM_AT)[0]:
        raise HeaderError(Reason.CHECKSUM, "the header does not match its checksum")


def _sum_of(data: memoryview) -> int:
    state = xxhash.xxh3_64(data[:_CHECKSUM_AT])
    state.update(bytes(_CHECKSUM.size))  # the sum is taken with zeros in its own place
    state.update(data[_CHECKSUM_AT + _CHECKSUM.size :])
    return state.intdigest()


def _text(field: bytes, what: str) -> str:
    name = field.rstrip(b"\0")
    if not 0 < len(name) <= _NAME_BYTES or not name.isascii() or not name.decode("ascii").isprintable():
        raise HeaderError(Reason.FIELD, f"the header's {what} is not a name: {field!r}")
    return name.decode("ascii")
