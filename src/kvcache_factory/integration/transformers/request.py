"""One request: look its rows up, load what is there into a fresh cache, and save what the engine added to it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ...block.key import KeyChain
from ...block.plan import Match
from ...keyspace import MAX_WAIT_S
from ...memory.region import SequenceRegion
from ...policy.importance import attention
from ..base import Rate
from .attention import attention_mass
from .calls import Call
from .layout import fill, new_cache

if TYPE_CHECKING:
    from ...keyspace import KeySpace


@dataclass(slots=True)
class Row:
    """One row of the batch: its keys, what was found, and how much of that is in the cache."""

    pad: int
    chain: KeyChain
    match: Match
    stored: int = 0  # leading blocks known to be stored


@dataclass(slots=True)
class Request:
    """A call of ``generate`` with the cache object that serves it.

    Rows share one length of cached prefix, because a Transformers cache has one length: with left padding of ``pad``
    tokens and ``n`` tokens found, a row can fill ``pad + n`` positions, and the smallest of these counts.
    """

    model: Any
    space: KeySpace
    call: Call
    name: str
    device: torch.device
    prefill: Rate  # how fast the model computes a prompt
    chain: KeyChain | None = None  # keys of row 0 that a conversation keeps
    reuse_hint: Any = "unknown"
    cache: Any = None
    computed: int = 1  # last tokens of each row that the engine computes whatever is stored
    prefix: int = 0  # positions of the cache that are filled before the engine starts
    rows: list[Row] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(row.chain.num_tokens for row in self.rows)

    @property
    def reused_tokens(self) -> int:
        """Tokens of all rows that the engine does not compute."""
        return sum(max(self.prefix - row.pad, 0) for row in self.rows)

    @property
    def hits(self) -> int:
        """Rows that found something they could use."""
        return sum(self.prefix > row.pad for row in self.rows)

    def open(self) -> None:
        """Look every row up and load; afterwards ``cache`` is ready for the engine, empty at worst."""
        given = zip(self.call.ids, self.call.pads, strict=True)
        chains = [self._chain(i, ids[pad:]) for i, (ids, pad) in enumerate(given)]
        if self.call.may_load:
            self._ask_remotely(chains)
        self.rows = [self._look_up(i, chain, self.call.pads[i]) for i, chain in enumerate(chains)]
        self.cache = new_cache(self.model)
        if self.call.may_load:
            wanted = min(row.pad + row.match.tokens for row in self.rows)
            if any(wanted > row.pad for row in self.rows):
                self._load(wanted)

    def save(self, sequences: npt.NDArray[np.int64], output_tokens: int = 0, attentions: Any = None) -> int:
        """Store what the cache holds of *sequences* [batch × expand, length]; returns how many blocks were new.

        *attentions*, where the caller of ``generate`` asked for them, say how important the blocks are.
        """
        layers = self.cache.layers
        length = int(layers[0].keys.shape[2])
        if length < self.space.block_tokens:
            return 0
        region = SequenceRegion.from_layers([x.keys for x in layers], [x.values for x in layers], self.space.spec)
        saved = 0
        for i in self._saved_rows(int(layers[0].keys.shape[0])):
            row = self.rows[i // self.call.expand]
            row.chain.sync(self._held_tokens(i, row, sequences, length))
            starts = np.arange(row.stored, row.chain.num_blocks) * self.space.block_tokens + row.pad
            if len(starts):
                positions = region.positions(i, starts)
                saved += self.space.save(
                    row.chain,
                    region,
                    positions,
                    first=row.stored,
                    reuse_hint=self.reuse_hint,
                    output_tokens=output_tokens,
                    importance=self._importance(attentions, i, row.pad),
                )
        return saved

    def watching(self) -> AbstractContextManager[None]:
        """What has to be in place while the engine runs."""
        return nullcontext()

    def report(self) -> dict[str, Any]:
        """What became of the request, for whoever asked for something special."""
        return {"reused_tokens": self.reused_tokens}

    def _importance(self, attentions: Any, i: int, pad: int) -> Any:
        if not attentions or self.call.beams:  # beams change places from step to step
            return None
        mass = attention_mass(attentions, i)
        return None if mass is None else attention(mass[pad:], self.space.block_tokens)

    def close(self, output_tokens: int = 0) -> None:
        """Give every lease back; idempotent."""
        for row in self.rows:
            self.space.release(row.match.request_id, output_tokens)

    def _chain(self, i: int, tokens: npt.NDArray[np.int64]) -> KeyChain:
        chain = self.chain if i == 0 and self.chain is not None else self.space.chain()
        chain.sync(tokens)
        return chain

    def _ask_remotely(self, chains: list[KeyChain]) -> None:
        """Wait for what a remote level may have, but never longer than computing it would take."""
        if self.space.asks_remotely:
            missing = sum(chain.num_blocks - self.space.peek(chain) for chain in chains)
            self.space.ask_remotely(chains, min(MAX_WAIT_S, self.prefill.seconds(missing * self.space.block_tokens)))

    def _look_up(self, i: int, chain: KeyChain, pad: int) -> Row:
        # The engine must compute at least the last token: with nothing to feed it would feed the whole prompt again.
        most = max(chain.num_tokens - self.computed, 0)
        match = self.space.match(chain, f"{self.name}-{i}", max_tokens=most, reuse_hint=self.reuse_hint)
        return Row(pad, chain, match, stored=match.blocks)

    def _load(self, wanted: int) -> None:
        """Fill the first *wanted* positions of the cache, or as many as load."""
        step = self.space.block_tokens
        needed = [max(0, -(-(wanted - row.pad) // step)) for row in self.rows]
        length = max(row.pad + n * step for row, n in zip(self.rows, needed, strict=True))
        keys, values = self._allocate(max(length, wanted))
        region = SequenceRegion.from_layers(keys, values, self.space.spec)
        filled = wanted
        for i, (row, n) in enumerate(zip(self.rows, needed, strict=True)):
            for tensor in (*keys, *values) if row.pad else ():
                tensor[i, :, : row.pad].zero_()  # masked, but not-a-number times zero is not zero
            if n:
                loaded = self.space.load(row.match, region, region.positions(i, row.pad + np.arange(n) * step))
                if loaded < n:
                    row.stored = loaded
                    filled = min(filled, row.pad + loaded * step)
        if any(filled > row.pad for row in self.rows):
            self._hand_over(keys, values, filled)

    def _allocate(self, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        spec = self.space.spec
        shape = (len(self.rows), spec.num_kv_heads, length, spec.head_dim)
        dtype = getattr(torch, spec.dtype.value)

        def empty() -> list[torch.Tensor]:
            return [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(spec.num_layers)]

        return empty(), empty()

    def _hand_over(self, keys: list[torch.Tensor], values: list[torch.Tensor], filled: int) -> None:
        parts = [[t[:, :, :filled] for t in tensors] for tensors in (keys, values)]
        if self.call.expand > 1:
            parts = [[t.repeat_interleave(self.call.expand, dim=0) for t in tensors] for tensors in parts]
        fill(self.cache, *parts)
        self.prefix = filled

    def _saved_rows(self, held: int) -> range:
        """Rows of the cache worth saving: one of each group of beams, which share only their prompt; else all."""
        assert held == len(self.rows) * self.call.expand, f"the cache has {held} rows for {len(self.rows)} prompts"
        return range(0, held, self.call.expand if self.call.beams else 1)

    def _held_tokens(self, i: int, row: Row, sequences: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Tokens whose KV row *i* of the cache holds: not the last one, and nothing behind the end of the sequence."""
        prompt = self.call.ids.shape[1]
        end = min(length, sequences.shape[1])
        if self.call.beams:
            return self.call.ids[i // self.call.expand, row.pad : min(prompt, length)]
        stops = np.flatnonzero(np.isin(sequences[i, prompt:end], list(self.call.stops)))
        if len(stops):
            end = prompt + int(stops[0]) + 1
        return sequences[i, row.pad : end]
