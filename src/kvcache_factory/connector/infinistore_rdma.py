"""InfiniStore over RDMA: in this process, since the device reads and writes the registered memory itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from ..status import Status, StatusCodes
from .base import ConnectorFeature, ConnectorOptions, MemoryRegion
from .blocking import BlockingConnector, Call, Regions, Statuses, found, single_regions, text_key, until_done
from .infinistore import InfiniStoreOptions, infinistore_sdk
from .rdma import choose_device

if TYPE_CHECKING:
    import torch

_MOST_BYTES_IN_A_BATCH = 4 << 20
"""Larger values are refused in a batch, so each travels alone."""


class InfiniStoreRDMA(BlockingConnector):
    """InfiniStore over RDMA.  Calls that look up and delete go one at a time; transfers run together."""

    Options: ClassVar[type[ConnectorOptions]] = InfiniStoreOptions

    def __init__(self, conn_id: str, executor: Executor, options: InfiniStoreOptions) -> None:
        super().__init__(conn_id, executor, options)
        self._lock = Lock()
        self._sdk: Any = None
        self._connection: Any = None

    @property
    def name(self) -> str:
        return f"INFINISTORE {self.options.host_addr}:{self.options.service_port} over RDMA"

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature(mput_mget=True, rdma=True)

    def connect(self) -> None:
        """Choose the device, and connect.  Raises ConfigError where there is none."""
        sdk, options = infinistore_sdk(), self.options
        device = choose_device(
            options.visible_dev_list, options.local_rank, options.ib_port, options.link_type, options.rdma_addr_range
        )
        config = sdk.ClientConfig(
            host_addr=options.host_addr,
            service_port=options.service_port,
            connection_type="RDMA",
            ib_port=options.ib_port,
            link_type=options.link_type,
            dev_name=device.name,
            log_level="error",
        )
        if device.gid_index is not None and hasattr(config, "hint_gid_index"):  # unknown to the releases up to 0.2.35
            config.hint_gid_index = device.gid_index
        connection = sdk.InfinityConnection(config)
        connection.connect()
        self._sdk, self._connection = sdk, connection

    def disconnect(self) -> None:
        with self._lock:
            self._connection.close()

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        with self._lock:
            for slab in slabs:
                self._connection.register_mr(int(slab.data_ptr()), int(slab.numel() * slab.element_size()))
        return Status()

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        with self._lock:
            return [found(self._connection.check_exist(text_key(key))) for key in keys]

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        with self._lock:
            self._connection.delete_keys([text_key(key) for key in keys])
        return [Status() for _ in keys]

    def get_batches(
        self, keys: Sequence[Any], mrs: Sequence[Regions], batch_size: int
    ) -> Sequence[Sequence[tuple[bytes, Regions]]]:
        """Batches of values of one size in one slab, in order; a value that is too large for a batch travels alone."""
        batches: list[list[tuple[bytes, Regions]]] = []
        last: tuple[int, int] | None = None
        for key, mr in zip(keys, single_regions(mrs), strict=True):
            kind = (_base(mr), mr.length)
            if kind != last or len(batches[-1]) == batch_size or mr.length > _MOST_BYTES_IN_A_BATCH:
                batches.append([])
            batches[-1].append((key, mr))
            last = kind
        return batches

    async def mget(self, keys: Sequence[bytes], mrs: Sequence[Regions]) -> Statuses:
        return await self._transfer(keys, mrs, lambda *batch: self._connection.rdma_read_cache_async(*batch))

    async def mput(self, keys: Sequence[bytes], mrs: Sequence[Regions]) -> Statuses:
        return await self._transfer(keys, mrs, lambda *batch: self._connection.rdma_write_cache_async(*batch))

    async def _transfer(
        self, keys: Sequence[bytes], mrs: Sequence[Regions], start: Callable[..., Awaitable[Any]]
    ) -> Statuses:
        statuses: Statuses = []
        for batch in self.get_batches(keys, mrs, len(keys)):
            statuses += await self._transfer_batch(batch, start)
        return statuses

    async def _transfer_batch(
        self, batch: Sequence[tuple[bytes, Any]], start: Callable[..., Awaitable[Any]]
    ) -> Statuses:
        if not self._open:
            return [Status(StatusCodes.ERROR, f"{self.name} is not open")] * len(batch)
        base, length = _base(batch[0][1]), batch[0][1].length
        blocks = [(text_key(key), mr.data_ptr() - base) for key, mr in batch]
        try:
            # A transfer cannot be called back: the device owns the memory until it is done.
            await until_done(asyncio.ensure_future(start(blocks, length, base)), lambda: None)
        except self._sdk.InfiniStoreKeyNotFound:
            if len(batch) == 1:
                return [found(False)]
            singles: Statuses = []
            for pair in batch:  # which of them is missing is not said
                singles += await self._transfer_batch([pair], start)
            return singles
        except Exception as error:
            return [self.status_of(error)] * len(batch)
        return [Status() for _ in batch]


def _base(mr: MemoryRegion) -> int:
    """Address of the slab around a region: what offsets count from."""
    return mr.data_ptr() - mr.addr
