"""A header is read back exactly as it was written, or refused with a reason; there is nothing in between."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.block import (
    Fidelity,
    Header,
    HeaderError,
    Identity,
    KeyChain,
    MediaSpan,
    Reason,
    checksum,
    pack_header,
    pack_headers,
    unpack_header,
)
from kvcache_factory.errors import FormatError

digests = st.binary(min_size=16, max_size=16)
labels = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=31)
headers = st.builds(
    Header,
    identity_digest=digests,
    key=digests,
    parent_key=digests,
    extras=digests,
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70).map(lambda t: np.array(t, np.uint32)),
    layout=labels,
    fidelity=st.sampled_from(Fidelity),
    generation=st.integers(0, 2**16 - 1),
    codec=labels,
    codec_params=st.binary(max_size=256),
    payload_bytes=st.integers(0, 2**64 - 1),
    payload_checksum=st.integers(0, 2**64 - 1),
)
EXAMPLE = Header(
    identity_digest=bytes(range(16)),
    key=b"k" * 16,
    parent_key=b"p" * 16,
    tokens=np.arange(64, dtype=np.uint32),
    layout="LCND",
    codec="int8",
    codec_params=b"\x01\x02",
    payload_bytes=2 << 20,
    payload_checksum=77,
)


def packed(header: Header, header_bytes: int = 4096) -> bytearray:
    out = bytearray(b"\xa5" * header_bytes)  # whatever was there before must not show through
    pack_header(header, header_bytes, memoryview(out))
    return out


def sealed(image: bytearray) -> bytearray:
    """The image with a checksum that fits: what a hostile writer, not an accident, would produce."""
    image[16:24] = bytes(8)
    image[16:24] = struct.pack("<Q", xxhash.xxh3_64(bytes(image)).intdigest())
    return image


def refusal(image: Any) -> Reason:
    with pytest.raises(FormatError) as error:
        unpack_header(image)
    assert isinstance(error.value, HeaderError)
    assert str(error.value)
    return error.value.reason


@given(headers, st.sampled_from([4096, 8192]), st.integers(0, 300))
def test_a_header_survives_its_slot(header: Header, header_bytes: int, payload: int) -> None:
    """Every field round-trips, whatever lies behind the header, from bytes, views and arrays alike."""
    image = packed(header, header_bytes) + b"\xff" * payload
    for view in (image, bytes(image), memoryview(image), np.frombuffer(image, np.uint8)):
        assert unpack_header(view) == header


def test_every_single_flipped_bit_is_found() -> None:
    """No bit of the header's pages can change without a refusal, padding and reserved bytes included."""
    image = packed(EXAMPLE)
    reasons = set()
    for at in range(len(image)):
        for bit in range(8):
            image[at] ^= 1 << bit
            try:
                unpack_header(image)
            except HeaderError as error:
                reasons.add(error.reason)
            else:
                pytest.fail(f"bit {bit} of byte {at} was flipped and nobody noticed")
            image[at] ^= 1 << bit
    assert unpack_header(image) == EXAMPLE
    assert {Reason.MAGIC, Reason.VERSION, Reason.CHECKSUM, Reason.SIZE} <= reasons


def test_every_truncation_is_found() -> None:
    """A header cut anywhere, down to nothing, is refused before anything in it is used."""
    image = bytes(packed(EXAMPLE))
    assert {refusal(image[:length]) for length in range(len(image))} == {Reason.TRUNCATED}


