"""The compiled copy loop.  Importing this module imports numba: only the warm-up does.

A piece of a few KiB ends before the hardware prefetcher has recognised it, and an ordinary store first reads the line
it is about to overwrite.  So eight pieces advance together, four cache lines each in turn, and whole lines are written
with non-temporal stores.  Bytes before the first and after the last whole line of a piece go through libc's memcpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_ADDRESSES = "Array(uint64, 1, 'C', True)"  # read-only, which takes writable ones too
SIGNATURE = f"void({_ADDRESSES}, {_ADDRESSES}, {_ADDRESSES})"

_WAYS = 8
_ZERO = np.uint64(0)
_LINE = np.uint64(64)
_LINE_2 = np.uint64(128)
_LINE_3 = np.uint64(192)
_STEP = np.uint64(256)
_IN_LINE = np.uint64(63)
_LINES = ~np.uint64(63)
_SPLIT_SHIFT = np.uint64(3)
_SPLIT_FROM = np.uint64(16384)


def _emit_stream_line(_: Any, dst: Any, src: Any) -> Any:
    """64 bytes from any address to a 64-byte aligned one, around the cache."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        value = builder.load(builder.inttoptr(args[1], line))
        value.align = 1
        store = builder.store(value, builder.inttoptr(args[0], line))
        store.align = 64
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), emit


def _emit_memcpy(_: Any, dst: Any, src: Any, size: Any) -> Any:
    """libc's memcpy on addresses."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(byte, [byte, byte, ir.IntType(64)])
        memcpy = cgutils.get_or_insert_function(builder.module, kind, "memcpy")
        builder.call(memcpy, [builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2]])
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), emit


def _emit_fence(_: Any) -> Any:
    """Non-temporal stores become visible to other threads only after a fence."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


_stream_line = intrinsic(_emit_stream_line)
_memcpy = intrinsic(_emit_memcpy)
_fence = intrinsic(_emit_fence)


def copy(dst: Any, src: Any, size: Any) -> None:
    """Copy ``size[i]`` bytes from address ``src[i]`` to ``dst[i]`` for every i; the loop that numba compiles."""
    n = dst.shape[0]
    lane_dst = np.empty(_WAYS, np.uint64)
    lane_src = np.empty(_WAYS, np.uint64)
    k = 0
    while k < n:
        run = _ZERO  # bytes that all lanes copy in lockstep
        taken = 1
        if k + _WAYS <= n:  # eight pieces, as far as the shortest of them goes
            taken = _WAYS
            for w in range(_WAYS):
                head = (_LINE - (dst[k + w] & _IN_LINE)) & _IN_LINE
                middle = _ZERO
                if size[k + w] >= head + _LINE:
                    middle = (size[k + w] - head) & _LINES
                if w == 0 or middle < run:
                    run = middle
            if run != _ZERO:
                for w in range(_WAYS):
                    head = (_LINE - (dst[k + w] & _IN_LINE)) & _IN_LINE
                    lane_dst[w] = dst[k + w] + head
                    lane_src[w] = src[k + w] + head
                    if head != _ZERO:
                        _memcpy(dst[k + w], src[k + w], head)
                    rest = size[k + w] - head - run
                    if rest != _ZERO:
                        _memcpy(lane_dst[w] + run, lane_src[w] + run, rest)
        elif size[k] >= _SPLIT_FROM:  # a large piece without seven companions: eight parts of itself
            head = (_LINE - (dst[k] & _IN_LINE)) & _IN_LINE
            run = ((size[k] - head) >> _SPLIT_SHIFT) & _LINES
            end = head
            for w in range(_WAYS):
                lane_dst[w] = dst[k] + end
                lane_src[w] = src[k] + end
                end += run
            if head != _ZERO:
                _memcpy(dst[k], src[k], head)
            if end != size[k]:
                _memcpy(dst[k] + end, src[k] + end, size[k] - end)
        if run == _ZERO:
            for w in range(taken):
                if size[k + w] != _ZERO:
                    _memcpy(dst[k + w], src[k + w], size[k + w])
        i = _ZERO
        while i + _STEP <= run:
            for w in range(_WAYS):
                d = lane_dst[w] + i
                s = lane_src[w] + i
                _stream_line(d, s)
                _stream_line(d + _LINE, s + _LINE)
                _stream_line(d + _LINE_2, s + _LINE_2)
                _stream_line(d + _LINE_3, s + _LINE_3)
            i += _STEP
        while i < run:
            for w in range(_WAYS):
                _stream_line(lane_dst[w] + i, lane_src[w] + i)
            i += _LINE
        k += taken
    _fence()
