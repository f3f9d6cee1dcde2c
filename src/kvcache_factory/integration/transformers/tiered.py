"""A live cache that compresses itself: what lies behind the end is encoded, the end and the beginning stay exact.

The same policy and codecs as for stored blocks, on the tensors of one sequence.  Every step decodes what is encoded,
into memory that all layers share: less memory for more time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from ...block.spec import BlockSpec, KVDtype, Layout
from ...codec.base import BlockCodec
from ...codec.names import make_codec
from ...errors import ConfigError
from ...policy.compression import CompressionPolicy

BLOCK_TOKENS = 64
_CALIBRATED = ("pca", "low_rank")


class _Piece(NamedTuple):
    """One block of one row: encoded, or as it is where the codec refused it."""

    data: Any
    params: bytes
    encoded: bool


class _Scratch:
    """Keys and values of one layer at a time, decoded: the layers of a cache take turns."""

    def __init__(self) -> None:
        self._pair: list[torch.Tensor] = []

    def room(self, like: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """Two tensors ``[B, H, tokens, D]`` of what *like* is made of; what they held is anybody's."""
        batch, heads, _, dim = like.shape
        if not self._pair or self._pair[0].shape[:2] != (batch, heads) or self._pair[0].shape[2] < tokens:
            shape = (batch, heads, tokens + tokens // 8 + BLOCK_TOKENS, dim)
            self._pair = [torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2)]
        return [tensor[:, :, :tokens] for tensor in self._pair]


