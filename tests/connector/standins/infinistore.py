"""A stand-in for the package infinistore 0.2.35, with its failures: calls and errors, never its protocol."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import _shelf
import numpy as np


class InfiniStoreException(Exception):
    pass


class InfiniStoreKeyNotFound(InfiniStoreException):
    pass


class ClientConfig:
    last: Any = None

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)
        self.hint_gid_index = -1
        ClientConfig.last = self


class InfinityConnection:
    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.rdma_connected = False
        self.closed = False
        self._memories = _shelf.Memories()

    def connect(self) -> None:
        print(f"connecting to {self.config.host_addr}")
        if not _shelf.reachable():
            raise Exception("Failed to initialize remote connection")
        self.rdma_connected = self.config.connection_type == "RDMA"

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.closed or not _shelf.reachable():
            raise Exception("Failed to talk to infinistore, ret = -1")

    def check_exist(self, key: str) -> bool:
        self._check()
        return _shelf.exists(key)

    def delete_keys(self, keys: list[str]) -> int:
        self._check()
        assert isinstance(keys, list)
        return sum(_shelf.delete(key) for key in keys)

    def tcp_write_cache(self, key: str, ptr: int, size: int) -> None:
        self._check()
        if not key or not size or not ptr:
            raise Exception("key, size or pointer is empty")
        _shelf.write(key, ptr, size)

    def tcp_read_cache(self, key: str) -> Any:
        self._check()
        value = _shelf.read(key)
        while value is None:  # the real client waits for ever too
            time.sleep(1)
        return np.frombuffer(value, np.uint8)

    def register_mr(self, ptr: int, size: int) -> int:
        if not self.rdma_connected:
            raise Exception("this function is only valid for connected rdma")
        self._memories.add(ptr, size)
        return 0

    async def _transfer(self, blocks: list[tuple[str, int]], size: int, ptr: int) -> None:
        self._check()
        if not self.rdma_connected:
            raise Exception("this function is only valid for connected rdma")
        if len(blocks) > 1 and size > 4 << 20:
            raise Exception("Failed to write to infinistore, ret = 400")
        if not all(self._memories.holds(ptr + offset, size) for _, offset in blocks):
            raise Exception("memory is not registered")
        await asyncio.sleep(0)

    async def rdma_write_cache_async(self, blocks: list[tuple[str, int]], block_size: int, ptr: int) -> int:
        await self._transfer(blocks, block_size, ptr)
        for key, offset in blocks:
            _shelf.write(key, ptr + offset, block_size)
        return 200

    async def rdma_read_cache_async(self, blocks: list[tuple[str, int]], block_size: int, ptr: int) -> int:
        await self._transfer(blocks, block_size, ptr)
        if not all(_shelf.exists(key) for key, _ in blocks):
            raise InfiniStoreKeyNotFound("some keys not found")
        if not all(_shelf.read_into(key, ptr + offset, block_size) for key, offset in blocks):
            raise Exception("Failed to read to infinistore, ret = 400")
        return 200
