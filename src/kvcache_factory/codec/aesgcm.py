"""AES-256-GCM over whole slot images: tokens and payload are encrypted, the rest of the header is authenticated.

``docs/format.md`` has every byte.  What others need to find, order and free blocks stays readable; what tells the text
of a prompt or what a model made of it does not.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from ..block.digest import digest128
from ..block.envelope import Header, HeaderError, checksum, seal_header, unpack_header
from ..block.spec import HEADER_FIXED, BlockSpec
from ..errors import MissingDependencyError
from .base import AES_GCM, NOT_AUTHENTIC, WRONG_KEY, Bytes, ImageCodec

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext

KEY_ID_BYTES = 8
NONCE_BYTES = 12

# Offsets in the header, which docs/format.md fixes.
_HEADER_SUM = slice(16, 24)
_PAYLOAD_SUM = slice(104, 112)
_CODEC = slice(160, 192)
_PARAMS_LENGTH = slice(192, 194)
_PARAMS = slice(200, 456)
# Key id, nonce, tag, encrypted checksum of the payload, and the codec beneath; its parameters follow.
_OWN_PARAMS = struct.Struct("<8s 12s 16s 8s 32s")
_UNAUTHENTICATED = (_HEADER_SUM, _PAYLOAD_SUM, slice(_PARAMS.start + 20, _PARAMS.start + 44))


class Params(msgspec.Struct, frozen=True):
    """The parameters of an encrypted image; *inner* is the codec beneath with its own."""

    key_id: bytes
    nonce: bytes
    tag: bytes
    payload_sum: bytes
    inner_codec: bytes
    inner_params: bytes

    def pack(self) -> bytes:
        """As they stand in the header."""
        fields = (self.key_id, self.nonce, self.tag, self.payload_sum, self.inner_codec)
        return _OWN_PARAMS.pack(*fields) + self.inner_params

    @classmethod
    def unpack(cls, params: bytes) -> Params | None:
        """From the parameters of a header; None where there are too few."""
        if len(params) < _OWN_PARAMS.size:
            return None
        key_id, nonce, tag, payload_sum, inner_codec = _OWN_PARAMS.unpack_from(params)
        return cls(key_id, nonce, tag, payload_sum, inner_codec, params[_OWN_PARAMS.size :])


class AesGcm(ImageCodec):
    """The codec ``aes-256-gcm``.

    Parameters
    ----------
    load_key:
        Gives the 32 bytes of the key when the codec is opened; see :func:`~kvcache_factory.codec.keys.load_key`.
    random:
        Gives that many unpredictable bytes: a nonce for each image.  Under one key, at most 2**32 images may be made.
    """

    name: ClassVar[str] = AES_GCM

    def __init__(self, load_key: Callable[[], bytes], *, random: Callable[[int], bytes] = os.urandom) -> None:
        self._load_key = load_key
        self._random = random
        self._engine: _Engine | None = None

    def open(self) -> None:
        """See the contract."""
        self._engine = _Engine(self._load_key())

    def close(self) -> None:
        self._engine = None

    @property
    def key_id(self) -> bytes:
        """What images say about the key: enough to tell keys apart, and nothing to compute one from."""
        return self._open.key_id

    @property
    def _open(self) -> _Engine:
        assert self._engine is not None, "the codec is not open"
        return self._engine

    def encode(self, spec: BlockSpec, image: Bytes, out: Bytes) -> None:
        engine = self._open
        header = unpack_header(image[: spec.header_bytes].data)
        assert header.payload_bytes <= spec.payload_bytes
        body = _body(spec, header.payload_bytes)
        inner = _inner_codec(header)
        params = Params(engine.key_id, self._random(NONCE_BYTES), bytes(16), bytes(8), inner, header.codec_params)
        out[:HEADER_FIXED] = image[:HEADER_FIXED]
        out[body.stop :] = 0
        _say(out, AES_GCM.encode(), params.pack())
        cipher = engine.encryptor(params.nonce)
        cipher.authenticate_additional_data(_authenticated(out))
        payload_sum = cipher.update(image[_PAYLOAD_SUM].tobytes())
        cipher.update_into(image[body].data, out[body].data)
        cipher.finalize()
        done = msgspec.structs.replace(params, tag=cipher.tag, payload_sum=payload_sum)
        _say(out, AES_GCM.encode(), done.pack())
        _set_payload_sum(out, struct.pack("<Q", checksum(out[spec.header_bytes : body.stop].data)))
        seal_header(out[: spec.header_bytes].data)

    def decode(self, spec: BlockSpec, image: Bytes) -> str | None:
        try:
            header = unpack_header(image[: spec.header_bytes].data)
        except HeaderError:
            return None
        if header.codec != AES_GCM:
            return None
        params = Params.unpack(header.codec_params)
        if params is None or header.payload_bytes > spec.payload_bytes:
            return "codec"
        if params.key_id != self._open.key_id:
            return WRONG_KEY
        return self._decrypt(spec, _body(spec, header.payload_bytes), image, params)

    def _decrypt(self, spec: BlockSpec, body: slice, image: Bytes, params: Params) -> str | None:
        engine = self._open
        cipher = engine.decryptor(params.nonce)
        cipher.authenticate_additional_data(_authenticated(image))
        payload_sum = cipher.update(params.payload_sum)
        cipher.update_into(image[body].data, image[body].data)
        try:
            cipher.finalize_with_tag(params.tag)
        except engine.invalid_tag:
            image[: spec.header_bytes + spec.payload_bytes] = 0
            return NOT_AUTHENTIC
        _set_payload_sum(image, payload_sum)
        _say(image, params.inner_codec, params.inner_params)
        seal_header(image[: spec.header_bytes].data)
        return None


class _Engine:
    """The key, where no representation or traceback of ours shows it, and what the library needs to use it."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:
            raise MissingDependencyError.of("cryptography", "encryption", "encryption of the disk tier") from None
        self.key_id = digest128(b"encryption key", key)[:KEY_ID_BYTES]
        self.invalid_tag = InvalidTag
        aes = algorithms.AES256(key)

        def cipher(nonce: bytes) -> Cipher[modes.GCM]:
            return Cipher(aes, modes.GCM(nonce))

        self._cipher = cipher

    def encryptor(self, nonce: bytes) -> AEADEncryptionContext:
        """A cipher for one image."""
        return self._cipher(nonce).encryptor()

    def decryptor(self, nonce: bytes) -> AEADDecryptionContext:
        """What undoes it."""
        return self._cipher(nonce).decryptor()


