"""Clients that can freeze or crash the process they live in, each in a child process that maps the same memory.

The caller's memory is used as it is where it lies in an anonymous file (``CPUBackend(shared=True)``); other memory
passes through a small shared area, at the price of one copy.  A deadline holds for each batch.  When it is over, the
child is killed and waited for, and with that nobody touches the regions any more.  The next batch gets a new child.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np

from ..errors import ConfigError, KVCacheError, MissingDependencyError
from ..status import Status, StatusCodes
from .base import Bytes, ConnectorFeature, ConnectorOptions, MemoryRegion
from .blocking import BlockingConnector, Call, Statuses, status_of

if TYPE_CHECKING:
    import torch

_WIRE_BYTES = 1 << 20
_BACK_OFF_S = (0.5, 30.0)  # after the first death, and at most
_PAGE = 4096
_DEATHS = (OSError, EOFError)

Place = tuple[int, int, int]
"""Which memory (0 is the area for copies), the offset in it and the length, in bytes."""


class Hello(msgspec.Struct, frozen=True):
    """The first message: what the child is to run."""

    client: str
    conn_id: str
    options: dict[str, Any]
    path: list[str]
    timeout_s: float


class Request(msgspec.Struct, frozen=True):
    """One batch, or (*verb* ``map``) a descriptor that comes with it."""

    verb: str
    keys: list[bytes] = []
    places: list[Place] = []


class Reply(msgspec.Struct, frozen=True):
    """What came of it.  A *last* one says that the client failed and the child ends."""

    statuses: list[tuple[int, str | None]] = []
    error: str = ""
    kind: str = ""
    last: bool = False


class HelperOptions(ConnectorOptions, frozen=True, kw_only=True):
    """Options of every connector with a helper process.

    Attributes:
        timeout_s: longest that a batch may take before the helper is killed, in seconds.
        start_timeout_s: the same for starting the helper and connecting; a level gives up opening after 10 seconds.
        copy_mb: size of the area for memory that cannot be shared, in MiB; a batch must fit in.
    """

    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    copy_mb: Annotated[int, msgspec.Meta(ge=1)] = 128


class HelperConnector(BlockingConnector):
    """A :class:`BlockingConnector` that runs another one, *client*, in a child process.  Batches go one after another.

    ``register_slabs`` tells it of memory that may be shared; it is offered as the ``rdma`` feature, so that callers do.
    """

    client: ClassVar[str] = ""
    """``"module:Class"`` of the connector that the child runs."""

    def __init__(self, conn_id: str, executor: Executor, options: Any) -> None:
        super().__init__(conn_id, executor, options)
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._area: Area | None = None
        self._shared: list[Shared] = []
        self._deaths = 0
        self._not_before_s = 0.0

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature(mput_mget=True, rdma=True)

    @property
    def helper_pid(self) -> int | None:
        """Process id of the helper that runs now."""
        return self._child.pid if self._child is not None else None

    def connect(self) -> None:
        """Start the helper, and have it connect."""
        self._area = Area(self.options.copy_mb << 20)
        try:
            self._child = self._started()
        except BaseException:
            self._area.close()
            raise

    def disconnect(self) -> None:
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.end()
            for shared in self._shared:
                shared.close()
            self._shared = []
            assert self._area is not None
            self._area.close()

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        """Share what lies in an anonymous file with the helper; other memory is taken too, and copied."""
        with self._lock:
            for slab in slabs:
                shared = Shared.of(int(slab.data_ptr()), int(slab.numel() * slab.element_size()))
                if shared is not None:
                    self._shared.append(shared)
                    if self._child is not None:
                        self._child.map(shared.fd)
        return Status()

    # -- batches ------------------------------------------------------------------------------------------------------

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return self._ask(call, "exists_all", keys)

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return self._ask(call, "delete_all", keys)

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        with self._lock:
            places = self._places(mrs)
            statuses = self._ask_locked(call, "get_all", keys, places)
            for mr, (memory, offset, length), status in zip(mrs, places, statuses, strict=True):
                if memory == 0 and status.is_ok():
                    mr.view[:] = self._copies(offset, length)
            return statuses

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        with self._lock:
            places = self._places(mrs)
            for mr, (memory, offset, length) in zip(mrs, places, strict=True):
                if memory == 0:
                    self._copies(offset, length)[:] = mr.view
            return self._ask_locked(call, "put_all", keys, places)

    def _ask(self, call: Call, verb: str, keys: Sequence[bytes]) -> Statuses:
        with self._lock:
            return self._ask_locked(call, verb, keys, [])

    def _ask_locked(self, call: Call, verb: str, keys: Sequence[bytes], places: list[Place]) -> Statuses:
        if call.cancelled:
            return [Status(StatusCodes.CANCELLED)] * len(keys)
        child = self._child or self._restarted()
        call.on_cancel(child.kill)
        try:
            reply = child.ask(Request(verb, list(keys), places), self.options.timeout_s)
        except _DEATHS as error:
            self._buried(child)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{self.name} said nothing for {self.options.timeout_s:g} s; killed") from error
            raise ConnectionError(f"the helper process of {self.name} ended with {child.exit_code}") from error
        finally:
            call.on_cancel(None)
        if reply.last:
            self._child = None
            child.end()
        else:
            self._deaths = 0
        if reply.error:
            raise ConnectionError(reply.error)
        return [Status(StatusCodes(code), text) for code, text in reply.statuses]

    def _copies(self, offset: int, length: int) -> memoryview:
        assert self._area is not None
        return self._area.view[offset : offset + length]

    def _places(self, mrs: Sequence[MemoryRegion]) -> list[Place]:
        """Where the helper finds each region; ValueError when the area for copies is too small."""
        assert self._area is not None
        places: list[Place] = []
        used = 0
        for mr in mrs:
            place = next((p for i, s in enumerate(self._shared) if (p := s.place(i + 1, mr)) is not None), None)
            if place is None:
                place = (0, used, mr.length)
                used += -(-mr.length // _PAGE) * _PAGE
            places.append(place)
        if used > len(self._area.view):
            raise ValueError(f"{used} bytes are more than copy_mb={self.options.copy_mb}; share the memory or raise it")
        return places

    # -- the child ----------------------------------------------------------------------------------------------------

    def _started(self) -> Child:
        assert self._area is not None
        options = msgspec.to_builtins(self.options)
        hello = Hello(self.client, self.conn_id, options, [p for p in sys.path if p], self.options.timeout_s)
        child = Child()
        try:
            reply = child.ask(hello, self.options.start_timeout_s)
            if reply.error:
                raise _raised(reply)
            for fd in (self._area.fd, *(shared.fd for shared in self._shared)):
                child.map(fd)
        except _DEATHS as error:
            child.end()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{self.name} did not start in {self.options.start_timeout_s:g} s") from error
            if child.exit_code in (0, None):
                raise
            raise ConnectionError(f"the helper process of {self.name} ended with {child.exit_code}") from error
        except BaseException:
            child.end()
            raise
        return child

    def _restarted(self) -> Child:
        if time.monotonic() < self._not_before_s:
            raise ConnectionError(f"the helper process of {self.name} has ended and is not started again yet")
        try:
            self._child = self._started()
        except Exception:
            self._wait_longer()
            raise
        return self._child

    def _buried(self, child: Child) -> None:
        child.end()
        self._child = None
        self._wait_longer()

    def _wait_longer(self) -> None:
        first_s, most_s = _BACK_OFF_S
        self._not_before_s = time.monotonic() + min(first_s * 2**self._deaths, most_s)
        self._deaths = min(self._deaths + 1, 16)

    def status_of(self, error: Exception) -> Status[Any]:
        if isinstance(error, ValueError):
            return Status(StatusCodes.INVALID, error)
        return status_of(error)


class Child:
    """One child process, and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", f"{__package__}.helper_child", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, option, _WIRE_BYTES)
        self._socket = ours
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def ask(self, message: Hello | Request, timeout_s: float) -> Reply:
        """Send one message and wait for its answer; TimeoutError, OSError, EOFError when the child ended."""
        self._socket.settimeout(timeout_s)
        self._socket.send(msgspec.msgpack.encode(message))
        return self._reply()

    def map(self, fd: int) -> None:
        """Have the child map a memory; its number is one more than that of the last."""
        self._socket.settimeout(_BACK_OFF_S[1])
        socket.send_fds(self._socket, [msgspec.msgpack.encode(Request("map"))], [fd])
        self._reply()

    def _reply(self) -> Reply:
        data = self._socket.recv(_WIRE_BYTES)
        if not data:
            raise EOFError("the helper process has ended")
        return msgspec.msgpack.decode(data, type=Reply)

    def kill(self) -> None:
        """Kill it; whoever waits for its answer sees the end of it.  Any thread may call this."""
        self._process.kill()

    def end(self) -> None:
        """Kill it and wait: after this, nobody touches the memory any more.  Idempotent."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


class Area:
    """Anonymous shared memory of our own."""

    def __init__(self, size: int) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("kvcache-factory-copies", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, size)
        self._mapping = mmap.mmap(self.fd, size)
        self.view = memoryview(self._mapping)

    def close(self) -> None:
        """Give it back."""
        self.view.release()
        self._mapping.close()
        os.close(self.fd)


class Shared(msgspec.Struct, frozen=True):
    """Memory of the caller that lies in a file of no name: at *address*, *length* bytes, from *offset* of *fd* on."""

    fd: int
    address: int
    length: int
    offset: int

    @classmethod
    def of(cls, address: int, length: int) -> Shared | None:
        """The file around *length* bytes at *address*; None where there is none, or none that can be handed over."""
        found = _mapped_file(address, length)
        if found is None:
            return None
        device_and_inode, offset = found
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/self/fd/{name}")
                if (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino) == device_and_inode:
                    return cls(os.dup(int(name)), address, length, offset)
        return None

    def place(self, number: int, mr: MemoryRegion) -> Place | None:
        """Where the helper finds *mr* in this memory; None where it lies elsewhere."""
        at = mr.data_ptr() - self.address
        return (number, self.offset + at, mr.length) if 0 <= at <= self.length - mr.length else None

    def close(self) -> None:
        """Forget it."""
        os.close(self.fd)


def _mapped_file(address: int, length: int) -> tuple[tuple[int, int, int], int] | None:
    """Device and inode of the shared file mapped there, and the offset of *address* in it."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        span, mode, offset, device, inode = line.split()[:5]
        first, last = (int(text, 16) for text in span.split("-"))
        if first <= address < last:
            if mode[3] != "s" or inode == "0" or address + length > last:
                return None
            major, minor = (int(text, 16) for text in device.split(":"))
            return (major, minor, int(inode)), int(offset, 16) + address - first
    return None


def _raised(reply: Reply) -> Exception:
    kinds: dict[str, type[KVCacheError]] = {"missing": MissingDependencyError, "config": ConfigError}
    return kinds[reply.kind](reply.error) if reply.kind in kinds else ConnectionError(reply.error)


def map_memory(fd: int) -> Bytes:
    """All of a file's memory, as uint8 [bytes]; the descriptor is closed."""
    try:
        return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
    finally:
        os.close(fd)
