"""The contracts of codecs: of those that make payloads smaller, and of the last one, which seals whole slot images.

A :class:`BlockCodec` turns one payload into fewer bytes and says how far what it gives back may be from what it got.

An :class:`ImageCodec` turns one image into another of the same size, in memory that the caller supplies.  The result is
an image like any other: its header can be read, its checksums are right, and it says which codec undoes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec, Layout

Bytes = npt.NDArray[np.uint8]

RAW = "raw"
"""The codec of an image that needs no undoing."""
AES_GCM = "aes-256-gcm"
CIPHERS = frozenset({AES_GCM})
"""Codecs that nobody can undo without a key."""

NO_KEY = "no_key"
WRONG_KEY = "wrong_key"
NOT_AUTHENTIC = "not_authentic"
NOT_FINITE = "not_finite"
BOUND_EXCEEDED = "bound_exceeded"
DOES_NOT_PAY = "does_not_pay"
NO_CODEC = "no_codec"
NO_TABLE = "no_calibration"
"""Reasons why a payload stays as it is (NaN or infinity, an error above what the codec declares, nothing gained), or
cannot be read here (a codec or a calibration that this process does not have)."""

UNREADABLE_HERE = frozenset({NO_KEY, WRONG_KEY, NO_CODEC, NO_TABLE})
"""Reasons that say nothing against the image: somebody else can read it."""


class Encoded(msgspec.Struct, frozen=True):
    """An encoded payload: *data* ``uint8 [n]``, and the *params* (at most 180 bytes) that its codec needs to decode."""

    data: Bytes
    params: bytes = b""
    max_rel_error: float = 0.0
    """Measured: the largest error of an element, in units of the largest magnitude in its plane (layer, K or V)."""


class BlockCodec(ABC):
    """Encodes and decodes payloads of one geometry; safe across threads once it is open.

    Constructing one is a description; :meth:`open` loads libraries and tables.
    """

    name: str = ""
    lossy: bool = True
    largest_ratio: float = 2.0
    """How many times smaller it makes payloads at most, as a guess."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What it was constructed with, as plain data."""

    def again(self) -> BlockCodec:
        """Another one that does the same, unopened."""
        made: Any = type(self)
        codec: BlockCodec = made(**self.options())
        return codec

    @abstractmethod
    def open(self, spec: BlockSpec) -> None:
        """Get ready for blocks of *spec*.

        Raises ConfigError for blocks that it cannot encode and for a calibration table that is missing or foreign,
        MissingDependencyError for a package.
        """

    @abstractmethod
    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        """Encode *payload* ``uint8 [payload_bytes]`` in order ``LCND`` or ``LCHND``; *position* is of its first token.

        Returns one word for the reason where the payload has to stay as it is.
        """

    @abstractmethod
    def decode(self, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        """Undo :meth:`encode` into *out* ``uint8 [payload_bytes]``, in any plain order.

        *data* has exactly the bytes that encode gave.  Returns one word where that cannot be done: damaged bytes,
        another version of the parameters, a table that is not here.
        """

    def close(self) -> None:  # noqa: B027  most have nothing to forget
        """Forget tables; idempotent, and :meth:`open` may follow."""


class PayloadCoder(ABC):
    """Encodes payloads by one codec, or none, and decodes those of every codec that this process has."""

    encodes: bool
    """Whether there is a codec to encode with."""
    lossy: bool
    """Whether that codec is a lossy one."""
    largest_ratio: float
    """How many times smaller encoded payloads may be at most, as a guess."""

    @abstractmethod
    def open(self, spec: BlockSpec) -> None:
        """Get ready for blocks of *spec*; raises what :meth:`BlockCodec.open` raises."""

    @abstractmethod
    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        """See :meth:`BlockCodec.encode`."""

    def check_model(self, fingerprint: str) -> None:  # noqa: B027  most codecs are for any model
        """Raises ConfigError where the codec is for another model than that of *fingerprint*."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The codec that encodes, as headers say it."""

    @abstractmethod
    def decode(self, codec: str, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        """Undo what the codec of this name has done; see :meth:`BlockCodec.decode`."""

    @abstractmethod
    def close(self) -> None:
        """Forget tables; idempotent."""


class ImageCodec(ABC):
    """Encodes and decodes whole slot images; safe across threads once it is open.

    Constructing one is a description; :meth:`open` reads keys and loads libraries.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def open(self) -> None:
        """Get ready; raises ConfigError or MissingDependencyError with what to do."""

    @abstractmethod
    def encode(self, spec: BlockSpec, image: Bytes, out: Bytes) -> None:
        """Write the encoded *image* to *out*, both ``uint8 [slot_bytes]`` and apart; *image* stays as it is."""

    @abstractmethod
    def decode(self, spec: BlockSpec, image: Bytes) -> str | None:
        """Undo :meth:`encode` in place, where *image* ``uint8 [slot_bytes]`` is one that this codec made.

        Returns None when that was done, and also for an image of another codec or with a damaged header, which is left
        as it is and for the caller to judge.  Otherwise the one word for why it cannot be done; no byte of what could
        not be authenticated remains.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget keys; idempotent, and :meth:`open` may follow."""
