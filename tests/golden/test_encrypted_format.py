"""docs/format.md on encrypted images, against the library and against a reading of the page with another interface."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvcache_factory.block.envelope import Fidelity, Header, pack_header, unpack_header
from kvcache_factory.block.spec import BlockSpec, KVDtype
from kvcache_factory.codec import base
from kvcache_factory.codec.aesgcm import AesGcm

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
VECTORS: list[dict[str, Any]] = json.loads(PAGE.split("```json\n")[1].split("```")[0])["encrypted"]
SPEC = BlockSpec(KVDtype.F16, num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=4)


def digest(image: bytes) -> str:
    return hashlib.blake2b(image, digest_size=16).hexdigest()


def plain_image(row: dict[str, Any]) -> bytes:
    payload = bytes.fromhex(row["payload"])
    fields = {name: bytes.fromhex(row[name]) for name in ("identity_digest", "key", "parent_key", "extras")}
    header = Header(
        **fields,
        tokens=np.array(row["tokens"], np.uint32),
        layout=row["layout"],
        fidelity=Fidelity(row["fidelity"]),
        generation=row["generation"],
        payload_bytes=len(payload),
        payload_checksum=xxhash.xxh3_64_intdigest(payload),
    )
    image = bytearray(SPEC.slot_bytes)
    pack_header(header, row["header_bytes"], memoryview(image))
    image[row["header_bytes"] : row["header_bytes"] + len(payload)] = payload
    return bytes(image)


def stored_by_the_library(row: dict[str, Any]) -> bytes:
    codec = AesGcm(lambda: bytes.fromhex(row["encryption_key"]), random=lambda count: bytes.fromhex(row["nonce"]))
    codec.open()
    out = np.zeros(SPEC.slot_bytes, np.uint8)
    codec.encode(SPEC, np.frombuffer(plain_image(row), np.uint8), out)
    return out.tobytes()


def stored_as_the_page_says(row: dict[str, Any]) -> bytes:
    """Section 3 word by word, with the one-call interface for a whole message."""
    plain, key, nonce = plain_image(row), bytes.fromhex(row["encryption_key"]), bytes.fromhex(row["nonce"])
    end = row["header_bytes"] + len(row["payload"]) // 2
    parts = (b"encryption key", key)
    joined = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    key_id = hashlib.blake2b(joined, digest_size=16).digest()[:8]
    image = bytearray(plain[:end].ljust(SPEC.slot_bytes, b"\0"))
    image[16:24] = image[104:112] = bytes(8)
    image[160:192] = b"aes-256-gcm".ljust(32, b"\0")
    image[192:194] = struct.pack("<H", 76)
    image[200:456] = (key_id + nonce + bytes(16) + bytes(8) + plain[160:192]).ljust(256, b"\0")
    sealed = AESGCM(key).encrypt(nonce, plain[104:112] + plain[512:end], bytes(image[:512]))
    image[220:236], image[236:244], image[512:end] = sealed[-16:], sealed[:8], sealed[8:-16]
    image[104:112] = struct.pack("<Q", xxhash.xxh3_64_intdigest(image[row["header_bytes"] : end]))
    image[16:24] = struct.pack("<Q", xxhash.xxh3_64_intdigest(image[: row["header_bytes"]]))
    return bytes(image)


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: str(row["nonce"]))
def test_encrypted_images_have_the_published_bytes(row: dict[str, Any]) -> None:
    """Library, page and vector agree on every byte of an encrypted image."""
    image = stored_by_the_library(row)
    assert image == stored_as_the_page_says(row)
    header, start = unpack_header(image), row["header_bytes"]
    assert digest(plain_image(row)) == row["plain_image"]
    assert header.codec_params.hex() == row["codec_params"]
    assert header.payload_checksum == row["stored_payload_checksum"]
    assert image[512:528].hex() == row["stored_tokens"]
    assert image[start : start + len(row["payload"]) // 2].hex() == row["stored_payload"]
    assert digest(image) == row["stored_image"]


def test_the_page_names_codec_and_reasons() -> None:
    """Words that others will have stored or counted."""
    names = (base.RAW, base.AES_GCM, base.NO_KEY, base.WRONG_KEY, base.NOT_AUTHENTIC)
    assert all(re.search(rf"^\| `{name}` \|", PAGE, re.MULTILINE) for name in names)
