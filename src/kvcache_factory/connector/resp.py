"""The protocol of Redis over one blocking socket: values go straight between the socket and the caller's memory.

Packaged clients copy every value through Python objects, at several times the processor time.  This one sends a
pipeline with one gathering system call and receives each value where it belongs.
https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

Reply: TypeAlias = Any
"""bytes, str, int, None, a list of replies, or a ServerError as a value."""

_MAX_BUFFERS = 512  # of one system call; the system's limit is 1024
_MAX_LINE = 64 << 10
_MAX_BULK = 512 << 20  # the server's own limit
_MAX_REPLY = 64 << 20  # of what is not received into the caller's memory
_MAX_ITEMS = 1 << 20
_MAX_DEPTH = 8
_DRAIN = 1 << 20
_PEEK = 64


class ServerError(Exception):
    """An error that the server answered; *code* is its first word, such as MOVED, OOM or NOAUTH."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]


class Address(msgspec.Struct, frozen=True):
    """Where a server listens: a host and a port, or the path of a unix socket."""

    host: str = "127.0.0.1"
    port: int = 6379
    path: str = ""

    def __str__(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


class Access(msgspec.Struct, frozen=True):
    """How to get in, the same for every server of a cluster; never shown."""

    username: str = ""
    password: str = ""
    database: int = 0
    tls: ssl.SSLContext | None = None
    connect_timeout_s: float = 1.0
    timeout_s: float = 2.0

    def __repr__(self) -> str:
        return "Access(***)"


class RespConnection:
    """One connection, used by one thread at a time.

    Raises OSError (TimeoutError where the server said nothing for the time it has) and ServerError; after an OSError
    the connection is of no use and must be closed.
    """

    def __init__(self, address: Address, access: Access) -> None:
        self.address = address
        self._socket = _connect(address, access)
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        try:
            self._greet(access)
        except BaseException:
            self.close()
            raise

    def _greet(self, access: Access) -> None:
        if access.password:
            names = [access.username] if access.username else []
            self.ask("AUTH", *names, access.password)
        if access.database:
            self.ask("SELECT", access.database)

    def close(self) -> None:
        """Close; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def interrupt(self) -> None:
        """Make the thread that waits on this connection fail at once; the only call that other threads may make."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def ask(self, *words: bytes | str | int) -> Reply:
        """Send one command and return its answer; raises ServerError."""
        self.send([command(*words)])
        reply = self.reply()
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send all bytes of *buffers*, without joining them."""
        if self._tls:
            for buffer in buffers:
                self._socket.sendall(buffer)
            return
        for i in range(0, len(buffers), _MAX_BUFFERS):
            rest = list(buffers[i : i + _MAX_BUFFERS])
            while rest:
                rest = _after(rest, _in_time(self._socket.sendmsg, rest))

    def reply(self, depth: int = 0) -> Reply:
        """The next answer, whole; ConnectionError for one that is larger or deeper than anything that is asked for."""
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text.decode(errors="replace")
        if kind == b"-":
            return ServerError(text.decode(errors="replace"))
        if kind == b":" and _is_number(text):
            return int(text)
        if kind == b"$":
            size = _size(text, _MAX_REPLY)
            return None if size < 0 else self._exactly(size + 2)[:-2]
        if kind == b"*" and depth < _MAX_DEPTH:
            count = _size(text, _MAX_ITEMS)
            return None if count < 0 else [self.reply(depth + 1) for _ in range(count)]
        raise ConnectionError(f"{self.address} does not speak the protocol of Redis")

    def reply_into(self, view: memoryview, least: int | None = None) -> int | ServerError:
        """Receive a value where it belongs; returns its length, -1 where there is none.

        A value longer than *view*, or shorter than *least* bytes (by default those of *view*), is read away, and *view*
        left as it was.
        """
        line = self._line()
        if line[:1] == b"-":
            return ServerError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ConnectionError(f"{self.address} answered a GET with {line[:1]!r}")
        size = _size(line[1:], _MAX_BULK)
        if (len(view) if least is None else least) <= size <= len(view):
            self._fill(view[:size])
            self._fill(memoryview(bytearray(2)))
        elif size >= 0:
            self._drain(size + 2)
        return size

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            line += self._part_of_line()
            if len(line) > _MAX_LINE:
                raise ConnectionError(f"{self.address} does not speak the protocol of Redis")
        return line[:-2]

    def _part_of_line(self) -> bytes:
        """Bytes up to the end of the line or of what has arrived, and none of the value behind it."""
        if self._tls:  # one byte of what is decrypted already costs no system call
            return _some(_in_time(self._socket.recv, 1), self.address)
        seen = _some(_in_time(self._socket.recv, _PEEK, socket.MSG_PEEK), self.address)
        end = seen.find(b"\n")
        return _some(self._socket.recv(len(seen) if end < 0 else end + 1), self.address)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _drain(self, size: int) -> None:
        scratch = memoryview(bytearray(min(size, _DRAIN)))
        while size:
            part = scratch[: min(size, _DRAIN)]
            self._fill(part)
            size -= len(part)

    def _fill(self, view: memoryview) -> None:
        flags = 0 if self._tls else socket.MSG_WAITALL
        while view:
            count = _in_time(self._socket.recv_into, view, len(view), flags)
            if not count:
                raise ConnectionResetError(f"{self.address} closed the connection")
            view = view[count:]


def command(*words: bytes | str | int) -> bytes:
    """A command with small arguments, as it is sent."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def set_command(key: bytes, value: memoryview, ttl_s: int = 0) -> list[bytes | memoryview]:
    """A SET as buffers, the value among them as it is."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_s else 3, len(key), key, len(value))
    tail = b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s) if ttl_s else b"\r\n"
    return [head, value, tail]


def _connect(address: Address, access: Access) -> socket.socket:
    plain: socket.socket
    if address.path:
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(access.connect_timeout_s)
        try:
            plain.connect(address.path)
        except BaseException:
            plain.close()
            raise
    else:
        plain = socket.create_connection((address.host, address.port), access.connect_timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if access.tls is not None:
        try:
            secure = access.tls.wrap_socket(plain, server_hostname=address.host)
        except BaseException:
            plain.close()
            raise
        secure.settimeout(access.timeout_s)
        return secure
    # The system keeps the time: one call receives a whole value, without a poll before each piece of it.
    plain.settimeout(None)
    limit = struct.pack("ll", int(access.timeout_s), int(access.timeout_s % 1 * 1e6))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return plain


def _in_time(action: Any, *arguments: Any) -> Any:
    try:
        return action(*arguments)
    except BlockingIOError as error:
        raise TimeoutError("the server did not answer in time") from error


def _some(data: bytes, address: Address) -> bytes:
    if not data:
        raise ConnectionResetError(f"{address} closed the connection")
    return data


def _size(text: bytes, most: int) -> int:
    size = int(text) if _is_number(text) else most + 1
    if size > most:
        raise ConnectionError(f"a reply of size {text[:20]!r} is none that was asked for")
    return size


def _is_number(text: bytes) -> bool:
    return len(text) < 20 and text.removeprefix(b"-").isdigit()


def _after(buffers: Iterable[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    """What is left of *buffers* after their first *count* bytes."""
    rest: list[bytes | memoryview] = []
    for buffer in buffers:
        if count >= len(buffer):
            count -= len(buffer)
        else:
            rest.append(memoryview(buffer)[count:] if count else buffer)
            count = 0
    return rest
