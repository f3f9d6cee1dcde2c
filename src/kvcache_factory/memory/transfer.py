"""Batched copies between addresses: one call for a whole batch of (dst, src, size) pieces.

Two paths with the same results.  ``numba`` is a compiled loop with interleaved non-temporal stores (see ``stream.py``);
it serves once the warm-up has compiled it and a self-test has compared its copies.  ``numpy`` is always there.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import jit
from ..errors import ConfigError

Addresses = npt.NDArray[np.uint64]
PATHS = ("numba", "numpy")

_FORCED: list[str] = []
_TINY = 1024  # bytes; for smaller pieces one Python step per piece costs more than staging them all
_LARGE = (
    256 << 10
)  # bytes; longer copies let go of the GIL: what takes 25 µs is over before another thread has woken up
_STAGE = 64 << 10  # bytes; stays in the first two caches


class _Window:
    """Any address range as a numpy array; nothing is read or written until it is sliced."""

    def __init__(self, base: int, length: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "data": (base, False), "shape": (length,)}


def _copy_numpy(dst: Addresses, src: Addresses, size: Addresses) -> None:
    if not len(size):
        return
    low, high, small = (int(x) for x in (min(dst.min(), src.min()), max(dst.max(), src.max()), size.min()))
    large = int(size.max())
    if not large:
        return
    window = np.asarray(_Window(low, high - low + large))
    to, at = ((x - np.uint64(low)).astype(np.int64) for x in (dst, src))
    if small == large < _TINY:
        _copy_as_elements(window, to, at, large)
        return
    # A memoryview slices faster than an array but holds the GIL while it copies.
    view = memoryview(window) if large <= _LARGE else window
    n = size.astype(np.int64)
    columns = (to, to + n, at, at + n)
    for d, d_end, s, s_end in zip(*(c.tolist() for c in columns), strict=True):
        view[d:d_end] = view[s:s_end]


def _copy_as_elements(window: npt.NDArray[np.uint8], to: Any, at: Any, size: int) -> None:
    """Pieces of one tiny size, as elements of an array in which an element begins at every byte."""
    elements = np.ndarray((len(window) - size + 1,), f"V{size}", window, 0, (1,))
    step = _STAGE // size
    for i in range(0, len(to), step):
        elements[to[i : i + step]] = elements[at[i : i + step]]


class _CopyKernel(jit.Kernel):
    """The copy loop: compiled from another module, and in use only after its self-test."""

    def __init__(self) -> None:
        super().__init__("", _copy_numpy, _copy_numpy)
        self.short: Callable[..., Any] | None = None
        """The same loop for short batches: it keeps the GIL."""
        self.reason = "not compiled yet"
        self._lock = threading.Lock()
        self._rejected = False

    def compile(self) -> None:
        """Compile and test; keeps the numpy path where streaming stores are not known to work."""
        with self._lock:
            if self.compiled is not None or self._rejected:
                return
            if platform.machine().lower() not in {"x86_64", "amd64"}:
                self._rejected, self.reason = True, f"no non-temporal stores known for {platform.machine()}"
                return
            from . import stream

            long, short = (jit.compile_loop(stream.SIGNATURE, stream.copy, yields) for yields in (True, False))
            if agrees_with_slices(long) and agrees_with_slices(short):
                self.short, self.compiled, self.reason = short, long, "compiled and tested"
            else:
                self._rejected, self.reason = True, "the compiled loop failed its self-test"


_KERNEL = jit.register(_CopyKernel())


def agrees_with_slices(copy: Callable[[Addresses, Addresses, Addresses], None]) -> bool:
    """Whether *copy* does what slices do, over odd sizes and alignments, and writes nothing beside its pieces."""
    rng = np.random.default_rng(7)
    source = rng.integers(0, 256, 1 << 18, dtype=np.uint8)
    for fixed in (0, 1, 63, 64, 100, 128, 256, 2048, 20000, None):
        for count in (1, 7, 8, 9, 17):
            size = rng.integers(0, 700, count) if fixed is None else np.full(count, fixed)
            to = np.cumsum(size + rng.integers(0, 65, count)) - size
            at = rng.integers(0, len(source) - 20001, count)
            got, want = (np.zeros(int(to[-1] + size[-1]) + 64, np.uint8) for _ in range(2))
            for d, s, n in zip(to.tolist(), at.tolist(), size.tolist(), strict=True):
                want[d : d + n] = source[s : s + n]
            columns = (to + got.ctypes.data, at + source.ctypes.data, size)
            copy(*(np.ascontiguousarray(c, np.uint64) for c in columns))
            if not np.array_equal(got, want):
                return False
    return True


def copy_batch(dst: Addresses, src: Addresses, size: Addresses) -> None:
    """Copy ``size[i]`` bytes from address ``src[i]`` to address ``dst[i]`` for all i.

    All three are uint64 [n], in bytes; any size and alignment.  Pieces must not overlap one another.  The caller keeps
    the memory alive.  The GIL is released while many bytes move.
    """
    dst, src, size = (np.ascontiguousarray(c, np.uint64) for c in (dst, src, size))
    assert dst.shape == src.shape == size.shape == (len(dst),), "dst, src and size must be 1-D, of one length"
    compiled = _KERNEL.compiled
    if compiled is None or (_FORCED and _FORCED[-1] == "numpy"):
        _copy_numpy(dst, src, size)
    elif len(size) and len(size) * int(size[0]) < _LARGE:  # pieces of one batch are about as large as each other
        assert _KERNEL.short is not None
        _KERNEL.short(dst, src, size)
    else:
        compiled(dst, src, size)


def choose() -> str:
    """Compile and test now, unless refused; the name of the path in use afterwards."""
    jit.warm_up()
    return chosen_path()


def chosen_path() -> str:
    """The path that :func:`copy_batch` takes now: ``numba`` or ``numpy``."""
    return _FORCED[-1] if _FORCED else ("numba" if _KERNEL.compiled is not None else "numpy")


def why() -> str:
    """One line: why the chosen path was chosen."""
    return _KERNEL.reason if _KERNEL.compiled is not None or jit.is_warm() else jit.status()


@contextmanager
def force(path: str) -> Iterator[None]:
    """Take one path for the whole process while the context lasts, for tests and benchmarks.

    Raises ConfigError when the path is unknown or not available.
    """
    if path not in PATHS:
        raise ConfigError(f"copy path {path!r} is not one of {', '.join(PATHS)}")
    if path == "numba":
        jit.warm_up()
        if _KERNEL.compiled is None:
            raise ConfigError(f"the numba copy path is not available: {why()}")
    _FORCED.append(path)
    try:
        yield
    finally:
        _FORCED.pop()


def measure(pieces: int = 1024, piece_bytes: int = 32768, rounds: int = 5) -> dict[str, float]:
    """GB/s (1e9 bytes per second of thread CPU time) of each available path beside libc's memcpy of the same pieces.

    The two buffers are faulted in first and the source is read in random order; best of *rounds*.
    """
    source, target = (np.ones((pieces, piece_bytes), np.uint8) for _ in range(2))
    order = np.random.default_rng(0).permutation(pieces).astype(np.uint64)
    step = np.uint64(piece_bytes)
    dst = np.uint64(target.ctypes.data) + np.arange(pieces, dtype=np.uint64) * step
    src = np.uint64(source.ctypes.data) + order * step
    size = np.full(pieces, piece_bytes, np.uint64)
    triples = list(zip(dst.tolist(), src.tolist(), size.tolist(), strict=True))

    def memcpy() -> None:
        for d, s, n in triples:
            ctypes.memmove(d, s, n)

    candidates: dict[str, Callable[[], None]] = {"memcpy": memcpy, "numpy": lambda: _copy_numpy(dst, src, size)}
    compiled = _KERNEL.compiled
    if compiled is not None:
        candidates["numba"] = lambda: compiled(dst, src, size)
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.thread_time_ns()
            run()
            best[name] = min(best[name], float(max(time.thread_time_ns() - start, 1)))
    return {name: pieces * piece_bytes / elapsed for name, elapsed in best.items()}
