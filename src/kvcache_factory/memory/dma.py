"""Batched copies between a CUDA device and pinned host memory: the driver's one call for all pieces of a batch.

``cuMemcpyBatchAsync`` takes the descriptors of ``transfer.copy_batch``.  It came with CUDA 12.8 and is reached by
ctypes, without compiled code of our own.  Not run on a GPU so far: the tests run this over a stand-in for the driver
with the same calling convention, and on a device a self-test decides whether it serves.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeviceError

Addresses = npt.NDArray[np.uint64]

WORTHWHILE = 28 << 10
"""Bytes of a piece from which copy engines outrun a kernel; measured on an H100 for vLLM (its pull request 42212)."""

_VERSION = 12080  # the signature that CUDA 12.8 introduced; later drivers still hand it out under this number
_IN_STREAM, _AT_ANY_TIME = 1, 3  # CUmemcpySrcAccessOrder
_log = logging.getLogger("kvcache_factory.memory")
_lock = threading.RLock()
_serves: dict[str, bool] = {}


class _Location(ctypes.Structure):
    """CUmemLocation: a hint that ordinary pointers do not need."""

    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [("order", ctypes.c_uint), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint)]


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
Call = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER
)
"""(dsts, srcs, sizes, count, attributes, first piece of each, their count, failed piece, stream) -> CUresult."""


def serves(device: str) -> bool:
    """Whether the driver copies batches correctly on *device*; found out by the first call, and remembered."""
    with _lock:
        if device not in _serves:
            _serves[device] = device.startswith("cuda") and _passes(device)
        return _serves[device]


def copy_batch(dst: Addresses, src: Addresses, size: Addresses, device: str, *, stable: bool = False) -> bool:
    """Queue copies of ``size[i]`` bytes from ``src[i]`` to ``dst[i]``, uint64 [n], in the current stream of *device*.

    The stream must not be the default one; pieces must not overlap.  *stable*: nobody writes to the sources until the
    copies have ended, so that they may be read before their turn.  False when the driver refuses: some pieces may have
    been queued, the caller copies all of them in another way, and :func:`serves` says no from then on.
    """
    import torch

    if not len(size):
        return True
    stream = torch.cuda.current_stream(device).cuda_stream
    how = Attributes(order=_AT_ANY_TIME if stable else _IN_STREAM)
    first, failed = _SIZE(0), _SIZE(0)
    columns = [np.ascontiguousarray(column, np.uint64) for column in (dst, src, size)]
    pieces = [column.ctypes.data for column in columns]
    rule = [ctypes.addressof(how), ctypes.addressof(first), 1, ctypes.addressof(failed)]
    status = _entry()(*pieces, len(size), *rule, stream)
    if status:
        _log.warning("CUDA refuses a batch of copies on %s (status %d); from now on they go one by one", device, status)
        with _lock:
            _serves[device] = False
    return not status


def joined(dst: Addresses, src: Addresses, size: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies with neighbours that follow one another on both sides made one, uint64 [m <= n] each."""
    if len(size) < 2:
        return dst, src, size
    follows = (dst[:-1] + size[:-1] == dst[1:]) & (src[:-1] + size[:-1] == src[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return dst[starts], src[starts], np.add.reduceat(size, starts)


def self_test(device: str) -> bool:
    """Copy pieces of odd sizes from pinned memory to *device* and back, and compare every byte."""
    import torch

    from .beside import beside_compute

    source = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8).pin_memory()
    between, back = torch.zeros(1 << 17, dtype=torch.uint8, device=device), torch.zeros_like(source).pin_memory()
    size = np.array([1, 7, 4096, 30_001, 513], np.uint64)
    starts = np.cumsum(size + np.uint64(3)) - size
    here, there, home = (starts + np.uint64(t.data_ptr()) for t in (source, between, back))
    with beside_compute(device):
        queued = copy_batch(there, here, size, device, stable=True) and copy_batch(home, there, size, device)
    want = torch.zeros_like(source)
    for start, length in zip(starts.tolist(), size.tolist(), strict=True):
        want[start : start + length] = source[start : start + length]
    return queued and bool(torch.equal(back, want))


def _passes(device: str) -> bool:
    try:
        good = self_test(device)
    except Exception as error:  # no such driver, or one before 12.8: torch queues the copies one by one
        _log.info("batches on %s are copied one by one: %s: %s", device, type(error).__name__, error)
        return False
    if not good:
        _log.warning("the driver's batched copy fails its self-test on %s; copies go one by one", device)
    return good


@functools.cache
def _entry() -> Any:
    """The driver's function; OSError without a driver, DeviceError where it does not have it."""
    found, status = _POINTER(), ctypes.c_int(0)
    asked = (b"cuMemcpyBatchAsync", ctypes.byref(found), _VERSION, ctypes.c_uint64(0), ctypes.byref(status))
    if _driver().cuGetProcAddress_v2(*asked) or not found.value:
        raise DeviceError("the CUDA driver has no cuMemcpyBatchAsync, which came with 12.8")
    return Call(found.value)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
