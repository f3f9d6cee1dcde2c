"""Codecs behind codecs: a chain is typed by its ends; the first takes blocks, every other the bytes before it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from ..block.spec import BlockSpec, Layout
from ..errors import ConfigError, MissingDependencyError
from .base import RAW, BlockCodec, Bytes, Encoded

SEPARATOR = "|"
_LONGEST_NAME = 31


class ByteCodec(ABC):
    """Makes bytes fewer, whatever they mean, and gives them back as they were; safe across threads."""

    name: ClassVar[str] = ""

    @abstractmethod
    def open(self) -> None:
        """Load libraries; raises MissingDependencyError."""

    @abstractmethod
    def encode(self, data: Bytes) -> Bytes:
        """Fewer bytes, hopefully."""

    @abstractmethod
    def decode(self, data: Bytes, most: int) -> Bytes | None:
        """The bytes again; None where *data* is damaged or would be more than *most* bytes."""


class Zstd(ByteCodec):
    """``zstd``, which says in its frames how long the content is.

    Parameters
    ----------
    level:
        1 is fast, 22 is small.
    """

    name = "zstd"

    def __init__(self, *, level: int = 1) -> None:
        if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= 22:
            raise ConfigError(f"codec zstd: level={level!r} must be from 1 to 22")
        self._level = level
        self._local = threading.local()

    def open(self) -> None:
        try:
            import zstandard  # noqa: F401
        except ImportError:
            raise MissingDependencyError.of("zstandard", "compression", "the codec zstd") from None

    def encode(self, data: Bytes) -> Bytes:
        return np.frombuffer(self._coders()[0].compress(data.data), np.uint8)

    def decode(self, data: Bytes, most: int) -> Bytes | None:
        import zstandard

        try:
            size = zstandard.frame_content_size(data.data)
            if not 0 <= size <= most:  # before anything is allocated
                return None
            out = np.frombuffer(self._coders()[1].decompress(data.data, allow_extra_data=False), np.uint8)
        except zstandard.ZstdError:
            return None
        return out.copy() if len(out) == size else None

    def _coders(self) -> tuple[Any, Any]:
        """Of this thread: they are not safe across threads."""
        found = getattr(self._local, "coders", None)
        if found is None:
            import zstandard

            found = zstandard.ZstdCompressor(level=self._level), zstandard.ZstdDecompressor()
            self._local.coders = found
        return found


BYTE_CODECS: dict[str, type[ByteCodec]] = {Zstd.name: Zstd}


class Chain(BlockCodec):
    """A codec of blocks and, behind it, codecs of bytes; its parameters are those of the first.

    Its name is theirs, ``int8|zstd``.  Raises ConfigError where it would be too long for a header.
    """

    def __init__(self, first: BlockCodec, others: list[ByteCodec]) -> None:
        self.first = first
        self._others = others
        self.name = SEPARATOR.join([first.name, *(other.name for other in others)])
        self.lossy = first.lossy
        self.largest_ratio = 1.5 * first.largest_ratio
        if first.name == RAW:
            raise ConfigError(f"codec {self.name}: raw leaves blocks as they are; begin with a codec, such as bf16x")
        if len(self.name) > _LONGEST_NAME:
            raise ConfigError(f"codec {self.name}: the name of a chain has at most {_LONGEST_NAME} characters")

    def options(self) -> dict[str, Any]:
        return self.first.options()

    def again(self) -> BlockCodec:
        return Chain(self.first.again(), self._others)

    def open(self, spec: BlockSpec) -> None:
        self.first.open(spec)
        for other in self._others:
            other.open()
        self._most = spec.payload_bytes

    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        made = self.first.encode(payload, layout, position)
        if isinstance(made, str):
            return made
        data = made.data
        for other in self._others:
            data = other.encode(data)
        return Encoded(data, made.params, made.max_rel_error)

    def decode(self, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        found: Bytes | None = data
        for other in reversed(self._others):
            found = other.decode(found, self._most) if found is not None else None
        return "codec_data" if found is None else self.first.decode(found, params, layout, out)

    def close(self) -> None:
        self.first.close()
