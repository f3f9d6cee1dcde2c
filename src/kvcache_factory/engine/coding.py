"""Whole slot images through a payload codec: smaller on their way out of memory, and as they were when they come back.

Reusable wherever images are sealed: what comes out of :meth:`ImageCoder.encode` is an image like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.envelope import Fidelity, Header, HeaderError, checksum, pack_header, unpack_header
from ..block.spec import PAGE, BlockSpec, Layout, round_up
from ..codec.base import CIPHERS, RAW, Encoded, PayloadCoder
from ..memory.order import reorder

Bytes = npt.NDArray[np.uint8]

CODED_ALREADY = "coded_already"
PRIVATE_LAYOUT = "private_layout"


class ImageCoder:
    """Encodes and decodes the payloads of images of one geometry; safe across threads.

    *note* is called with each payload that was encoded.
    """

    def __init__(
        self, coder: PayloadCoder, spec: BlockSpec, note: Callable[[Encoded], object] = lambda _: None
    ) -> None:
        self.coder = coder
        self.spec = spec
        self._note = note

    def encode(self, image: Bytes, depth: int, out: Bytes) -> str:
        """Write the encoded *image*, a sealed one of block number *depth*, to *out*, both ``uint8 [slot_bytes]``.

        Returns an empty string, or the word for why *out* holds the payload as it is.  A lossy codec never encodes
        what one has encoded before.
        """
        spec = self.spec
        header = unpack_header(image[: spec.header_bytes].data)
        reason = self._encode(header, image, depth, out)
        if reason:
            out[:] = image
        return reason

    def _encode(self, header: Header, image: Bytes, depth: int, out: Bytes) -> str:
        spec, coder = self.spec, self.coder
        if header.codec != RAW or (coder.lossy and header.generation):
            return CODED_ALREADY
        payload = image[spec.header_bytes : spec.header_bytes + spec.payload_bytes]
        if checksum(payload.data) != header.payload_checksum:
            return "payload_checksum"  # no new checksum makes it good: left as it is, whoever reads it finds out
        made = encode_payload(spec, coder, image[spec.header_bytes :], header.layout, depth)
        if isinstance(made, str):
            return made
        size = len(made.data)
        if spec.header_bytes + round_up(size, PAGE) >= spec.slot_bytes:
            return "does_not_pay"
        body = out[spec.header_bytes : spec.header_bytes + round_up(size, PAGE)]
        body[:size] = made.data
        body[size:] = 0
        changed = msgspec.structs.replace(
            header,
            codec=coder.name,
            codec_params=made.params,
            payload_bytes=size,
            payload_checksum=checksum(body[:size].data),
            fidelity=max(header.fidelity, Fidelity.BOUNDED) if coder.lossy else header.fidelity,
            generation=header.generation + coder.lossy,
        )
        pack_header(changed, spec.header_bytes, out.data)
        self._note(made)
        return ""

    def decode(self, image: Bytes) -> str | None:
        """Undo :meth:`encode` in place; an image that needs no undoing, or is none, is left as it is.

        Returns the word for why it cannot be undone.
        """
        spec = self.spec
        try:
            header = unpack_header(image[: spec.header_bytes].data)
        except HeaderError:
            return None
        if header.codec == RAW or header.codec in CIPHERS:
            return None
        if header.payload_bytes > spec.payload_bytes:
            return "codec"
        data = image[spec.header_bytes : spec.header_bytes + header.payload_bytes].copy()
        if checksum(data.data) != header.payload_checksum:
            return "payload_checksum"
        payload = image[spec.header_bytes : spec.header_bytes + spec.payload_bytes]
        reason = decode_payload(spec, self.coder, header.codec, data, header.codec_params, header.layout, payload)
        if reason is not None:
            return reason
        changed = msgspec.structs.replace(
            header,
            codec=RAW,
            codec_params=b"",
            payload_bytes=spec.payload_bytes,
            payload_checksum=checksum(payload.data),
        )
        pack_header(changed, spec.header_bytes, image.data)
        return None


def encode_payload(spec: BlockSpec, coder: PayloadCoder, payload: Bytes, layout: str, depth: int) -> Encoded | str:
    """Encode a payload in the order that is called *layout*; packings are put into a plain order first."""
    tag = Layout.named(layout)
    if tag is None or not tag.fits(spec):
        return PRIVATE_LAYOUT
    payload = payload[: spec.payload_bytes]
    if tag.packed_tokens:
        plain = np.empty(spec.payload_bytes, np.uint8)
        reorder(payload, tag, plain, Layout.LCHND, spec)
        payload, tag = plain, Layout.LCHND
    return coder.encode(payload, tag, depth * spec.block_tokens)


def decode_payload(
    spec: BlockSpec, coder: PayloadCoder, codec: str, data: Bytes, params: bytes, layout: str, out: Bytes
) -> str | None:
    """Decode *data* into *out* ``uint8 [payload_bytes]`` in the order *layout*; a word where that fails."""
    tag = Layout.named(layout)
    if tag is None or not tag.fits(spec):
        return "layout"
    if not tag.packed_tokens:
        return coder.decode(codec, data, params, tag, out)
    plain = np.empty(spec.payload_bytes, np.uint8)
    reason = coder.decode(codec, data, params, Layout.LCHND, plain)
    if reason is None:
        reorder(plain, Layout.LCHND, out, tag, spec)
    return reason