@given(st.binary(max_size=5000))
def test_noise_is_refused(noise: bytes) -> None:
    """Arbitrary bytes, also behind the right magic and version, end in a refusal and nothing else."""
    refusal(noise)
    refusal(b"KVCFSLOT\x01\x00" + noise)


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"X", Reason.MAGIC),
        (8, struct.pack("<H", 0), Reason.VERSION),
        (8, struct.pack("<H", 2), Reason.VERSION),
        (10, struct.pack("<H", 256), Reason.SIZE),
        (12, struct.pack("<I", 0), Reason.SIZE),
        (12, struct.pack("<I", 4095), Reason.SIZE),
        (12, struct.pack("<I", 2**32 - 4096), Reason.TRUNCATED),
        (24, struct.pack("<I", 2**32 - 1), Reason.SIZE),
        (24, struct.pack("<I", 897), Reason.SIZE),
        (28, struct.pack("<H", 3), Reason.FIELD),
        (128, bytes(32), Reason.FIELD),
        (128, b"\xff" * 32, Reason.FIELD),
        (160, b"a\0b" + bytes(29), Reason.FIELD),
        (160, b"a" * 32, Reason.FIELD),
        (192, struct.pack("<H", 257), Reason.FIELD),
    ],
)
def test_a_header_with_a_fitting_checksum_is_still_not_believed(offset: int, value: bytes, reason: Reason) -> None:
    """Sizes are checked before they are used and fields before they are returned, whoever wrote them."""
    image = packed(EXAMPLE)
    image[offset : offset + len(value)] = value
    assert refusal(sealed(image)) is reason


def test_nothing_of_the_previous_tenant_shows_through() -> None:
    """Bytes of the slot that the header does not use are zeros, not what another prompt left there."""
    image = packed(EXAMPLE)
    assert not any(image[512 + 4 * 64 :])
    assert not any(image[202:512])


@pytest.mark.parametrize(
    "change",
    [
        {"layout": ""},
        {"layout": "x" * 32},
        {"codec": "a\nb"},
        {"codec_params": bytes(257)},
        {"key": b"short"},
        {"tokens": np.zeros(897, np.uint32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_format_has_no_room_for_is_misuse(change: dict[str, Any]) -> None:
    """Writing a header that could not be read back is an assertion, before a byte is written."""
    out = bytearray(4096)
    with pytest.raises(AssertionError):
        pack_header(msgspec.structs.replace(EXAMPLE, **change), 4096, memoryview(out))
    assert not any(out)


@pytest.mark.parametrize("blocks", [0, 1, 9])
def test_a_batch_of_headers_has_the_bytes_of_one_at_a_time(blocks: int) -> None:
    """Headers written by the batch are those that pack_header writes; payloads and other slots stay as they are."""
    chain = KeyChain(Identity(model="m", kv_dtype="bf16", block_tokens=8), media=[MediaSpan(9, 20, b"cat")])
    chain.extend(range(8 * blocks + 3))
    parents = np.array([np.frombuffer(chain.key_bytes(i - 1), "<u8") for i in range(blocks)], np.uint64).reshape(-1, 2)
    slots = np.full((12, 2 * 4096), 7, np.uint8)
    rows = np.random.default_rng(3).permutation(12)[:blocks]
    sums = np.arange(100, 100 + blocks, dtype=np.uint64)
    columns = (chain.keys, parents, chain.token_blocks, chain.extras, sums)
    pack_headers(EXAMPLE, slots, rows, *columns, header_bytes=4096)
    for i, row in enumerate(rows.tolist()):
        alone = msgspec.structs.replace(
            EXAMPLE,
            key=chain.key_bytes(i),
            parent_key=chain.key_bytes(i - 1),
            tokens=chain.token_blocks[i],
            extras=chain.extras[i].tobytes(),
            payload_checksum=100 + i,
        )
        assert slots[row, :4096].tobytes() == packed(alone)
        assert unpack_header(slots[row]) == alone
    assert (slots[:, 4096:] == 7).all()
    assert (np.delete(slots, rows, axis=0) == 7).all()


def test_checksums_cover_bytes_whatever_they_are_seen_as() -> None:
    """The sum of a payload is that of its bytes, from any contiguous buffer, and changes with any of them."""
    payload = np.arange(100, dtype=np.uint8)
    assert checksum(payload) == checksum(payload.tobytes()) == checksum(memoryview(payload).cast("I"))
    assert checksum(payload.reshape(4, 25)) == checksum(payload)
    assert checksum(payload[:99]) != checksum(payload)
    assert checksum(b"") == xxhash.xxh3_64(b"").intdigest()


def test_fidelity_orders_from_best_to_worst() -> None:
    """The worst of a prefix is its maximum."""
    assert max(Fidelity.EXACT, Fidelity.BOUNDED, Fidelity.APPROXIMATE) is Fidelity.APPROXIMATE
    assert min(Fidelity) is Fidelity.EXACT
