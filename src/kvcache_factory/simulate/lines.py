"""Lines of trace files: plain or gzip, one at a time, and what is done about the broken ones."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import TraceError

_log = logging.getLogger("kvcache_factory")
_GZIP = b"\x1f\x8b"
SHOWN = 3
"""Broken lines that are named one by one; the others are only counted."""


class Faults:
    """Broken lines of one trace: counted and passed over, or, when *strict*, the end of reading."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.count = 0
        self.shown: list[str] = []

    def note(self, path: Path, line: int, why: str) -> None:
        """Line number *line* of *path* cannot be used; raises TraceError when strict."""
        message = f"{path}:{line}: {' '.join(why.split())}"
        if self.strict:
            raise TraceError(f"{message}; leave out --strict to skip such lines")
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(message)
            _log.warning("broken line skipped: %s", message)


class Lines:
    """The lines of a file that are not blank, with their numbers from 1; compressed files are told by their content.

    Raises TraceError for a file that cannot be opened; one that ends too early is a fault of its last line.
    """

    def __init__(self, path: Path, faults: Faults) -> None:
        self.path = path
        self._faults = faults
        try:
            self._raw = path.open("rb")
            self.size = path.stat().st_size
            packed = self._raw.read(2) == _GZIP
            self._raw.seek(0)
        except OSError as error:
            raise TraceError(f"the trace {path} cannot be read: {error.strerror or error}") from error
        self._file = cast(BinaryIO, gzip.GzipFile(fileobj=self._raw)) if packed else self._raw

    @property
    def position(self) -> int:
        """Bytes of the file that were read."""
        return self._raw.tell()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        try:
            for number, line in enumerate(self._file, 1):
                if line.strip():
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            self._faults.note(self.path, number + 1, f"the file ends here: {error}")

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
        self._raw.close()
