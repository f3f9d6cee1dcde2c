"""One codec to encode with, and whatever is needed to decode."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..block.spec import BlockSpec, Layout
from ..errors import ConfigError, FormatError, MissingDependencyError
from ..jit import want_late, warm_up_in_background
from . import calibration
from .base import DOES_NOT_PAY, NO_CODEC, NO_TABLE, RAW, BlockCodec, Bytes, Encoded, PayloadCoder
from .chain import SEPARATOR, Chain
from .int4g import Int4g
from .lossy import own_params
from .names import behind, make_codec
from .spectral import SpectralCodec

_log = logging.getLogger("kvcache_factory")


class Coder(PayloadCoder):
    """See the contract.

    Parameters
    ----------
    codec:
        What encodes; None to leave payloads as they are.
    places:
        Directories with calibration tables.  A table that is used to encode is copied to the first of them, so that
        whoever reads the blocks finds it beside them.
    """

    def __init__(self, codec: BlockCodec | None = None, places: Sequence[Path] = ()) -> None:
        self.codec = codec if codec is not None and codec.name != RAW else None
        self.encodes = self.codec is not None
        self.lossy = self.codec is not None and self.codec.lossy
        self.largest_ratio = self.codec.largest_ratio if self.codec is not None else 1.0
        self._places = tuple(places)
        self._spec: BlockSpec | None = None
        self._readers: dict[Any, BlockCodec | str] = {}
        self._lock = threading.Lock()

    def open(self, spec: BlockSpec) -> None:
        self._spec = spec
        if self.codec is not None:
            want_late()
            self.codec.open(spec)
            if self._calibrated is not None and self._places:
                _leave_table(Path(self._calibrated.table or ""), self._places[0])

    @property
    def _calibrated(self) -> SpectralCodec | None:
        """What needs a calibration to encode."""
        first = self.codec.first if isinstance(self.codec, Chain) else self.codec
        return first if isinstance(first, SpectralCodec) else None

    def check_model(self, fingerprint: str) -> None:
        codec = self._calibrated
        if codec is not None:
            codec.calibration.check_model(fingerprint, codec.table or "")

    @property
    def name(self) -> str:
        return self.codec.name if self.codec is not None else RAW

    def encode(self, payload: Bytes, layout: Layout, position: int) -> Encoded | str:
        return DOES_NOT_PAY if self.codec is None else self.codec.encode(payload, layout, position)

    def decode(self, codec: str, data: Bytes, params: bytes, layout: Layout, out: Bytes) -> str | None:
        own = own_params(params) if codec != RAW else b""
        head = codec.partition(SEPARATOR)[0]
        kind: Any = (codec, own[:16]) if head in ("pca", "low_rank") else (codec, own) if head == "int4g" else codec
        with self._lock:
            reader = self._readers.get(kind)
            if reader is None:
                reader = self._readers[kind] = self._find(codec, own)
        return reader if isinstance(reader, str) else reader.decode(data, params, layout, out)

    def _find(self, codec: str, own: bytes) -> BlockCodec | str:
        """What reads blocks of *codec*; where nothing does, the word for that, said once in the log."""
        assert self._spec is not None, "the coder is not open"
        reason, head = NO_CODEC, codec.partition(SEPARATOR)[0]
        try:
            if head == "int4g":
                reader: BlockCodec = Int4g.that_reads(own)
            elif head in ("pca", "low_rank"):
                reason = NO_TABLE
                table = calibration.find(own[:16], self._places)
                if table is None:
                    raise ConfigError(f"there is no calibration {own[:16].hex()} in {self._shown}")
                reader = make_codec(head, table=table)
            else:
                reader = make_codec(head)
            reader = behind(reader, codec)
            reader.open(self._spec)
            want_late()
            warm_up_in_background()
            return reader
        except (ConfigError, FormatError, MissingDependencyError) as error:
            _log.warning("blocks of codec %r are misses in this process: %s", codec, error)
            return reason

    @property
    def _shown(self) -> str:
        return ", ".join(str(place) for place in self._places) or "no directory"

    def close(self) -> None:
        with self._lock:
            readers, self._readers = list(self._readers.values()), {}
        for reader in (*readers, self.codec):
            if isinstance(reader, BlockCodec):
                reader.close()


def _leave_table(table: Path, place: Path) -> None:
    """Copy *table* to where readers will look."""
    target = place / table.name
    if target == table or target.exists():
        return
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        calibration.store(table.read_bytes(), target)
    except OSError as error:
        raise ConfigError(f"the calibration {table} cannot be copied to {place}: {error.strerror}") from error
