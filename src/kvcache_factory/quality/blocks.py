"""Codecs over the blocks of a prefix: what comes back, how many bytes there were, and how fast that was."""

from __future__ import annotations

import time

import msgspec
import numpy as np

from ..block.spec import BlockSpec, Layout
from ..codec.base import BlockCodec, Bytes, Encoded
from ..codec.values import from_bf16
from .reader import KV, PrunedKV

EXACT_BLOCKS = 1
"""Blocks at the beginning that stay as they are, as the policy keeps them by default."""
_REPEATS = 3


class Coded(msgspec.Struct, frozen=True):
    """A prefix that has been through a codec; sizes and errors are those of the blocks that the codec was given."""

    kv: KV | PrunedKV
    blocks: int
    kept_raw: int
    bytes_before: int
    bytes_after: int
    max_rel_error: float
    rms_rel_error: float


def blocks_of(kv: KV, spec: BlockSpec) -> list[Bytes]:
    """The whole blocks of a prefix as payloads in order ``LCHND``."""
    n = spec.block_tokens
    count = kv.shape[3] // n
    return [np.ascontiguousarray(kv[:, :, :, i * n : (i + 1) * n]).view(np.uint8).reshape(-1) for i in range(count)]


def through(codec: BlockCodec, kv: KV, spec: BlockSpec) -> Coded:
    """Encode and decode each block of *kv* but the first."""
    out, n = kv.copy(), spec.block_tokens
    payloads = blocks_of(kv, spec)[EXACT_BLOCKS:]
    back = np.empty(spec.payload_bytes, np.uint8)
    after = raw = 0
    worst, square, total = 0.0, 0.0, 0.0
    for number, payload in enumerate(payloads, EXACT_BLOCKS):
        made = codec.encode(payload, Layout.LCHND, number * n)
        if isinstance(made, str):
            raw += 1
            after += len(payload)
            continue
        after += len(made.data) + len(made.params)
        reason = codec.decode(made.data, made.params, Layout.LCHND, back)
        assert reason is None, reason
        worst = max(worst, made.max_rel_error)
        found = back.view(np.uint16).reshape(out[:, :, :, :n].shape)
        here = slice(number * n, (number + 1) * n)
        before = from_bf16(kv[:, :, :, here])
        square += float(np.square(before - from_bf16(found), dtype=np.float64).sum())
        total += float(np.square(before, dtype=np.float64).sum())
        out[:, :, :, here] = found
    rms = (square / total) ** 0.5 if total else 0.0
    return Coded(out, len(payloads), raw, len(payloads) * spec.payload_bytes, after, worst, rms)


def speed(codec: BlockCodec, kv: KV, spec: BlockSpec) -> tuple[float, float]:
    """GB (1e9 bytes of original KV) that a second of CPU time encodes and decodes; the best of three rounds.

    Encoded bytes are let go at once while encoding is timed, as a tier does that has written them: fresh memory for all
    of them together would be timed, too, and can cost more than a codec.
    """
    payloads = list(enumerate(blocks_of(kv, spec)[EXACT_BLOCKS:], EXACT_BLOCKS))
    back = np.empty(spec.payload_bytes, np.uint8)
    made = [codec.encode(payload, Layout.LCHND, number * spec.block_tokens) for number, payload in payloads]
    coded = [one for one in made if isinstance(one, Encoded)]
    times: list[tuple[float, float]] = []
    for _ in range(_REPEATS):
        begun = time.process_time()
        for number, payload in payloads:
            codec.encode(payload, Layout.LCHND, number * spec.block_tokens)
        middle = time.process_time()
        for one in coded:
            codec.decode(one.data, one.params, Layout.LCHND, back)
        times.append((middle - begun, (time.process_time() - middle) / max(len(coded), 1) * len(payloads)))
    size = len(payloads) * spec.payload_bytes / 1e9
    encode, decode = (min(column) for column in zip(*times, strict=True))
    return size / max(encode, 1e-9), size / max(decode, 1e-9)
