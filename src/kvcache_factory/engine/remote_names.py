"""Names of blocks in a remote store: ``namespace/identity/key``, so that people can read what is there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from ..block.key import raw_name
from .roots import Roots
from .table import Keys
from .values import StoredRecords

REMEMBERED = 65_536
REMEMBERED_BYTES = 16 << 20


class Names:
    """Makes names, and remembers the newest of those that were written.

    Parameters
    ----------
    builder:
        RAW names a block by the record of its whole prefix, as AIBrix does; the others by its key.
    """

    def __init__(self, namespace: str, builder: str, roots: Roots) -> None:
        self._namespace = namespace.encode()
        self._raw = builder == "RAW"
        self._roots = roots
        self._written: OrderedDict[bytes, bytes] = OrderedDict()
        """What was written, and the key of each that cannot be told from it."""
        self._of_key: dict[bytes, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, chain: StoredRecords, blocks: Iterable[int]) -> list[bytes]:
        """Names of these blocks of a chain."""
        head = self._head(chain.identity_digest)
        if self._raw:
            return [head + self._raw_key(chain, block) for block in blocks]
        keys = chain.keys.astype("<u8", copy=False)
        return [head + keys[block].tobytes().hex().encode() for block in blocks]

    def of_keys(self, keys: Keys) -> list[bytes]:
        """Names that blocks of *keys* ``[n, 2]`` have or would have, under every identity of this manager.

        With RAW, where a key is not enough to tell, those that are remembered.
        """
        if self._raw:
            with self._lock:
                return [self._of_key[key.tobytes()] for key in keys if key.tobytes() in self._of_key]
        tails = [key.tobytes().hex().encode() for key in keys.astype("<u8", copy=False)]
        return [self._head(digest) + tail for digest in self._roots.identities() for tail in tails]

    def remember(self, names: Sequence[bytes], keys: Keys) -> None:
        """*names* of blocks of *keys* ``[n, 2]`` are being written; the oldest beyond a bound are forgotten."""
        with self._lock:
            for name, key in zip(names, keys, strict=True):
                if name not in self._written:
                    self._bytes += len(name)
                    self._written[name] = key.tobytes() if self._raw else b""
                if self._raw:
                    self._of_key[key.tobytes()] = name
                self._written.move_to_end(name)
            while len(self._written) > REMEMBERED or self._bytes > REMEMBERED_BYTES:
                oldest, of = self._written.popitem(last=False)
                self._bytes -= len(oldest)
                self._of_key.pop(of, None)

    def take_written(self) -> list[bytes]:
        """What was remembered, which is forgotten now."""
        with self._lock:
            names = list(self._written)
            self._written.clear()
            self._of_key.clear()
            self._bytes = 0
            return names

    def _head(self, identity_digest: bytes) -> bytes:
        return b"%s/%s/" % (self._namespace, identity_digest.hex().encode())

    @staticmethod
    def _raw_key(chain: StoredRecords, block: int) -> bytes:
        end = block + 1
        tokens = np.ascontiguousarray(chain.token_blocks[:end]).reshape(-1)
        return raw_name(chain.identity_digest, tokens, chain.extras[:end])
