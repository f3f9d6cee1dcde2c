"""What a helper process does: one request after the other, until its parent is gone.

``python -m kvcache_factory.connector.helper_child FD`` is started by :mod:`.helper` and by nobody else.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import msgspec

from ..errors import ConfigError, MissingDependencyError
from ..status import Status
from .base import Bytes, MemoryRegion, make_options
from .blocking import BlockingConnector, Call
from .helper import _WIRE_BYTES, Hello, Reply, Request, map_memory

_GRACE_S = 30


class Worker:
    """The client, and the memory that it shares with the parent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memories: list[Bytes] = []
        self._limit_s = 0
        self._client: Any = None

    def run(self) -> None:
        """Answer until the parent closes its end."""
        hello = msgspec.msgpack.decode(self._connection.recv(_WIRE_BYTES), type=Hello)
        self._limit_s = math.ceil(hello.timeout_s) + _GRACE_S
        if not self._send(self._opened(hello)):
            return
        while True:
            data, fds, _, _ = socket.recv_fds(self._connection, _WIRE_BYTES, 1)
            if not data:
                return
            request = msgspec.msgpack.decode(data, type=Request)
            if request.verb == "map":
                memory = map_memory(fds[0])
                self._memories.append(memory)
                self._client.memory_mapped(memory.ctypes.data, len(memory))
                self._send(Reply())
            elif not self._send(self._done(request)):
                return

    def _send(self, reply: Reply) -> bool:
        self._connection.send(msgspec.msgpack.encode(reply))
        return not reply.last

    def _opened(self, hello: Hello) -> Reply:
        sys.path[:] = [*hello.path, *(path for path in sys.path if path not in hello.path)]
        module, _, name = hello.client.partition(":")
        try:
            cls = getattr(import_module(module), name)
            assert issubclass(cls, BlockingConnector)
            executor = ThreadPoolExecutor(1)
            self._client = cls.from_options(hello.conn_id, executor, make_options(cls.Options, hello.options))
            status = self._client.open()
        except MissingDependencyError as error:
            return Reply(error=str(error), kind="missing", last=True)
        except ConfigError as error:
            return Reply(error=str(error), kind="config", last=True)
        except Exception as error:
            return Reply(error=f"{type(error).__name__}: {error}", last=True)
        return Reply() if status.is_ok() else Reply(error=str(status.value), last=True)

    def _done(self, request: Request) -> Reply:
        regions = [MemoryRegion(self._memories[number], offset, size) for number, offset, size in request.places]
        work = getattr(self._client, request.verb)
        # If the parent is gone and the client hangs with the interpreter's lock, only the system can end this process.
        signal.alarm(self._limit_s)
        try:
            statuses = work(Call(), request.keys, regions) if regions else work(Call(), request.keys)
        except Exception as error:  # a client that failed is not trusted any more
            return Reply(error=f"{type(error).__name__}: {error}", last=True)
        finally:
            signal.alarm(0)
        return Reply(statuses=[_plain(status) for status in statuses])


def _plain(status: Status[Any]) -> tuple[int, str | None]:
    return status.error_code.value, None if status.value is None else str(status.value)


def main(arguments: list[str]) -> None:
    """Serve the parent at the other end of the descriptor."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    with socket.socket(fileno=int(arguments[0])) as connection:
        Worker(connection).run()
    sys.stderr.flush()
    os._exit(0)  # clients are known to crash when they are torn down


if __name__ == "__main__":
    main(sys.argv[1:])
