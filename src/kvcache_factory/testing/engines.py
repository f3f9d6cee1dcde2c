"""An engine without a model: tensors whose bytes say which prefix they were computed for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..block.identity import Identity
from ..block.key import KeyChain
from ..block.spec import BlockSpec, KVDtype
from ..memory.region import BlockPositions, PagedRegion, SequenceRegion

Bytes = npt.NDArray[np.uint8]


def tiny_spec(block_tokens: int = 4, dtype: KVDtype = KVDtype.F32, num_layers: int = 2) -> BlockSpec:
    """A geometry whose blocks are a few hundred bytes."""
    return BlockSpec(dtype, num_layers=num_layers, num_kv_heads=3, head_dim=4, block_tokens=block_tokens)


def tiny_identity(spec: BlockSpec, model: str = "fake-model", **more: str) -> Identity:
    """An identity that goes with *spec*."""
    return Identity(model=model, kv_dtype=spec.dtype.value, block_tokens=spec.block_tokens, **more)


class FakeEngine:
    """Engine tensors for one sequence of up to *blocks* blocks.

    The "KV" of a block is a stream of bytes seeded by the tokens up to its end, its media, its identity and a *version*
    that tells apart who computed it; it does not depend on the block's key, so that collisions are seen as well.

    Parameters
    ----------
    spec:
        Geometry.
    blocks:
        Blocks that the tensors have room for.
    kind:
        ``"sequence"``: [batch, heads, tokens, dim] as in Transformers; ``"paged"``: [2, blocks, tokens, heads, dim].
    """

    def __init__(self, spec: BlockSpec, blocks: int = 16, kind: Literal["sequence", "paged"] = "sequence") -> None:
        import torch

        self.spec = spec
        self.kind = kind
        cell = spec.head_dim * spec.dtype.itemsize
        heads, tokens = spec.num_kv_heads, spec.block_tokens
        inner = (1, heads, blocks * tokens, cell) if kind == "sequence" else (blocks, tokens, heads, cell)
        self._raw: Bytes = np.zeros((spec.num_layers, 2, *inner), np.uint8)
        typed = torch.from_numpy(self._raw).view(getattr(torch, spec.dtype.value))
        self.region: SequenceRegion | PagedRegion
        if kind == "sequence":
            self.region = SequenceRegion.from_layers([t[0] for t in typed], [t[1] for t in typed], spec)
        else:
            self.region = PagedRegion.from_tensors(list(typed), spec)

    def positions(self, count: int, first: int = 0) -> BlockPositions:
        """Positions of *count* blocks from number *first* of the sequence on."""
        numbers = np.arange(first, first + count)
        if isinstance(self.region, PagedRegion):
            return self.region.positions(numbers)
        return self.region.positions(np.zeros(count, np.int64), numbers * self.spec.block_tokens)

    def compute(self, chain: KeyChain, version: int = 0) -> BlockPositions:
        """Write the KV of every full block of *chain* to its place; returns the positions."""
        for i, data in enumerate(block_images(chain, self.spec, version)):
            self._block(i)[:] = data
        return self.positions(chain.num_blocks)

    def erase(self) -> None:
        """Forget all KV."""
        self._raw.fill(0)

    def versions(self, chain: KeyChain, count: int, known: Iterable[int] = (0,)) -> list[int | None]:
        """Which of the *known* versions each of the first *count* blocks carries byte for byte; None for none."""
        wanted = {version: block_images(chain, self.spec, version) for version in known}
        return [
            next((v for v, images in wanted.items() if np.array_equal(images[i], self._block(i))), None)
            for i in range(count)
        ]

    def _block(self, i: int) -> Bytes:
        """View [layers, 2, tokens, heads, bytes of a head] of block *i*."""
        if self.kind == "paged":
            return self._raw[:, :, i]
        n = self.spec.block_tokens
        return self._raw[:, :, 0, :, i * n : (i + 1) * n].transpose(0, 1, 3, 2, 4)


def block_images(chain: KeyChain, spec: BlockSpec, version: int = 0) -> list[Bytes]:
    """What each full block of *chain* holds: uint8 [layers, 2, tokens, heads, bytes of a head]."""
    shape = (spec.num_layers, 2, spec.block_tokens, spec.num_kv_heads, spec.head_dim * spec.dtype.itemsize)
    prefix: Any = hashlib.shake_128(chain.identity.digest + version.to_bytes(4, "little"))
    images = []
    for tokens, extras in zip(chain.token_blocks, chain.extras, strict=True):
        prefix.update(tokens.tobytes() + extras.tobytes())
        images.append(np.frombuffer(prefix.digest(spec.payload_bytes), np.uint8).reshape(shape))
    return images