class TieredCacheLayer(DynamicLayer):  # type: ignore[misc]
    """A layer in three parts: its first blocks exact, encoded blocks, and an exact tail (its ``keys`` and ``values``).

    A block of 64 tokens is encoded when as many tokens follow it as the policy says.  What a codec refuses (NaN, or an
    error above its bound) stays as it is.  It can be cropped inside the tail.  Calibrated codecs need all layers at
    once, and are refused with ConfigError; the age and hits that a policy may ask for have no meaning here.
    """

    is_croppable = True
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, policy: CompressionPolicy, scratch: _Scratch | None = None) -> None:
        super().__init__()
        if policy.method in _CALIBRATED:
            raise ConfigError(f"TieredCacheLayer: {policy.method} works on all layers at once; use int8, int4g or rot4")
        self.policy = policy
        self._scratch = scratch or _Scratch()
        self._codec: BlockCodec | None = None
        self._spec: BlockSpec | None = None
        self._forget()

    def _forget(self) -> None:
        self._head: list[torch.Tensor] = []
        self._blocks: list[list[_Piece]] = []  # blocks, rows

    @property
    def tail_tokens(self) -> int:
        """Tokens at the end that are exact, and that :meth:`crop` may take."""
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys.numel() else 0

    @property
    def encoded_tokens(self) -> int:
        """Tokens between the exact beginning and the tail."""
        return len(self._blocks) * BLOCK_TOKENS

    @property
    def bytes_held(self) -> int:
        """Bytes of all parts, without the memory to decode into."""
        exact = [self.keys, self.values, *self._head] if self.is_initialized else []
        pieces = [piece for block in self._blocks for piece in block]
        return sum(tensor.nbytes for tensor in exact) + sum(len(piece.data) + len(piece.params) for piece in pieces)

    def get_seq_length(self) -> int:
        return self._head_tokens + self.encoded_tokens + self.tail_tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append; returns all keys and values, of which only what was encoded in earlier steps is not exact."""
        super().update(key_states, value_states, *args, **kwargs)
        whole = self.whole()
        if self.policy.applies_to("cpu" if key_states.device.type == "cpu" else "gpu"):
            self._encode_what_is_due()
        return whole

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values ``[B, H, tokens, D]``; valid until another layer of the cache decodes."""
        if not self._head and not self._blocks:
            return self.keys, self.values
        keys, values = self._scratch.room(self.keys, self.get_seq_length())
        start = self._head_tokens
        for number, block in enumerate(self._blocks):
            here = slice(start + number * BLOCK_TOKENS, start + (number + 1) * BLOCK_TOKENS)
            for row, piece in enumerate(block):
                keys[row, :, here], values[row, :, here] = self._decode(piece)
        for to, exact, tail in ((keys, self._head[:1], self.keys), (values, self._head[1:], self.values)):
            if exact:
                to[:, :, :start] = exact[0]
            to[:, :, to.shape[2] - tail.shape[2] :] = tail
        return keys, values

    def crop(self, tokens: int) -> None:
        """Take tokens from the end: *tokens* below 0 says how many; with Transformers 4, one above 0 the new length.

        Raises ValueError beyond the exact tail: what is encoded would have to be decoded, and would stay inexact.
        """
        if tokens > 0 and not _CROPS_TO_LENGTH:
            raise ValueError(f"crop({tokens}): give the number of tokens to remove, as a negative number")
        remove = -tokens if tokens <= 0 else max(self.get_seq_length() - tokens, 0)
        if remove > self.tail_tokens:
            raise ValueError(f"crop: {remove} tokens are more than the exact tail has, {self.tail_tokens}")
        if remove:
            self.keys, self.values = self.keys[..., :-remove, :], self.values[..., :-remove, :]

    def reset(self) -> None:
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        self._forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows change places while beams are searched."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row *repeats* times."""
        rows = self.keys.shape[0] if self.is_initialized else 0
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows, in this order."""
        if self.get_seq_length():
            indices = indices.to(self.keys.device)
            self.keys, self.values = self.keys[indices], self.values[indices]
            self._head = [tensor[indices] for tensor in self._head]
            order = (indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist()
            self._blocks = [[block[row] for row in order] for block in self._blocks]

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def _head_tokens(self) -> int:
        return int(self._head[0].shape[2]) if self._head else 0

    def _encode_what_is_due(self) -> None:
        behind = max(self.policy.threshold_step, self.policy.keep_recent)
        due = max(self.tail_tokens - behind, 0) // BLOCK_TOKENS
        first = self.policy.keep_first * BLOCK_TOKENS - self._head_tokens if not self._blocks else 0
        exact = min(first // BLOCK_TOKENS, due)
        if not due:
            return
        pair = (self.keys, self.values)
        if exact:
            new = [tensor[:, :, : exact * BLOCK_TOKENS].clone() for tensor in pair]
            self._head = [torch.cat(both, 2) for both in zip(self._head, new, strict=True)] if self._head else new
        for number in range(exact, due):
            here = slice(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            position = self._head_tokens + len(self._blocks) * BLOCK_TOKENS
            rows = range(self.keys.shape[0])
            self._blocks.append(
                [self._encode(self.keys[row, :, here], self.values[row, :, here], position) for row in rows]
            )
        self.keys, self.values = (tensor[:, :, due * BLOCK_TOKENS :].clone() for tensor in pair)

    def _encode(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> _Piece:
        payload = torch.stack((keys, values)).cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
        made = self._opened(keys).encode(payload, Layout.LCHND, position)
        return _Piece(payload, b"", False) if isinstance(made, str) else _Piece(made.data.copy(), made.params, True)

    def _decode(self, piece: _Piece) -> torch.Tensor:
        codec, spec = self._codec, self._spec
        assert codec is not None
        assert spec is not None
        out = np.empty(spec.payload_bytes, np.uint8)
        if piece.encoded:
            reason = codec.decode(piece.data, piece.params, Layout.LCHND, out)
            assert reason is None, reason
        else:
            out[:] = piece.data
        shape = (2, spec.num_kv_heads, BLOCK_TOKENS, spec.head_dim)
        return torch.from_numpy(out).view(self.keys.dtype).view(shape).to(self.keys.device)

    def _opened(self, like: torch.Tensor) -> BlockCodec:
        if self._codec is None:
            heads, _, dim = like.shape
            self._spec = BlockSpec(KVDtype.of(like.dtype), 1, heads, dim, BLOCK_TOKENS)
            self._codec = make_codec(self.policy.method, **self.policy.options)
            self._codec.open(self._spec)
        return self._codec


_CROPS_TO_LENGTH = not hasattr(DynamicLayer, "get_max_length")  # Transformers 4 crops to a length, 5 by a number


class TieredCache(Cache):  # type: ignore[misc]
    """A cache of :class:`TieredCacheLayer`; give it to ``generate``, or have the adapter do so (``compress=``)."""

    def __init__(self, layers: int, policy: CompressionPolicy) -> None:
        scratch = _Scratch()
        super().__init__(layers=[TieredCacheLayer(policy, scratch) for _ in range(layers)])

    @classmethod
    def over(cls, cache: Any, policy: CompressionPolicy) -> TieredCache:
        """The tokens of a plain *cache*, encoded as far as the policy says."""
        made = cls(len(cache.layers), policy)
        for own, layer in zip(made.layers, cache.layers, strict=True):
            if layer.get_seq_length():
                own.update(layer.keys, layer.values)
        return made

    @property
    def bytes_held(self) -> int:
        """Bytes of all layers, without the memory to decode into, which is that of one layer."""
        return sum(layer.bytes_held for layer in self.layers)
