"""INFINISTORE: an InfiniStore server, over TCP in a helper process or over RDMA in this one.

Over TCP its client waits for ever for a key that is not there, and crashes on a connection that is gone: it lives in a
helper process, asks before it reads, and is killed when it hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ..status import Status
from .base import ConnectorOptions, MemoryRegion, OptionsConnector
from .blocking import BlockingConnector, Call, Statuses, found, sdk, text_key, wrong_length
from .helper import HelperConnector, HelperOptions

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class InfiniStoreOptions(HelperOptions, frozen=True, kw_only=True):
    """Where the server is, and how to get there.

    Attributes:
        host_addr, service_port: the server.
        connection_type: ``RDMA`` or ``TCP``.
        ib_port, link_type: port of the RDMA device, and what it is connected to.
        visible_dev_list: RDMA devices to use, each with the index of its GID where that matters, as in
            ``mlx5_0:gid3,mlx5_1:gid3``; by default ``mlx5_1``.
        local_rank: which of the devices this process takes, counted round.
        rdma_addr_range: a CIDR; of a device's GIDs the first one in it is used where no index is given.
        use_gdr: accepted as in AIBrix, where nothing uses it; values of a device tier go through host memory.
    """

    env_prefix: ClassVar[str] = "INFINISTORE_"

    host_addr: str = "127.0.0.1"
    service_port: Port = 12345
    connection_type: Literal["RDMA", "TCP"] = "RDMA"
    ib_port: Annotated[int, msgspec.Meta(ge=1)] = 1
    link_type: Literal["Ethernet", "IB"] = "Ethernet"
    visible_dev_list: str = ""
    local_rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    rdma_addr_range: str = "::/0"
    use_gdr: bool = True


class InfiniStoreConnector(OptionsConnector):
    """Chooses by ``connection_type``: :class:`InfiniStoreTCP` or :class:`~.infinistore_rdma.InfiniStoreRDMA`."""

    Options: ClassVar[type[ConnectorOptions]] = InfiniStoreOptions

    @classmethod
    def from_options(cls, conn_id: str, executor: Executor, options: Any) -> OptionsConnector:
        if options.connection_type == "TCP":
            return InfiniStoreTCP(conn_id, executor, options)
        from .infinistore_rdma import InfiniStoreRDMA

        return InfiniStoreRDMA(conn_id, executor, options)


class InfiniStoreTCP(HelperConnector):
    """InfiniStore over TCP, in a helper process."""

    Options: ClassVar[type[ConnectorOptions]] = InfiniStoreOptions
    client = f"{__name__}:InfiniStoreClient"

    @property
    def name(self) -> str:
        return f"INFINISTORE {self.options.host_addr}:{self.options.service_port} over TCP"


class InfiniStoreClient(BlockingConnector):
    """What the helper process runs: the package's client, one call after the other."""

    Options: ClassVar[type[ConnectorOptions]] = InfiniStoreOptions

    def __init__(self, conn_id: str, executor: Executor, options: InfiniStoreOptions) -> None:
        super().__init__(conn_id, executor, options)
        self._connection: Any = None

    @property
    def name(self) -> str:
        return "infinistore"

    def connect(self) -> None:
        sdk = infinistore_sdk()
        config = sdk.ClientConfig(
            host_addr=self.options.host_addr,
            service_port=self.options.service_port,
            connection_type="TCP",
            log_level="error",
        )
        self._connection = sdk.InfinityConnection(config)
        self._connection.connect()

    def disconnect(self) -> None:
        self._connection.close()

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return [found(self._connection.check_exist(text_key(key))) for key in keys]

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        return [self._get(key, mr) for key, mr in zip(keys, mrs, strict=True)]

    def _get(self, key: bytes, mr: MemoryRegion) -> Status[Any]:
        name = text_key(key)
        if not self._connection.check_exist(name):  # a read of what is not there never returns
            return found(False)
        value = self._connection.tcp_read_cache(name)
        if len(value) != mr.length:
            return wrong_length(key, len(value), mr.length)
        mr.view[:] = value.data
        return Status()

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        for key, mr in zip(keys, mrs, strict=True):
            self._connection.tcp_write_cache(text_key(key), mr.data_ptr(), mr.length)
        return [Status() for _ in keys]

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        self._connection.delete_keys([text_key(key) for key in keys])
        return [Status() for _ in keys]


def infinistore_sdk() -> Any:
    """The package; MissingDependencyError where it, or the system library that it needs, is not there."""
    return sdk("infinistore", "INFINISTORE", "pip install infinistore  (and the system's libibverbs)")
