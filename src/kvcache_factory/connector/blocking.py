"""Base of connectors whose client blocks: whole batches run on a thread of the executor.

A coroutine of these ends only when its regions are no longer touched, also when it is cancelled: then the call is
interrupted, where its client allows that, and waited for.
"""

from __future__ import annotations

import asyncio
import errno
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from importlib import import_module
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote_from_bytes

from ..errors import KVCacheError, MissingDependencyError
from ..status import Status, StatusCodes
from .base import ConnectorFeature, MemoryRegion, OptionsConnector

T = TypeVar("T")
Regions: TypeAlias = MemoryRegion | Sequence[MemoryRegion]
Statuses: TypeAlias = list[Status[Any]]


class NotReady(Exception):
    """The bytes of a region never became what should be put."""


class Call:
    """One batch on its way: what can be done to end it early."""

    def __init__(self) -> None:
        self.cancelled = False
        self._interrupt: Callable[[], None] | None = None

    def on_cancel(self, interrupt: Callable[[], None] | None) -> None:
        """Call *interrupt* when the batch is cancelled; None when there is nothing to interrupt any more."""
        self._interrupt = interrupt
        if self.cancelled and interrupt is not None:
            interrupt()

    def split(self, count: int) -> list[Call]:
        """Parts of the batch that run at the same time and are cancelled with it."""
        parts = [Call() for _ in range(count)]

        def cancel() -> None:
            for part in parts:
                part.cancel()

        self.on_cancel(cancel)
        return parts

    def cancel(self) -> None:
        """End the batch as soon as its client can."""
        self.cancelled = True
        interrupt = self._interrupt
        if interrupt is not None:
            interrupt()


class BlockingConnector(OptionsConnector):
    """Subclasses write ``connect``, ``disconnect``, and four blocking methods over batches.

    Single calls are batches of one.  The methods return one status for each key; what they raise becomes the status of
    the whole batch.
    """

    batched_lookups = True

    def __init__(self, conn_id: str, executor: Executor, options: Any) -> None:
        self.conn_id = conn_id
        self.executor = executor
        self.options = options
        self._open = False

    @classmethod
    def from_options(cls, conn_id: str, executor: Executor, options: Any) -> BlockingConnector:
        return cls(conn_id, executor, options)

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature(mput_mget=True)

    # -- what subclasses write ----------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> None:
        """Get ready.  Raises what :meth:`status_of` knows, ConfigError, MissingDependencyError."""

    @abstractmethod
    def disconnect(self) -> None:
        """Let go of everything; called once after each :meth:`connect` that succeeded."""

    @abstractmethod
    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        """OK or NOT_FOUND for each key."""

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        """Fill each region with the value of its key.  Not asked where ``mget`` is written instead."""
        raise NotImplementedError

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        """Store the bytes of each region under its key.  Not asked where ``mput`` is written instead."""
        raise NotImplementedError

    @abstractmethod
    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        """Remove the keys; an absent one is OK."""

    def memory_mapped(self, address: int, length: int) -> None:
        """In a helper process: regions will lie in the *length* bytes at *address*."""

    def status_of(self, error: Exception) -> Status[Any]:
        """What an exception of the client means."""
        return status_of(error)

    # -- the interface ------------------------------------------------------------------------------------------------

    def open(self) -> Status[Any]:
        try:
            if not self._open:
                self.connect()
        except KVCacheError:
            raise
        except Exception as error:
            return self.status_of(error)
        self._open = True
        return Status()

    def close(self) -> Status[Any]:
        was_open, self._open = self._open, False
        if was_open:
            self.disconnect()
        return Status()

    async def exists(self, key: bytes) -> Status[Any]:
        return (await self.mexists([key]))[0]

    async def get(self, key: bytes, mr: Regions) -> Status[Any]:
        return (await self.mget([key], [mr]))[0]

    async def put(self, key: bytes, mr: Regions) -> Status[Any]:
        return (await self.mput([key], [mr]))[0]

    async def delete(self, key: bytes) -> Status[Any]:
        return (await self.mdelete([key]))[0]

    async def mexists(self, keys: Sequence[bytes]) -> Statuses:
        """:meth:`exists` of a batch; beyond the documentation."""
        return await self._run(self.exists_all, keys)

    async def mdelete(self, keys: Sequence[bytes]) -> Statuses:
        """:meth:`delete` of a batch; beyond the documentation."""
        return await self._run(self.delete_all, keys)

    async def mget(self, keys: Sequence[bytes], mrs: Sequence[Regions]) -> Statuses:
        return await self._run(self.get_all, keys, single_regions(mrs))

    async def mput(self, keys: Sequence[bytes], mrs: Sequence[Regions]) -> Statuses:
        return await self._run(self.put_all, keys, single_regions(mrs))

    def get_batches(
        self, keys: Sequence[Any], mrs: Sequence[Regions], batch_size: int
    ) -> Sequence[Sequence[tuple[bytes, Regions]]]:
        pairs = list(zip(keys, mrs, strict=True))
        return [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]

    async def _run(self, work: Callable[..., Statuses], keys: Sequence[bytes], *rest: Any) -> Statuses:
        if not self._open:
            return [Status(StatusCodes.ERROR, f"{self.name} is not open")] * len(keys)
        if not keys:
            return []
        try:
            return await self.on_thread(work, keys, *rest)
        except Exception as error:
            return [self.status_of(error)] * len(keys)

    async def on_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """``work(call, *arguments)`` on a thread; ends when the thread has ended with it."""
        call = Call()
        future = asyncio.get_running_loop().run_in_executor(self.executor, work, call, *arguments)
        return await until_done(future, call.cancel)


