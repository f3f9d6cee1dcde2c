"""Triton kernels.  Importing this needs the package ``triton``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def copy_words(dst, src, size, WORD: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy piece program_id(0): *size* words from one address to another, program_id(1) doing SPAN of them."""
    piece = tl.program_id(0)
    first = tl.program_id(1) * SPAN
    words = tl.load(size + piece)
    if first < words:
        here = tl.load(src + piece).to(tl.pointer_type(WORD))
        there = tl.load(dst + piece).to(tl.pointer_type(WORD))
        at = first + tl.arange(0, SPAN)
        inside = at < words
        tl.store(there + at, tl.load(here + at, mask=inside), mask=inside)
