"""HPKV: a server that is reached over RDMA, with the package ``hpkv`` of its vendor."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ..status import Status, StatusCodes
from .base import ConnectorFeature, ConnectorOptions, MemoryRegion
from .blocking import BlockingConnector, Call, Statuses, found, sdk, text_key
from .registered import Registered

if TYPE_CHECKING:
    import torch

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_INSTALL = "pip install hpkv  (the wheel that comes with the server)"


class HPKVOptions(ConnectorOptions, frozen=True, kw_only=True):
    """Where the server is, and which address of this machine is used.

    Attributes:
        remote_addr, remote_port: the server.
        local_addr, local_port: this side.
        use_gdr: accepted as in AIBrix, where nothing uses it; values of a device tier go through host memory.
    """

    env_prefix: ClassVar[str] = "HPKV_"

    remote_addr: str = "127.0.0.1"
    remote_port: Port = 12346
    local_addr: str = "127.0.0.1"
    local_port: Port = 12345
    use_gdr: bool = True


class HPKVConnector(BlockingConnector):
    """HPKV; memory is registered first.  One call at a time: nothing says that its client takes more."""

    Options: ClassVar[type[ConnectorOptions]] = HPKVOptions

    def __init__(self, conn_id: str, executor: Executor, options: HPKVOptions) -> None:
        super().__init__(conn_id, executor, options)
        self._lock = Lock()
        self._client: Any = None
        self._list: Any = None
        self._registered = Registered()

    @property
    def name(self) -> str:
        return f"HPKV {self.options.remote_addr}:{self.options.remote_port}"

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature(mput_mget=True, rdma=True)

    def connect(self) -> None:
        client = sdk("hpkv.hpkv_client", "HPKV", _INSTALL)
        self._list = sdk("hpkv._hpkv", "HPKV", _INSTALL).SGL
        options = self.options
        self._client = client.HPKVClient(
            raddr=options.remote_addr,
            rport=options.remote_port,
            laddr=options.local_addr,
            lport=options.local_port,
            nqueue=0,
        )

    def disconnect(self) -> None:
        with self._lock:
            self._registered.forget(self._client.dereg_memory)
            self._client.close()

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        for slab in slabs:
            address, length = int(slab.data_ptr()), int(slab.numel() * slab.element_size())
            handle = self._client.reg_memory(address, length)
            if not handle:
                return Status(StatusCodes.INVALID, f"hpkv refused to register {length} bytes")
            self._registered.add(address, length, handle)
        return Status()

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        with self._lock:
            return [found(bool(self._client.test(text_key(key)))) for key in keys]

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        with self._lock:
            return [self._get(text_key(key), mr) for key, mr in zip(keys, mrs, strict=True)]

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        with self._lock:
            codes = [self._client.set(text_key(k), self._sgl(mr)) for k, mr in zip(keys, mrs, strict=True)]
        return [Status() if code == 0 else Status(StatusCodes.ERROR, f"hpkv code {code}") for code in codes]

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        with self._lock:
            for key in keys:
                self._client.delete_keys(text_key(key))
        return [Status() for _ in keys]

    def _get(self, name: str, mr: MemoryRegion) -> Status[Any]:
        code = self._client.get(name, self._sgl(mr), mr.length)
        if code == 0:
            return Status()
        # Its codes say no more than that it failed; a key that is not there is the usual reason.
        return Status(StatusCodes.ERROR, f"hpkv code {code}") if self._client.test(name) else found(False)

    def _sgl(self, mr: MemoryRegion) -> Any:
        return self._list(mr.data_ptr(), mr.length, self._registered.handle_of(mr))
