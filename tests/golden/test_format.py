"""docs/format.md is the law: its vectors are checked against the library and against a reading of the page itself."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvcache_factory.block import (
    FORMAT_VERSION,
    BlockSpec,
    Fidelity,
    Header,
    Identity,
    KeyChain,
    KVDtype,
    Layout,
    MediaSpan,
    Reason,
    pack_header,
    unpack_header,
)

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
VECTORS: dict[str, Any] = json.loads(PAGE.split("```json\n")[1].split("```")[0])
PARTS = ("model", "kv_dtype", "block_tokens", "kv_scales", "lora", "salt", "namespace")
DEFAULTS = {"kv_scales": "", "lora": "", "salt": "", "namespace": "default"}
BINARY = ("identity_digest", "key", "parent_key", "extras", "codec_params")


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def prefixed(*parts: bytes) -> bytes:
    return b"".join(u32(len(part)) + part for part in parts)


def d(*parts: bytes) -> bytes:
    return hashlib.blake2b(prefixed(*parts), digest_size=16).digest()


def h(data: bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()


def identity_named(name: str) -> dict[str, Any]:
    return next(row for row in VECTORS["identities"] if row["name"] == name)


def keys_as_the_page_says(row: dict[str, Any]) -> tuple[list[bytes], list[bytes], bytes]:
    """Keys, extras and name of the last block, worked out the slow way from section 2."""
    identity = identity_named(row["identity"])
    size, digest, builder = identity["block_tokens"], bytes.fromhex(identity["digest"]), row["builder"]
    count = len(row["tokens"]) // size
    root = digest if builder == "ROLLING_HASH" else d(b"root", builder.encode(), digest)
    t = [u32(*row["tokens"][i * size : (i + 1) * size]) for i in range(count)]
    x = []
    for i in range(count):
        records = [
            struct.pack("<qQ", i * size - start, length) + bytes.fromhex(identifier)
            for start, length, identifier in sorted(row["media"])
            if start < (i + 1) * size and start + length > i * size
        ]
        x.append(d(b"extras", *records) if records else b"")
    keys: list[bytes] = []
    for i in range(count):
        if builder == "SIMPLE_HASH":
            b = max((j for j in range(i) if x[j]), default=-1)
            keys.append(h(h((keys[b] if b >= 0 else root) + b"".join(t[b + 1 : i + 1])) + x[i]))
        else:
            keys.append(h((keys[-1] if keys else root) + t[i] + x[i]))
    raw = digest + u32(count * size) + b"".join(t) + b"".join(u32(i) + x[i] for i in range(count) if x[i])
    return keys, [e or bytes(16) for e in x], raw if builder == "RAW" else keys[-1]


@pytest.mark.parametrize("row", VECTORS["identities"], ids=lambda row: str(row["name"]))
def test_identities_have_the_published_record_and_digest(row: dict[str, Any]) -> None:
    """The library and the page agree on the record of an identity, part by part."""
    parts = {**DEFAULTS, **{name: row[name] for name in PARTS if name in row}}
    record = prefixed(b"kvcache-factory identity 1", *(str(parts[name]).encode() for name in PARTS))
    identity = Identity(**parts)
    assert identity.record() == record == bytes.fromhex(row["record"])
    assert identity.digest == d(b"identity", record) == bytes.fromhex(row["digest"])


@pytest.mark.parametrize("row", VECTORS["keys"], ids=lambda row: f"{row['builder']}-{row['identity']}")
def test_keys_are_the_published_ones(row: dict[str, Any]) -> None:
    """Library, page and vectors agree on every key, extras digest and outside name."""
    identity = Identity(**{name: v for name, v in identity_named(row["identity"]).items() if name in PARTS})
    media = [MediaSpan(start, length, bytes.fromhex(identifier)) for start, length, identifier in row["media"]]
    chain = KeyChain(identity, builder=row["builder"], media=media)
    blocks = chain.extend(row["tokens"])
    keys, extras, name = keys_as_the_page_says(row)
    assert chain.root.hex() == row["root"]
    assert [chain.key_bytes(i).hex() for i in range(blocks)] == [k.hex() for k in keys] == row["keys"]
    assert [e.astype("<u8").tobytes().hex() for e in chain.extras] == [e.hex() for e in extras] == row["extras"]
    assert chain.name(blocks - 1).hex() == name.hex() == row["name"]


def header_of(row: dict[str, Any]) -> Header:
    fields = {k: v for k, v in row.items() if k not in ("header_bytes", "image")}
    fields |= {name: bytes.fromhex(row[name]) for name in BINARY}
    fields |= {"tokens": np.array(row["tokens"], np.uint32), "fidelity": Fidelity(row["fidelity"])}
    return Header(**fields)


@pytest.mark.parametrize("row", VECTORS["headers"], ids=lambda row: str(row["layout"]))
def test_headers_have_the_published_bytes(row: dict[str, Any]) -> None:
    """A header written today has the bytes of the page, and those bytes read back as the header."""
    image = bytes.fromhex(row["image"]).ljust(row["header_bytes"], b"\0")
    out = bytearray(row["header_bytes"])
    pack_header(header_of(row), len(out), memoryview(out))
    assert bytes(out) == image
    assert unpack_header(image) == header_of(row)
    assert xxhash.xxh3_64(image[:16] + bytes(8) + image[24:]).intdigest() == struct.unpack_from("<Q", image, 16)[0]


def table_under(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading of the page."""
    rows = PAGE.split(f"{heading}\n")[1].split("\n| ")[1:]
    return [[cell.strip() for cell in row.split("\n")[0].strip(" |").split(" | ")] for row in rows]


