"""PRISKV: a PrisKV cluster, by way of the Redis server that holds its membership.

Its client freezes the whole process when a server is gone, and crashes it when the password is wrong: it lives in a
helper process.  With ``use_zero_copy`` values lie in memory that the client lends, which no other process can see: that
way, which no public version of the package has, runs in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ..status import Status, StatusCodes
from .base import ConnectorFeature, ConnectorOptions, MemoryRegion, OptionsConnector, Secret
from .blocking import BlockingConnector, Call, Statuses, found, sdk, text_key
from .helper import HelperConnector, HelperOptions
from .registered import Registered, memory_at

if TYPE_CHECKING:
    import torch

_NO_SUCH_KEY = 0x106
_OK = 0


class PrisKVOptions(HelperOptions, frozen=True, kw_only=True):
    """Where the cluster is.

    Attributes:
        remote_addr, remote_port, password: the Redis server with the membership; it must have a password.
        use_mput_mget: hand whole batches to the client.
        use_zero_copy: use memory that the client lends.
    """

    env_prefix: ClassVar[str] = "PRISKV_"
    env_older: ClassVar[tuple[str, ...]] = ("PRIS_",)

    remote_addr: str = "127.0.0.1"
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 6379
    password: Secret = ""
    use_mput_mget: bool = False
    use_zero_copy: bool = False


class PrisKVConnector(OptionsConnector):
    """Chooses by ``use_zero_copy``: :class:`PrisKVHelper` or :class:`PrisKVLending`."""

    Options: ClassVar[type[ConnectorOptions]] = PrisKVOptions

    @classmethod
    def from_options(cls, conn_id: str, executor: Executor, options: Any) -> OptionsConnector:
        return (PrisKVLending if options.use_zero_copy else PrisKVHelper)(conn_id, executor, options)


class PrisKVHelper(HelperConnector):
    """PrisKV in a helper process."""

    Options: ClassVar[type[ConnectorOptions]] = PrisKVOptions
    client = f"{__name__}:PrisKVClient"

    @property
    def name(self) -> str:
        return f"PRISKV {self.options.remote_addr}:{self.options.remote_port}"


class PrisKVClient(BlockingConnector):
    """The package's client, one call after the other."""

    Options: ClassVar[type[ConnectorOptions]] = PrisKVOptions

    def __init__(self, conn_id: str, executor: Executor, options: PrisKVOptions) -> None:
        super().__init__(conn_id, executor, options)
        self._client: Any = None
        self._sdk: Any = None
        self._registered = Registered()

    @property
    def name(self) -> str:
        return "priskv"

    def connect(self) -> None:
        self._sdk = sdk("priskv", "PRISKV", "pip install priskv  (a wheel built from the project's sources)")
        options = self.options
        self._client = self._sdk.PriskvClient(options.remote_addr, options.remote_port, options.password)

    def disconnect(self) -> None:
        self._registered.forget(self._client.dereg_memory)
        self._client.close()

    def memory_mapped(self, address: int, length: int) -> None:
        handle = self._client.reg_memory(address, length)
        if not handle:
            raise MemoryError(f"priskv refused to register {length} bytes")
        self._registered.add(address, length, handle)

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        if self.options.use_mput_mget:
            return [found(code == _OK) for code in self._client.mexists([text_key(key) for key in keys])[1]]
        return [found(self._client.exists(text_key(key)) == _OK) for key in keys]

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        names, lists, lengths = [text_key(key) for key in keys], self._lists(mrs), [mr.length for mr in mrs]
        if self.options.use_mput_mget:
            return [_status(code) for code in self._client.mget(names, lists, lengths)[1]]
        return [_status(self._client.get(*each)) for each in zip(names, lists, lengths, strict=True)]

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        names, lists = [text_key(key) for key in keys], self._lists(mrs)
        if self.options.use_mput_mget:
            return [_status(code) for code in self._client.mset(names, lists)[1]]
        return [_status(self._client.set(*each)) for each in zip(names, lists, strict=True)]

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        codes = [self._client.delete(text_key(key)) for key in keys]
        return [Status() if code == _NO_SUCH_KEY else _status(code) for code in codes]

    def _lists(self, mrs: Sequence[MemoryRegion]) -> list[Any]:
        return [self._sdk.SGL(mr.data_ptr(), mr.length, self._registered.handle_of(mr)) for mr in mrs]


class PrisKVLending(PrisKVClient):
    """PrisKV with the ``zero_copy`` feature, in this process."""

    def __init__(self, conn_id: str, executor: Executor, options: PrisKVOptions) -> None:
        super().__init__(conn_id, executor, options)
        self._lent: dict[tuple[str, bytes], list[Any]] = {}
        self._lock = Lock()

    @property
    def name(self) -> str:
        return f"PRISKV {self.options.remote_addr}:{self.options.remote_port}, zero copy"

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature(mput_mget=True, rdma=True, zero_copy=True)

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        for slab in slabs:
            self.memory_mapped(int(slab.data_ptr()), int(slab.numel() * slab.element_size()))
        return Status()

    async def acquire(self, keys: Sequence[bytes]) -> Sequence[Status[MemoryRegion]]:
        return await self._run(self._borrow, keys, "read", lambda name: self._client.acquire(name))

    async def alloc(self, keys: Sequence[bytes], length: int) -> Sequence[Status[MemoryRegion]]:
        return await self._run(self._borrow, keys, "write", lambda name: self._client.alloc(name, length))

    async def seal(self, keys: Sequence[bytes]) -> Sequence[Status[Any]]:
        return await self._run(self._give_back, keys, "write", lambda name, lent: self._client.seal(name, lent))

    async def drop(self, keys: Sequence[bytes]) -> None:
        await self._run(self._give_back, keys, "write", lambda name, lent: self._client.drop(name, lent))

    async def release(self, keys: Sequence[bytes]) -> None:
        await self._run(self._give_back, keys, "read", lambda name, lent: self._client.release(name, lent))

    def _borrow(self, call: Call, keys: Sequence[bytes], use: str, ask: Callable[[str], Any]) -> Statuses:
        statuses: Statuses = []
        for key in keys:
            code, lent = ask(text_key(key))
            if int(code) == _OK:
                with self._lock:
                    self._lent.setdefault((use, key), []).append(lent)
                statuses.append(Status.ok(MemoryRegion(memory_at(lent.addr, lent.length))))
            else:
                statuses.append(_status(int(code)))
        return statuses

    def _give_back(self, call: Call, keys: Sequence[bytes], use: str, give: Callable[[str, Any], Any]) -> Statuses:
        statuses: Statuses = []
        for key in keys:
            with self._lock:
                lent = self._lent.get((use, key), [])
                one = lent.pop() if lent else None
                if not lent:
                    self._lent.pop((use, key), None)
            known = one is not None
            statuses.append(
                _status(int(give(text_key(key), one))) if known else Status(StatusCodes.INVALID, "not lent")
            )
        return statuses


def _status(code: int) -> Status[Any]:
    if code == _OK:
        return Status()
    return (
        Status(StatusCodes.NOT_FOUND) if code == _NO_SUCH_KEY else Status(StatusCodes.ERROR, f"priskv status {code:#x}")
    )
