"""Values by way of memory that the remote store lends (the ``zero_copy`` feature): one copy, to or from our slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from ..connector.base import Connector, MemoryRegion
from ..status import Status, StatusCodes

Regions = MemoryRegion | Sequence[MemoryRegion]


async def get_lent(
    connector: Connector[bytes, Any], executor: Executor, names: Sequence[bytes], regions: Sequence[Regions]
) -> list[object]:
    """Copy the values of *names* to *regions*; a status for each name."""
    lent = list(await connector.acquire(names))
    held = [name for name, status in zip(names, lent, strict=False) if _is_lent(status)]
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, _copy_out, lent, regions)
    finally:
        await connector.release(held)


async def put_lent(
    connector: Connector[bytes, Any], executor: Executor, names: Sequence[bytes], regions: Sequence[Regions]
) -> list[object]:
    """Copy *regions* to the store's memory and make them the values of *names*; a status for each name."""
    length = sum(region.length for region in _parts(regions[0]))
    lent = list(await connector.alloc(names, length))
    count = next((i for i, status in enumerate(lent) if not _is_lent(status)), min(len(lent), len(names)))
    unused = [name for name, status in zip(names[count:], lent[count:], strict=False) if _is_lent(status)]
    sealed: list[object] = []
    try:
        if count:
            await asyncio.get_running_loop().run_in_executor(executor, _copy_in, lent[:count], regions)
            sealed = list(await connector.seal(names[:count]))
    finally:
        drop = [*([] if sealed else names[:count]), *unused]
        if drop:
            await connector.drop(drop)
    return [*sealed[:count], *([Status(lent[count])] if count < len(lent) else [])]


def _is_lent(status: object) -> bool:
    return isinstance(status, Status) and status.is_ok() and isinstance(status.value, MemoryRegion)


def _parts(regions: Regions) -> Sequence[MemoryRegion]:
    return (regions,) if isinstance(regions, MemoryRegion) else regions


def _copy_out(lent: Sequence[Any], regions: Sequence[Regions]) -> list[object]:
    done: list[object] = []
    for status, region in zip(lent, regions, strict=False):
        if not _is_lent(status):
            done.append(status)
            continue
        parts = _parts(region)
        if status.value.length != sum(part.length for part in parts):
            done.append(Status(StatusCodes.INVALID, f"the value has {status.value.length} bytes"))
            continue
        start = 0
        for part in parts:
            part.fill(status.value.view[start : start + part.length])
            start += part.length
        done.append(Status())
    return done


def _copy_in(lent: Sequence[Any], regions: Sequence[Regions]) -> None:
    for status, region in zip(lent, regions, strict=False):
        start = 0
        for part in _parts(region):
            data = part.view if part.is_host else part.tobytes()
            status.value.view[start : start + part.length] = data
            start += part.length
