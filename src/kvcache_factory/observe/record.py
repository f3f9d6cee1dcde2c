"""Records which blocks requests ask for, so that the simulator can replay them: no tokens, no keys.

A block is named by a hash of its key under a random salt that is never written down and is another in every run.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import ConfigError

MAGIC = "kvcache_factory_trace"
VERSION = 1
MAX_OPEN = 4096
"""Requests that may wait for their end; the oldest is written without it."""
MAX_BYTES = 4 << 30
"""Size of a file at which recording ends."""


class Recorder:
    """Appends one line for each request to a file that only its owner can read.

    Parameters
    ----------
    path:
        The file; opened with the first request.
    block_tokens:
        Tokens of a block.

    Raises ConfigError where the file could not be written: a request would only say so in a log.
    """

    def __init__(self, path: str, block_tokens: int) -> None:
        place = os.path.dirname(os.path.abspath(path))
        if not os.access(path if os.path.exists(path) else place, os.W_OK) or os.path.isdir(path):
            raise ConfigError(
                f"record={path!r}: no file can be written there; give the path of one in a directory of yours"
            )
        self.path = path
        self._block_tokens = block_tokens
        self._salt = secrets.token_bytes(16)
        self._begun = time.monotonic()
        self._open: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._threads: OrderedDict[str, int] = OrderedDict()
        self._count = 0
        self._written = 0
        self._file: Any = None
        self._lock = threading.Lock()

    def asked(
        self, request_id: str, keys: npt.NDArray[np.uint64], tokens: int, session: str | None, reuse: str
    ) -> None:
        """A request with the blocks of *keys* ``[n, 2]`` has begun."""
        row = {
            "t": round(time.monotonic() - self._begun, 6),
            "in": tokens,
            "out": 0,
            "reuse": reuse,
            "thread": -1,
            "ids": self._names(keys),
        }
        with self._lock:
            if session is not None:
                row["thread"] = self._thread(session)
            before = self._open.pop(request_id, None)
            self._open[request_id] = row
            if before is None and len(self._open) > MAX_OPEN:
                before = self._open.popitem(last=False)[1]
            self._write(before)

    def ended(self, request_id: str, output_tokens: int) -> None:
        """A request has ended after generating *output_tokens*."""
        with self._lock:
            row = self._open.pop(request_id, None)
            if row is not None:
                row["out"] = output_tokens
                self._write(row)

    def close(self) -> None:
        """Write the requests that have not ended, and close the file; idempotent."""
        with self._lock:
            for row in self._open.values():
                self._write(row)
            self._open.clear()
            if self._file is not None:
                self._file.close()
            self._file, self._written = None, MAX_BYTES

    def _names(self, keys: npt.NDArray[np.uint64]) -> list[int]:
        salt = self._salt
        return [xxhash.xxh3_64_intdigest(salt + key.tobytes()) for key in keys]

    def _thread(self, session: str) -> int:
        """A number for a session; sessions that were not seen for long get another."""
        if session not in self._threads:
            self._threads[session] = self._count
            self._count += 1
            if len(self._threads) > MAX_OPEN:
                self._threads.popitem(last=False)
        self._threads.move_to_end(session)
        return self._threads[session]

    def _write(self, row: dict[str, Any] | None) -> None:
        if row is None or self._written >= MAX_BYTES:
            return
        if self._file is None:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._file = os.fdopen(descriptor, "w", encoding="ascii")
            self._written = os.fstat(descriptor).st_size
            started = time.time() - (time.monotonic() - self._begun)
            self._put({MAGIC: VERSION, "block_tokens": self._block_tokens, "started_s": round(started, 3)})
        self._put(row)

    def _put(self, row: dict[str, Any]) -> None:
        self._written += self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
