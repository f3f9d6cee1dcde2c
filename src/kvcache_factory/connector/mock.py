"""MOCK: values in this process's memory, with any feature switched on, for tests and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, ClassVar

from ..status import Status, StatusCodes
from .base import ConnectorFeature, ConnectorOptions, MemoryRegion, OptionsConnector

if TYPE_CHECKING:
    import torch

Regions = MemoryRegion | Sequence[MemoryRegion]
_shared: dict[str, dict[bytes, bytes]] = {}
_lock = threading.Lock()


class MockOptions(ConnectorOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of MOCK."""

    env_prefix: ClassVar[str] = "MOCK_"

    use_rdma: bool = False
    """Demand that regions lie in registered memory."""
    use_mput_mget: bool = False
    """Offer calls for a batch."""
    use_noop: bool = False
    """Every get misses, every put is accepted and forgotten."""
    use_gdr_put: bool = False
    """Take device memory in puts, as a sequence of regions."""
    use_gdr_get: bool = False
    """Take device memory in gets, as a sequence of regions."""
    share: str = ""
    """Connectors of this process that give the same word see the same values; none: a store of its own."""


class MockConnector(OptionsConnector):
    """Values in a dict.  What is shared by a word outlives :meth:`close`; see :func:`forget`."""

    Options: ClassVar[type[ConnectorOptions]] = MockOptions
    shorter_values = True

    def __init__(self, options: MockOptions | None = None) -> None:
        self.options = options or MockOptions()
        self._values: dict[bytes, bytes] | None = None
        self._registered: list[tuple[int, int]] = []

    @classmethod
    def from_options(cls, conn_id: str, executor: Executor, options: MockOptions) -> MockConnector:
        return cls(options)

    @property
    def name(self) -> str:
        return "mock"

    @property
    def feature(self) -> ConnectorFeature:
        o = self.options
        return ConnectorFeature(
            mput_mget=o.use_mput_mget, rdma=o.use_rdma, gdr_put=o.use_gdr_put, gdr_get=o.use_gdr_get
        )

    def open(self) -> Status[Any]:
        if self._values is None:
            with _lock:
                self._values = _shared.setdefault(self.options.share, {}) if self.options.share else {}
        return Status.ok()

    def close(self) -> Status[Any]:
        self._values = None
        self._registered = []
        return Status.ok()

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        if not self.options.use_rdma:
            raise NotImplementedError
        self._registered += [(slab.data_ptr(), slab.data_ptr() + slab.nbytes) for slab in slabs]
        return Status.ok()

    async def exists(self, key: bytes) -> Status[Any]:
        return self._find(key)[0]

    async def get(self, key: bytes, mr: Regions) -> Status[Any]:
        regions, refused = self._regions(mr, self.options.use_gdr_get)
        if refused is not None:
            return refused
        status, value = self._find(key)
        if value is None:
            return status
        if len(regions) == 1 and regions[0].is_host and regions[0].takes(len(value)):
            regions[0].shortened(len(value)).fill(value)
            return Status.ok()
        if len(value) != sum(region.length for region in regions):
            return Status(StatusCodes.INVALID, f"the value has {len(value)} bytes")
        start = 0
        for region in regions:
            region.fill(value[start : start + region.length])
            start += region.length
        return Status.ok()

    async def put(self, key: bytes, mr: Regions) -> Status[Any]:
        regions, refused = self._regions(mr, self.options.use_gdr_put)
        if refused is not None:
            return refused
        if self._values is None:
            return _CLOSED
        if not self.options.use_noop:
            self._values[key] = b"".join(region.tobytes() for region in regions)
        return Status.ok()

    async def delete(self, key: bytes) -> Status[Any]:
        if self._values is None:
            return _CLOSED
        self._values.pop(key, None)
        return Status.ok()

    def get_batches(
        self, keys: Sequence[Any], mrs: Sequence[Regions], batch_size: int
    ) -> Sequence[Sequence[tuple[bytes, Regions]]]:
        if not self.options.use_mput_mget:
            raise NotImplementedError
        pairs = list(zip(keys, mrs, strict=True))
        return [pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)]

    async def mget(self, keys: Sequence[bytes], mrs: Sequence[Regions]) -> Sequence[Status[Any]]:
        if not self.options.use_mput_mget:
            raise NotImplementedError
        return [await self.get(key, mr) for key, mr in zip(keys, mrs, strict=True)]

    async def mput(self, keys: Sequence[bytes], mrs: Sequence[Regions]) -> Sequence[Status[Any]]:
        if not self.options.use_mput_mget:
            raise NotImplementedError
        return [await self.put(key, mr) for key, mr in zip(keys, mrs, strict=True)]

    def _find(self, key: bytes) -> tuple[Status[Any], bytes | None]:
        if self._values is None:
            return _CLOSED, None
        value = self._values.get(key)
        return (Status.ok(), value) if value is not None else (Status(StatusCodes.NOT_FOUND), None)

    def _regions(self, mr: Regions, gdr: bool) -> tuple[Sequence[MemoryRegion], Status[Any] | None]:
        """The regions of one value, and why they are refused, if they are."""
        if isinstance(mr, MemoryRegion):
            regions: Sequence[MemoryRegion] = (mr,)
        elif gdr:
            regions = mr
        else:
            return (), Status(StatusCodes.INVALID, "a sequence of regions needs the GDR feature")
        if not gdr and not all(region.is_host for region in regions):
            return (), Status(StatusCodes.INVALID, "device memory needs the GDR feature")
        if self.options.use_rdma and not all(self._is_registered(region) for region in regions):
            return (), Status(StatusCodes.INVALID, "the region is not in registered memory")
        return regions, None

    def _is_registered(self, region: MemoryRegion) -> bool:
        start, end = region.data_ptr(), region.data_ptr() + region.length
        return any(low <= start and end <= high for low, high in self._registered)


def forget(share: str) -> None:
    """Drop the values that connectors share by this word, also from those that are open."""
    with _lock:
        _shared.pop(share, {}).clear()


_CLOSED: Status[Any] = Status(StatusCodes.ERROR, "the connector is not open")
