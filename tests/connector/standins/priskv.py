"""A stand-in for the package priskv, its zero-copy calls as AIBrix has them included."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

import _shelf

NO_SUCH_KEY, FAILED = 0x106, 0x100


class PRISKV_STATUS(IntEnum):  # its name there
    PRISKV_STATUS_OK = 0
    PRISKV_STATUS_NO_SUCH_KEY = NO_SUCH_KEY
    PRISKV_STATUS_FAILED = FAILED


class SGL:
    def __init__(self, ptr: int, length: int, handle: int) -> None:
        self.ptr, self.length, self.handle = ptr, length, handle


class MemoryRegion:
    def __init__(self, length: int) -> None:
        self.memory = (ctypes.c_uint8 * length)()
        self.addr, self.length = ctypes.addressof(self.memory), length


class PriskvClient:
    def __init__(self, raddr: str, rport: int, password: str) -> None:
        if not _shelf.reachable():
            raise RuntimeError(f"Failed to connect to Priskv meta server at {raddr}:{rport}.")
        self._memories = _shelf.Memories()
        self.lent = 0

    def reg_memory(self, iova: int, length: int) -> int:
        return self._memories.add(iova, length)

    def dereg_memory(self, handle: int) -> int:
        self._memories.remove(handle)
        return 0

    def close(self) -> None:
        assert self.lent == 0, "memory was lent and not given back"

    def _known(self, sgl: SGL) -> bool:
        return self._memories.holds(sgl.ptr, sgl.length, sgl.handle)

    def exists(self, key: str) -> int:
        return 0 if _shelf.exists(key) else NO_SUCH_KEY

    def delete(self, key: str) -> int:
        return 0 if _shelf.delete(key) else NO_SUCH_KEY

    def set(self, key: str, sgl: SGL) -> int:
        if not self._known(sgl):
            return FAILED
        _shelf.write(key, sgl.ptr, sgl.length)
        return 0

    def get(self, key: str, sgl: SGL, value_len: int) -> int:
        if not self._known(sgl):
            return FAILED
        return {True: 0, None: NO_SUCH_KEY, False: FAILED}[_shelf.read_into(key, sgl.ptr, value_len)]

    def _each(self, codes: list[int]) -> tuple[int, list[int]]:
        return (FAILED if any(codes) else 0), codes

    def mset(self, keys: list[str], sgls: list[SGL]) -> tuple[int, list[int]]:
        return self._each([self.set(key, sgl) for key, sgl in zip(keys, sgls, strict=True)])

    def mget(self, keys: list[str], sgls: list[SGL], value_lens: list[int]) -> tuple[int, list[int]]:
        return self._each([self.get(*each) for each in zip(keys, sgls, value_lens, strict=True)])

    def mexists(self, keys: list[str]) -> tuple[int, list[int]]:
        return self._each([self.exists(key) for key in keys])

    def alloc(self, key: str, size: int) -> tuple[PRISKV_STATUS, Any]:
        self.lent += 1
        return PRISKV_STATUS.PRISKV_STATUS_OK, MemoryRegion(size)

    def seal(self, key: str, region: MemoryRegion) -> PRISKV_STATUS:
        self.lent -= 1
        _shelf.write(key, region.addr, region.length)
        return PRISKV_STATUS.PRISKV_STATUS_OK

    def drop(self, key: str, region: MemoryRegion) -> PRISKV_STATUS:
        self.lent -= 1
        return PRISKV_STATUS.PRISKV_STATUS_OK

    def acquire(self, key: str) -> tuple[PRISKV_STATUS, Any]:
        value = _shelf.read(key)
        if value is None:
            return PRISKV_STATUS.PRISKV_STATUS_NO_SUCH_KEY, None
        self.lent += 1
        region = MemoryRegion(len(value))
        ctypes.memmove(region.addr, value, len(value))
        return PRISKV_STATUS.PRISKV_STATUS_OK, region

    def release(self, key: str, region: MemoryRegion) -> PRISKV_STATUS:
        self.lent -= 1
        return PRISKV_STATUS.PRISKV_STATUS_OK
