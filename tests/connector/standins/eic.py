"""A stand-in for the package eic, as far as AIBrix uses it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import _shelf


class StatusCode(IntEnum):
    SUCCESS = 0
    FAILED = 1


class LogLevel(IntEnum):
    DEBUG, INFO, WARN, ERROR = range(4)


class TransportType(IntEnum):
    NONE, TCP, RDMA, AUTO = range(4)


class MemoryType(IntEnum):
    MEMORY_DEFAULT, MEMORY_CUDA = range(2)


class _Bag:
    def __init__(self) -> None:
        self.__dict__["ns"] = ""


class InitOption(_Bag):
    pass


class ExistOption(_Bag):
    pass


class GetOption(_Bag):
    pass


class SetOption(_Bag):
    pass


class MemoryInfo(_Bag):
    pass


class StringVector(list[str]):
    pass


class IOBuffers:
    def __init__(self) -> None:
        self.parts: list[tuple[int, int]] = []

    def append(self, address: int, length: int, receive: bool) -> None:
        self.parts.append((address, length))


class Outcome:
    def __init__(self, good: list[bool]) -> None:
        self.status_codes = [StatusCode.SUCCESS if one else StatusCode.FAILED for one in good]
        self.code = StatusCode.SUCCESS if all(good) else StatusCode.FAILED


class Client:
    last: Any = None

    def __init__(self) -> None:
        self._memories = _shelf.Memories()
        Client.last = self

    def init(self, instance: str, endpoint: str, option: InitOption) -> int:
        self.said = (instance, endpoint, option)
        return 0 if _shelf.reachable() else 2

    def register_memory(self, buffers: IOBuffers, info: MemoryInfo) -> bool:
        for address, length in buffers.parts:
            self._memories.add(address, length)
        return True

    def mexist(self, keys: StringVector, option: ExistOption) -> tuple[StatusCode, Outcome]:
        outcome = Outcome([_shelf.exists(key) for key in keys])
        return outcome.code, outcome

    def mget(self, keys: StringVector, option: GetOption, buffers: IOBuffers) -> tuple[StatusCode, IOBuffers, Outcome]:
        pairs = zip(keys, buffers.parts, strict=True)
        outcome = Outcome([self._memories.holds(*at) and _shelf.read_into(key, *at) is True for key, at in pairs])
        return outcome.code, buffers, outcome

    def mset(self, keys: StringVector, buffers: IOBuffers, option: SetOption) -> tuple[StatusCode, Outcome]:
        self.stored = (option.ns, option.ttl_second)  # type: ignore[attr-defined]
        good = []
        for key, at in zip(keys, buffers.parts, strict=True):
            good.append(self._memories.holds(*at))
            if good[-1]:
                _shelf.write(key, *at)
        outcome = Outcome(good)
        return outcome.code, outcome
