"""What all stand-ins keep values in: files of a directory, so that processes share them as they share a server."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import time
from pathlib import Path


def _directory() -> Path:
    return Path(os.environ["KVCF_STANDIN_DIRECTORY"])


def _file(name: str) -> Path:
    if "misbehave/crash" in name:
        os.kill(os.getpid(), signal.SIGSEGV)
    if (
        "misbehave/freeze" in name or (_directory() / "FROZEN").exists()
    ):  # with the interpreter's lock, as a client in C does
        ctypes.PyDLL(None).sleep(600)
    return _directory() / hashlib.sha256(name.encode()).hexdigest()


def reachable() -> bool:
    """Whether the server answers: it does while nobody has put a file named DOWN there."""
    return not (_directory() / "DOWN").exists()


def write(name: str, address: int, length: int) -> None:
    path = _file(name)
    temporary = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
    temporary.write_bytes(ctypes.string_at(address, length))
    temporary.replace(path)


def read(name: str) -> bytes | None:
    try:
        return _file(name).read_bytes()
    except FileNotFoundError:
        return None


def read_into(name: str, address: int, length: int) -> bool | None:
    """None where there is no value, False where it has another length."""
    value = read(name)
    if value is None:
        return None
    if len(value) != length:
        return False
    ctypes.memmove(address, value, length)
    return True


def exists(name: str) -> bool:
    return _file(name).exists()


def delete(name: str) -> bool:
    try:
        _file(name).unlink()
    except FileNotFoundError:
        return False
    return True


class Memories:
    """Registered memory: what is used without having been registered is refused, as hardware does."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}
        self._next = 1

    def add(self, address: int, length: int) -> int:
        self._next += 1
        self._known[self._next] = (address, length)
        return self._next

    def remove(self, handle: int) -> None:
        del self._known[handle]

    def holds(self, address: int, length: int, handle: int | None = None) -> bool:
        spans = self._known.values() if handle is None else [self._known[handle]] if handle in self._known else []
        return any(start <= address and address + length <= start + size for start, size in spans)
