"""A stand-in for the package hpkv: zero is success, and nothing is said of why something failed."""

from __future__ import annotations

import _shelf

from ._hpkv import SGL


class HPKVClient:
    def __init__(self, raddr: str, rport: int, laddr: str, lport: int, nqueue: int) -> None:
        if not _shelf.reachable():
            raise RuntimeError("no server")
        self._memories = _shelf.Memories()

    def reg_memory(self, address: int, length: int) -> int:
        return self._memories.add(address, length)

    def dereg_memory(self, handle: int) -> None:
        self._memories.remove(handle)

    def test(self, key: str) -> int:
        return int(_shelf.exists(key))

    def get(self, key: str, sgl: SGL, length: int) -> int:
        known = self._memories.holds(sgl.ptr, length, sgl.handle)
        return 0 if known and _shelf.read_into(key, sgl.ptr, length) else -1

    def set(self, key: str, sgl: SGL) -> int:
        if not self._memories.holds(sgl.ptr, sgl.length, sgl.handle):
            return -1
        _shelf.write(key, sgl.ptr, sgl.length)
        return 0

    def delete_keys(self, key: str) -> int:
        assert isinstance(key, str)
        return int(_shelf.delete(key))

    def close(self) -> None:
        pass