def _body(spec: BlockSpec, payload_bytes: int) -> slice:
    """What is encrypted in its place: from the tokens to the end of the payload as it is stored."""
    return slice(HEADER_FIXED, spec.header_bytes + payload_bytes)


def _inner_codec(header: Header) -> bytes:
    room = _PARAMS.stop - _PARAMS.start - _OWN_PARAMS.size
    assert len(header.codec_params) <= room, f"a codec beneath this one has at most {room} bytes of parameters"
    return header.codec.encode("ascii")


def _authenticated(image: Bytes) -> bytes:
    """The fixed part of the header, with zeros where it says what comes out of the encryption."""
    fixed = image[:HEADER_FIXED].copy()
    for part in _UNAUTHENTICATED:
        fixed[part] = 0
    return fixed.tobytes()


def _say(image: Bytes, codec: bytes, params: bytes) -> None:
    """Name the codec in a header, and its parameters."""
    for part, value in (
        (_CODEC, codec),
        (_PARAMS_LENGTH, struct.pack("<H", len(params))),
        (_PARAMS, params),
    ):
        image[part] = np.frombuffer(value.ljust(part.stop - part.start, b"\0"), np.uint8)


def _set_payload_sum(image: Bytes, value: bytes) -> None:
    image[_PAYLOAD_SUM] = np.frombuffer(value, np.uint8)