def test_every_field_lies_where_the_page_says() -> None:
    """Each field, found through the offset and size of the table, holds what was packed."""
    row = VECTORS["headers"][1]
    image = bytes.fromhex(row["image"]).ljust(row["header_bytes"], b"\0")
    table = PAGE.split("### Header, version 1")[1].split("### Layout tags")[0]
    cells = re.findall(r"^\| (\d+) \| (\d+) \| ([^,:|]+)", table, re.MULTILINE)
    at = {what.strip(): image[int(offset) : int(offset) + int(size)] for offset, size, what in cells}
    spans = sorted((int(offset), int(size)) for offset, size, what in cells)
    assert all(a + size == b for (a, size), (b, _) in pairwise(spans))
    assert sum(size for _, size in spans) == 512
    assert at["magic"] == b"KVCFSLOT"
    assert at["format version"] == struct.pack("<H", FORMAT_VERSION)
    assert at["bytes of the header"] == u32(row["header_bytes"])
    assert at["number of tokens"] == u32(len(row["tokens"]))
    assert at["fidelity"] == struct.pack("<H", row["fidelity"])
    assert at["generation"] == struct.pack("<H", row["generation"])
    assert at["digest of the identity"].hex() == row["identity_digest"]
    assert at["key"].hex() == row["key"]
    assert at["key of the parent"].hex() == row["parent_key"]
    assert at["extras"].hex() == row["extras"]
    assert at["payload length in bytes"] == struct.pack("<Q", row["payload_bytes"])
    assert at["checksum of the payload"] == struct.pack("<Q", row["payload_checksum"])
    assert at["layout tag"].rstrip(b"\0").decode() == row["layout"]
    assert at["codec"].rstrip(b"\0").decode() == row["codec"]
    assert at["codec parameters"].rstrip(b"\0").hex() == row["codec_params"]
    assert image[512 : 512 + 4 * len(row["tokens"])] == u32(*row["tokens"])


def test_the_page_names_every_constant_of_the_code() -> None:
    """Layouts, fidelity numbers, dtypes and refusal reasons of the code are on the page, and the numbers never move."""
    named = {cells[1]: cells[0] for cells in table_under("### Layout tags") if cells[1].isupper()}
    assert named == {f"`{layout}`": str(layout.code) for layout in Layout}
    for number, fidelity in enumerate((Fidelity.EXACT, Fidelity.BOUNDED, Fidelity.APPROXIMATE)):
        assert fidelity == number
        assert re.search(rf"^\| {number} \| {fidelity.name.lower()} \|", PAGE, re.MULTILINE)
    assert all(f"`{dtype.value}`" in PAGE for dtype in KVDtype)
    assert all(re.search(rf"^\| `{reason}` \|", PAGE, re.MULTILINE) for reason in Reason)


def test_the_geometry_of_a_slot_leaves_room_for_its_header() -> None:
    """BlockSpec and the page agree on the size of a header."""
    for tokens in (1, 16, 64, 896, 897, 4096):
        spec = BlockSpec(KVDtype.BF16, num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=tokens)
        assert spec.header_bytes == -(-(512 + 4 * tokens) // 4096) * 4096
        assert spec.slot_bytes % 4096 == 0
