"""A manager in an engine's process, and its client in the process that attached one.

Messages are MessagePack over a Unix socket in a directory that only this user may enter; a token in a file beside it
guards what changes state.  Nothing listens on a network.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError, KVCacheError

MAX_MESSAGE = 16 << 20
CALL_TIMEOUT_S = 10.0
Handler = Callable[..., Any]


class Request(msgspec.Struct, frozen=True):
    """One call."""

    token: str
    verb: str
    args: list[Any]


class Reply(msgspec.Struct, frozen=True):
    """Its result, or what went wrong."""

    result: Any = None
    error: str = ""


class Door:
    """A directory for the socket and the token, made by the client before the engine starts; gone with it."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="kvcache-factory-")
        weakref.finalize(self, _remove, folder, os.getpid())
        self.path = Path(folder) / "control"
        _token_file(self.path).touch(mode=0o600)
        _token_file(self.path).write_text(secrets.token_hex(16), encoding="ascii")


class Server:
    """Answers calls on the socket at *path* in a daemon thread, by the *handlers* of their verbs."""

    def __init__(self, path: str, handlers: Mapping[str, Handler]) -> None:
        self._path = Path(path)
        self._handlers = handlers
        self._token = _token_file(self._path).read_text(encoding="ascii")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
        except OSError as error:
            raise ConfigError(f"control socket {self._path}: {error}") from error
        finally:
            os.umask(before)
        self._socket.listen(8)
        threading.Thread(target=self._accept, name="kvcache-factory-control", daemon=True).start()

    def close(self) -> None:
        """Stop answering; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, msgspec.MsgspecError, ConfigError):
                connection.settimeout(CALL_TIMEOUT_S)
                request = msgspec.msgpack.decode(_receive(connection), type=Request)
                connection.settimeout(None)
                _send(connection, self._answer(request))

    def _answer(self, request: Request) -> bytes:
        if not hmac.compare_digest(request.token, self._token):
            return msgspec.msgpack.encode(Reply(error="wrong token"))
        handler = self._handlers.get(request.verb)
        try:
            result = handler(*request.args) if handler is not None else None
            reply = Reply(result) if handler is not None else Reply(error=f"unknown verb {request.verb!r}")
            return msgspec.msgpack.encode(reply)
        except Exception as error:
            return msgspec.msgpack.encode(Reply(error=f"{type(error).__name__}: {error}"))


class Client:
    """Calls verbs of the manager in an engine's process."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def ask(self, verb: str, *args: Any, timeout: float | None = CALL_TIMEOUT_S) -> Any:
        """Do *verb* there and return its result; ConfigError when it failed there or nobody answered."""
        try:
            token = _token_file(self._path).read_text(encoding="ascii")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(timeout)
                connection.connect(str(self._path))
                _send(connection, msgspec.msgpack.encode(Request(token, verb, list(args))))
                reply = msgspec.msgpack.decode(_receive(connection), type=Reply)
        except OSError as error:
            raise ConfigError(f"the engine's process does not answer on {self._path}: {error}") from error
        if reply.error:
            raise ConfigError(f"the engine's process: {reply.error}")
        return reply.result

    def call(self, verb: str, *args: Any) -> Any:
        """Do *verb* there; None when the engine is gone or refuses."""
        with contextlib.suppress(KVCacheError):
            timeout = None if verb == "wait" and args[:1] == (None,) else CALL_TIMEOUT_S
            if verb == "wait" and args and args[0] is not None:
                timeout = args[0] + CALL_TIMEOUT_S
            return self.ask(verb, *args, timeout=timeout)
        return None

    def wait_until_there(self, timeout: float = CALL_TIMEOUT_S) -> None:
        """Wait for the server's socket; ConfigError when it does not come."""
        end = time.monotonic() + timeout
        while not self._path.exists():
            if time.monotonic() > end:
                raise ConfigError(f"the engine's process has not opened {self._path}; is the connector loaded there?")
            time.sleep(0.02)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not take the directory with it
        shutil.rmtree(folder, ignore_errors=True)


def _token_file(path: Path) -> Path:
    return path.with_name("token")


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(struct.pack("<I", len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    (size,) = struct.unpack("<I", _exactly(connection, 4))
    if size > MAX_MESSAGE:
        raise ConfigError(f"a message of {size} bytes is too long")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        parts += part
    return bytes(parts)
