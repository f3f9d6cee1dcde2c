"""Batched copies in the memory of one device: the descriptors of ``transfer.copy_batch``, carried out by one kernel.

Not run on a GPU so far: the kernel is checked in Triton's interpreter, and on a device a self-test decides whether it
serves.  Where it does not, torch copies piece by piece.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

_SPAN = 1024  # words that one program copies
_log = logging.getLogger("kvcache_factory.memory")
_lock = threading.Lock()
_serves: dict[str, bool] = {}


def serves(device: str) -> bool:
    """Whether the kernel copies correctly on *device*; found out by the first call, and remembered."""
    with _lock:
        if device not in _serves:
            _serves[device] = device.startswith("cuda") and _passes(device)
        return _serves[device]


def copy_batch(dst: Addresses, src: Addresses, size: Addresses, device: str) -> None:
    """Copy ``size[i]`` bytes from ``src[i]`` to ``dst[i]`` for all i, uint64 [n], in the current stream of *device*.

    Pieces must not overlap.  The memory is the device's own, or host memory that it can address.
    """
    import torch
    import triton.language

    from . import kernels

    if not len(size) or not size.max():
        return
    width = _word(int(np.bitwise_or.reduce(dst | src | size)))
    words = size // np.uint64(width)
    there, here, count = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (dst, src, words))
    grid = (len(size), -(-int(words.max()) // _SPAN))
    kernels.copy_words[grid](there, here, count, WORD=getattr(triton.language, f"int{8 * width}"), SPAN=_SPAN)


def self_test(device: str) -> bool:
    """Copy pieces of odd sizes and alignments on *device*, and compare every byte."""
    import torch

    source = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8, device=device)
    for sizes, gap in (([1, 7, 4096, 0, 30_001, 513], 3), ([8, 64, 65_536, 24], 16), ([2, 4, 6], 2)):
        target = torch.zeros_like(source)
        want = target.clone()
        starts = np.cumsum([0, *(size + gap for size in sizes[:-1])]).astype(np.uint64)
        pieces: list[Any] = [starts + np.uint64(t.data_ptr()) for t in (target, source)]
        copy_batch(pieces[0], pieces[1], np.array(sizes, np.uint64), device)
        for start, size in zip(starts.tolist(), sizes, strict=True):
            want[start : start + size] = source[start : start + size]
        if not torch.equal(target, want):
            return False
    return True


def _passes(device: str) -> bool:
    try:
        good = self_test(device)
    except Exception as error:  # no Triton, or one that does not know this device: torch copies instead
        _log.info("copies on %s go through torch: %s: %s", device, type(error).__name__, error)
        return False
    if not good:
        _log.warning("the copy kernel fails its self-test on %s; copies go through torch", device)
    return good


def _word(alignment: int) -> int:
    """The widest word, in bytes, of which all addresses and sizes are multiples; *alignment*: all of them, or-ed."""
    return next(width for width in (8, 4, 2, 1) if alignment % width == 0)
