"""The contract of the last codec of a tier: what is done to whole slot images before they are written outside.

A codec turns one image into another of the same size, in memory that the caller supplies.  The result is an image like
any other: its header can be read, its checksums are right, and it says which codec undoes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec

Bytes = npt.NDArray[np.uint8]

RAW = "raw"
"""The codec of an image that needs no undoing."""
AES_GCM = "aes-256-gcm"
CIPHERS = frozenset({AES_GCM})
"""Codecs that nobody can undo without a key."""

NO_KEY = "no_key"
WRONG_KEY = "wrong_key"
NOT_AUTHENTIC = "not_authentic"
UNREADABLE_HERE = frozenset({NO_KEY, WRONG_KEY})
"""Reasons that say nothing against the image: somebody else can read it."""


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