async def until_done(future: asyncio.Future[T], cancel: Callable[[], None]) -> T:
    """The result of *future*; a cancelled caller asks it to end by *cancel*, and waits until it has."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancel()
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:  # asked again: the answer is the same
                continue
        future.cancelled() or future.exception()  # taken, so that nobody warns of it
        raise


def ready_view(mr: MemoryRegion) -> memoryview:
    """The bytes to put, once they are ready; NotReady where they never will be."""
    if not mr.wait_ready():
        raise NotReady("the value was not prepared in time")
    return mr.view


def single_regions(mrs: Sequence[Regions]) -> list[MemoryRegion]:
    """The regions, one for each value; lists of them belong to connectors with the GDR features."""
    singles = []
    for mr in mrs:
        assert isinstance(mr, MemoryRegion), "this connector takes one region for a value"
        singles.append(mr)
    return singles


def sdk(module: str, connector: str, install: str) -> Any:
    """A vendor's package; MissingDependencyError where it, or a library that it needs, is not there."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        why = "" if isinstance(error, ModuleNotFoundError) and error.name == package else f", which fails with: {error}"
        raise MissingDependencyError(
            f"the {connector} connector needs the package {package!r}{why}; install it with: {install}"
        ) from error


def text_key(key: bytes) -> str:
    """A key as text, one to one: letters, digits and ``/_.-~`` as they are, other bytes as %XX."""
    return quote_from_bytes(key, safe="/")


def found(there: bool) -> Status[Any]:
    """What a look-up says."""
    return Status() if there else Status(StatusCodes.NOT_FOUND)


def wrong_length(key: bytes, length: int, expected: int) -> Status[Any]:
    """A value that does not have the length of its region."""
    return Status(StatusCodes.INVALID, f"the value of {text_key(key)} has {length} bytes, the region {expected}")


def status_of(error: BaseException) -> Status[Any]:
    """The status that an operating system's or a client's exception stands for; the exception is its value."""
    if isinstance(error, (TimeoutError, NotReady)):
        return Status(StatusCodes.TIMEOUT, error)
    if isinstance(error, PermissionError):
        return Status(StatusCodes.DENIED, error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return Status(StatusCodes.OUT_OF_MEMORY, error)
    return Status(StatusCodes.ERROR, error)


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
