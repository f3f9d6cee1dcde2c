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
        """The names of what was written, by the keys of the blocks."""
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
                return [name for key in keys if (name := self._written.get(key.tobytes())) is not None]
        tails = [key.tobytes().hex().encode() for key in keys.astype("<u8", copy=False)]
        return [self._head(digest) + tail for digest in self._roots.identities() for tail in tails]

    def remember(self, names: Sequence[bytes], keys: Keys) -> None:
        """*names* of blocks of *keys* ``[n, 2]`` are being written; the oldest beyond a bound are forgotten."""
        with self._lock:
            for name, key in zip(names, keys, strict=True):
                self._bytes += len(name) - len(self._written.pop(key.tobytes(), b""))
                self._written[key.tobytes()] = name
            while len(self._written) > REMEMBERED or self._bytes > REMEMBERED_BYTES:
                self._bytes -= len(self._written.popitem(last=False)[1])

    def take_written(self) -> list[bytes]:
        """What was remembered, which is forgotten now."""
        with self._lock:
            names = list(self._written.values())
            self._written.clear()
            self._bytes = 0
            return names

    def _head(self, identity_digest: bytes) -> bytes:
        return b"%s/%s/" % (self._namespace, identity_digest.hex().encode())

    @staticmethod
    def _raw_key(chain: StoredRecords, block: int) -> bytes:
        end = block + 1
        tokens = np.ascontiguousarray(chain.token_blocks[:end]).reshape(-1)
        return raw_name(chain.identity_digest, tokens, chain.extras[:end])
