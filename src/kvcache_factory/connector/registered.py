"""Memory that a vendor's client was told of, by address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .base import Bytes, MemoryRegion


class Registered:
    """Handles of registered memory, found by the address of a region in it."""

    def __init__(self) -> None:
        self._memories: list[tuple[int, int, Any]] = []

    def add(self, address: int, length: int, handle: Any) -> None:
        """*length* bytes at *address* are known to the client by *handle*."""
        self._memories.append((address, length, handle))

    def handle_of(self, mr: MemoryRegion) -> Any:
        """The handle of the memory around *mr*; ValueError where it was never registered."""
        at = mr.data_ptr()
        for address, length, handle in self._memories:
            if address <= at and at + mr.length <= address + length:
                return handle
        raise ValueError(f"the {mr.length} bytes at {at:#x} lie in no registered memory")

    def forget(self, release: Callable[[Any], Any]) -> None:
        """Give every handle to *release*."""
        memories, self._memories = self._memories, []
        for _, _, handle in memories:
            release(handle)


def memory_at(address: int, length: int) -> Bytes:
    """*length* bytes at *address*, as uint8 [length] without a copy; whoever lent them keeps them valid."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
