"""Payloads put into another order, where a packing is involved that no descriptors express."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..block.spec import BlockSpec, Layout

Bytes = npt.NDArray[np.uint8]


def reorder(
    source: Bytes, source_tag: Layout, target: Bytes, target_tag: Layout, spec: BlockSpec, heads: slice = slice(None)
) -> None:
    """Write *source*, a payload in order *source_tag*, to *target* in order *target_tag*, both uint8 [payload_bytes].

    Only *heads* are written: the shard of one rank leaves the others alone.  Elements keep their bits.
    """
    assert source_tag.fits(spec), f"a block of {spec.block_tokens} tokens cannot be in order {source_tag}"
    assert target_tag.fits(spec), f"a block of {spec.block_tokens} tokens cannot be in order {target_tag}"
    sizes = {tag.packed_tokens for tag in (source_tag, target_tag)} - {0}
    if len(sizes) > 1:  # two packings share no axes: by way of an order that shares some with both
        between = np.empty(spec.payload_bytes, np.uint8)
        reorder(source, source_tag, between, Layout.LCHND, spec, heads)
        reorder(between, Layout.LCHND, target, target_tag, spec, heads)
        return
    tokens = next(iter(sizes), spec.block_tokens)
    into = _planes(target, target_tag, spec, tokens)
    for there, here in zip(into, _planes(source, source_tag, spec, tokens), strict=True):
        there[:, :, heads] = here[:, :, heads]


def _planes(payload: Bytes, tag: Layout, spec: BlockSpec, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Keys and values of a payload as views [layers, parts of n tokens, heads, n, head_dim]."""
    layers, heads, dim = spec.num_layers, spec.num_kv_heads, spec.head_dim
    cells = payload[: spec.payload_bytes].view(f"u{spec.dtype.itemsize}")
    if tag.packed_tokens:
        halves = cells.reshape(layers, -1, heads, 2, n * dim)
        keys = halves[..., 0, :].reshape(layers, -1, heads, dim, n).swapaxes(3, 4)
        return keys, halves[..., 1, :].reshape(layers, -1, heads, n, dim)
    if tag == Layout.LCND:
        both = cells.reshape(layers, 2, -1, n, heads, dim).transpose(1, 0, 2, 4, 3, 5)
    else:
        both = cells.reshape(layers, 2, heads, -1, n, dim).transpose(1, 0, 3, 2, 4, 5)
    return both[0], both[1]
