"""Whole slot images: sealing headers into slots on their way out of memory, and proving images that came back."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.envelope import Fidelity, Header, HeaderError, checksum, pack_headers, unpack_header
from ..block.plan import ChainView
from ..block.spec import BlockSpec, Layout
from ..codec.base import CIPHERS, NO_KEY, RAW
from .table import Rows
from .values import StoredChain

Bytes = npt.NDArray[np.uint8]
Blocks = npt.NDArray[np.int64]


class Image(msgspec.Struct, frozen=True):
    """What a proven image says about itself beyond its record."""

    layout: int
    fidelity: int
    payload_checksum: int
    generation: int = 0


def seal(
    spec: BlockSpec,
    slots: Bytes,
    rows: Rows,
    chain: StoredChain,
    part: slice | Blocks,
    known: npt.NDArray[np.uint64] | None = None,
) -> None:
    """Write headers for the blocks *part* (a slice, or numbers) of *chain*.

    Their payloads are in *rows* of *slots* ``[n, slot_bytes]``.  *known*: their checksums as they were filled, 0 where
    there is none: what memory has damaged since is found by whoever reads the image, not made good by a new checksum.
    """
    payloads = slots[:, spec.header_bytes : spec.header_bytes + spec.payload_bytes]
    noted = known.tolist() if known is not None else [0] * len(rows)
    sums = np.array(
        [old or checksum(payloads[row].data) for row, old in zip(rows.tolist(), noted, strict=True)], np.uint64
    )
    kinds = (chain.layout[part].astype(np.int64) * 256 + chain.fidelity[part]) * 256 + chain.codings[part]
    for kind in np.unique(kinds).tolist():
        same = np.flatnonzero(kinds == kind)
        template = Header(
            identity_digest=chain.identity_digest,
            key=bytes(16),
            parent_key=bytes(16),
            tokens=chain.token_blocks[0],
            payload_bytes=spec.payload_bytes,
            payload_checksum=0,
            layout=Layout.of_code(kind >> 16).value,
            fidelity=Fidelity(kind >> 8 & 255),
            generation=kind & 255,
        )
        pack_headers(
            template,
            slots,
            rows[same].astype(np.int64),
            keys=chain.keys[part][same],
            parents=chain.parents[part][same],
            tokens=chain.token_blocks[part][same],
            extras=chain.extras[part][same],
            payload_checksums=sums[same],
            header_bytes=spec.header_bytes,
        )


def prove(spec: BlockSpec, image: Bytes, expected: ChainView, number: int) -> Image | str:
    """Compare an image with block *number* of what was expected; a word for the reason when it is something else."""
    try:
        header = unpack_header(image[: spec.header_bytes].data)
    except HeaderError as error:
        return f"header_{error.reason}"
    if header.identity_digest != expected.identity_digest:
        return "identity"
    parent = expected.keys[number - 1].tobytes() if number else expected.root_key
    if (header.key, header.parent_key) != (expected.keys[number].tobytes(), parent):
        return "key"
    if header.codec != RAW:  # its record may be encrypted too
        return NO_KEY if header.codec in CIPHERS else "codec"
    if header.extras != expected.extras[number].tobytes():
        return "record_differs"
    if not np.array_equal(header.tokens, expected.token_blocks[number]):
        return "record_differs"
    if header.payload_bytes != spec.payload_bytes:
        return "codec"
    layout = Layout.named(header.layout)
    if layout is None or not layout.fits(spec):
        return "layout"
    payload = image[spec.header_bytes : spec.header_bytes + spec.payload_bytes]
    if checksum(payload.data) != header.payload_checksum:
        return "payload_checksum"
    return Image(layout.code, int(header.fidelity), header.payload_checksum, header.generation)
