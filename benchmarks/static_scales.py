"""What scales that are measured once would save, and cost, against scales of each block.

    python benchmarks/static_scales.py [--windows 2] [--tokens 1024]

Reads text with the demo's model (``kvcache-factory[transformers,compression]``), takes the largest magnitude of each
channel of the keys, and the median exponent of each channel of both, from one half of it, and applies them to blocks of
the other half.  Prints a line for each way: original bytes by encoded bytes, and for int8 the share of key elements
that are clipped, the error of the keys (RMS of the difference by RMS of the keys), and the KL divergence of the next
tokens.  What follows from it is in ``docs/design/0009-static-scales.md``.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import zstandard

from kvcache_factory.block.spec import DEFAULT_BLOCK_TOKENS as BLOCK
from kvcache_factory.codec.values import from_bf16, to_bf16
from kvcache_factory.demo.model import load_model
from kvcache_factory.quality.reader import KV, Reader
from kvcache_factory.quality.texts import chapters, windows

FORWARD = 128
MARGINS = (1.0, 1.25)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    asked = parser.parse_args()
    model, tokenizer = load_model("float32")
    reader = Reader(model, BLOCK)
    known = [reader.read(ids) for ids in windows(tokenizer, chapters(1), asked.windows, asked.tokens)]
    (ids,) = windows(tokenizer, chapters(0), 1, asked.tokens + FORWARD)
    kv, onward = reader.read(ids[: asked.tokens]), ids[asked.tokens :]
    most = np.max([np.abs(from_bf16(one[:, 0, :, BLOCK:])).max(axis=2) for one in known], axis=0)
    print(f"{'':34}{'ratio':>8}{'clipped':>10}{'key error':>11}{'KL':>10}")
    wanted = reader.log_probabilities(kv, onward)
    static_ways = [(f"int8, static key scales x {margin}", most * margin) for margin in MARGINS]
    for name, limit in [("int8, scales of each block", None), *static_ways]:
        coded, clipped, error = quantised(kv, limit)
        found = reader.log_probabilities(coded, onward)
        kl = float((wanted.exp() * (wanted - found)).sum(-1).mean())
        print(f"{name:34}{int8_ratio(kv, limit is None):8.3f}{clipped:10.2%}{error:11.4f}{kl:10.1e}")
    exponents = np.concatenate([exponents_of(one[:, :, :, BLOCK:]) for one in known], axis=3)
    static = np.median(exponents, axis=3, keepdims=True).astype(np.uint8)
    for name, centre in (("bf16x, medians of each block", None), ("bf16x, static medians", static)):
        print(f"{name:34}{bf16x_ratio(kv, centre):8.3f}")


def quantised(kv: KV, limit: Any) -> tuple[KV, float, float]:
    """All blocks but the first, eight bits; keys by *limit* ``[layers, heads, head_dim]``, or by what is in each."""
    values = from_bf16(kv)
    out, clipped, square = values.copy(), 0, 0.0
    for first in range(BLOCK, kv.shape[3], BLOCK):
        here = values[:, :, :, first : first + BLOCK]
        keys = np.abs(here[:, 0]).max(axis=2) if limit is None else limit
        tokens = np.abs(here[:, 1]).max(axis=3, keepdims=True)
        scale = np.stack(np.broadcast_arrays(keys[:, :, None, :], tokens), axis=1)
        scale = from_bf16(to_bf16(np.maximum(scale / 127, 1e-30)))
        steps = np.rint(here / scale)
        clipped += int((np.abs(steps[:, 0]) > 127.5).sum())
        made = np.clip(steps, -127, 127) * scale
        square += float(np.square(made[:, 0] - here[:, 0], dtype=np.float64).sum())
        out[:, :, :, first : first + BLOCK] = made
    keys_given = values[:, 0, :, BLOCK:]
    rms = (square / float(np.square(keys_given, dtype=np.float64).sum())) ** 0.5
    return to_bf16(out), clipped / keys_given.size, rms


def int8_ratio(kv: KV, scales: bool) -> float:
    """Of a block of ``BLOCK`` tokens, with or without two bytes for each channel of the keys."""
    layers, _, heads, _, dim = kv.shape
    each = 2 * layers * heads * BLOCK
    return 2 * each * dim / (each * dim + each + (2 * layers * heads * dim if scales else 0))


def exponents_of(kv: KV) -> Any:
    """The eight bits behind the sign of each element."""
    return ((kv >> 7) & 0xFF).astype(np.uint8)


def bf16x_ratio(kv: KV, centre: Any) -> float:
    """Exponents less their channel's centre behind zstd's Huffman coder, the other byte as it is."""
    coder = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17, search_log=1
        )
    )
    before = after = 0
    for first in range(BLOCK, kv.shape[3], BLOCK):
        high = exponents_of(kv[:, :, :, first : first + BLOCK])
        middle = np.median(high, axis=3, keepdims=True).astype(np.uint8) if centre is None else centre
        after += len(coder.compress((high - middle).tobytes())) + high.size
        after += len(coder.compress(middle.tobytes())) if centre is None else 0
        before += 2 * high.size
    return before / after


if __name__ == "__main__":
    main()
