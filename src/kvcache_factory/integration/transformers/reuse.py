"""Reuse beyond the exact prefix: runs of equal tokens, moved to where they stand now, and computed again in part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError
from ...memory.region import SequenceRegion
from .calls import Bypass, NotServed
from .layout import base_model, cache_argument, fill, new_cache, text_config
from .recompute import judge, recompute
from .request import Request, Row
from .rotation import Rotation
from .runs import Run, Tokens, equal_tokens, find_runs

_JUDGED_LAYERS = 2
"""CacheBlend judges tokens by their KV at the second layer, the first that depends on what came before them."""


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What a request may take from other sequences, at other positions and behind other tokens.

    Parameters
    ----------
    sources:
        Sequences of token ids whose KV was stored when they were served.
    recompute:
        Share of the reused tokens that are computed again: those whose KV is furthest off at the second layer.
    margin:
        Tokens at the beginning of each run that are computed again.
    at_least:
        The shortest run of equal tokens that is reused.
    measure:
        Also read the whole prompt without reuse, and report how much the next token's distribution differs.
    """

    sources: Sequence[Iterable[int]]
    recompute: float = 0.0
    margin: int = 4
    at_least: int = 32
    measure: bool = False

    def __post_init__(self) -> None:
        if type(self.recompute) not in (int, float) or not 0 <= self.recompute <= 1:
            raise ConfigError(f"Reuse(recompute={self.recompute!r}) must be a share between 0 and 1")
        if type(self.margin) is not int or self.margin < 0:
            raise ConfigError(f"Reuse(margin={self.margin!r}) must be a number of tokens, 0 or more")
        if type(self.at_least) is not int or self.at_least < 1:
            raise ConfigError(f"Reuse(at_least={self.at_least!r}) must be a number of tokens, 1 or more")

    @classmethod
    def after_edit(cls, previous: Iterable[int], **options: Any) -> Reuse:
        """For a prompt that is *previous* with an edit in the middle: only the edit and a margin are computed."""
        return cls(sources=[previous], **options)

    @classmethod
    def of_documents(cls, documents: Sequence[Iterable[int]], **options: Any) -> Reuse:
        """For a prompt of *documents* in any order, each stored when it was read alone (CacheBlend's idea).

        A fifth of what is reused is computed again: 15 % of a prompt of four documents, the first of which is exact.
        """
        return cls(sources=documents, **{"recompute": 0.2, **options})


@dataclass(slots=True)
class _Assembly:
    """The cache of a prompt less its last token while it is put together, and where each part comes from."""

    ids: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    known: torch.Tensor  # bool [tokens]: something is there
    reused: torch.Tensor  # bool [tokens]: it was computed behind other tokens
    compute: torch.Tensor = field(init=False)  # bool [tokens]: it is to be computed, again if it is there

    def __post_init__(self) -> None:
        self.compute = torch.zeros_like(self.known)

    def put(self, at: int, keys: list[torch.Tensor], values: list[torch.Tensor], approximate: bool) -> None:
        """Put tensors ``[1, H, n, D]`` of each layer at token *at*."""
        here = slice(at, at + keys[0].shape[2])
        for own, given in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            own[:, :, here] = given
        self.known[here] = True
        self.reused[here] = approximate


class ReusedRequest(Request):
    """A request whose cache is put together from runs; it is approximate, so nothing of it is stored."""

    def __init__(self, *args: Any, reuse: Reuse, rotation: Rotation, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reuse = reuse
        self._rotation = rotation
        self._sources: list[Row] = []
        self._found: dict[str, Any] = {}

    def open(self) -> None:
        """Look up, move, compute what is missing; afterwards ``cache`` lacks the last token only."""
        self._check()
        super().open()
        runs = self._find_runs()
        if not runs:
            return
        made = self._assemble()
        for number, source in enumerate(self._sources):
            self._take(source, [run for run in runs if run.source == number], made)
        self._choose(made)
        rows = made.compute.nonzero()[:, 0]
        drift = recompute(self.model, made.ids, rows, made.keys, made.values, made.reused)
        self.cache = new_cache(self.model)
        fill(self.cache, made.keys, made.values)
        self.prefix = len(made.known)
        self._found = {
            "moved_by": sorted({run.new - run.old for run in runs}),
            "reused_beyond_prefix": int((made.reused & ~made.compute).sum()),
            "recomputed_tokens": len(rows),
            "drift": float(drift.mean()) if drift.numel() else None,
            "drift_max": float(drift.max()) if drift.numel() else None,
        }
        if self._reuse.measure:
            self._found |= self._measured()

    def save(self, *args: Any, **options: Any) -> int:
        """Nothing, where anything was reused beyond the exact prefix: it would be wrong for everybody else."""
        return 0 if self._found else super().save(*args, **options)

    def close(self, output_tokens: int = 0) -> None:
        super().close(output_tokens)
        for row in self._sources:
            self.space.release(row.match.request_id)

    def report(self) -> dict[str, Any]:
        """What was reused, what was computed again, and how far off that had been."""
        return {"reused_tokens": self.reused_tokens, "reused_beyond_prefix": 0, "recomputed_tokens": 0, **self._found}

    def _check(self) -> None:
        if len(self.call.ids) != 1 or self.call.pads[0]:
            raise NotServed(Bypass.SEVERAL)
        if not self.call.may_load:
            raise NotServed(Bypass.STATES)
        if getattr(text_config(self.model), "_attn_implementation", "") not in ("eager", "sdpa"):
            raise NotServed(Bypass.MASKED)

    def _find_runs(self) -> list[Run]:
        """Runs behind the exact prefix, of tokens whose KV is stored; their sources are leased from here on."""
        stored: list[Tokens] = []
        for number, ids in enumerate(self._reuse.sources):
            tokens = np.fromiter((int(token) for token in ids), np.int64)
            chain = self.space.chain(tokens)
            match = self.space.match(chain, f"{self.name}-s{number}")
            self._sources.append(Row(0, chain, match, stored=match.blocks))
            stored.append(tokens[: match.tokens])
        prompt = self.call.ids[0, :-1]
        same = [equal_tokens(tokens, prompt) for tokens in stored]
        runs, begin = [], self.prefix
        if max(same, default=0) > begin:  # the rest of a block in which the sequences part
            begin = max(same)
            runs.append(Run(same.index(begin), self.prefix, self.prefix, begin - self.prefix, exact=True))
        return runs + find_runs(stored, prompt, self._reuse.at_least, begin)

    def _assemble(self) -> _Assembly:
        """Room for the prompt but its last token, with the exact prefix in it."""
        ids = torch.from_numpy(self.call.ids[0, :-1]).to(self.device)
        none = torch.zeros(len(ids), dtype=torch.bool, device=self.device)
        made = _Assembly(ids, *self._allocate(len(ids)), none.clone(), none)
        if self.prefix:
            layers = self.cache.layers
            made.put(0, [x.keys for x in layers], [x.values for x in layers], approximate=False)
        return made

    def _take(self, source: Row, runs: list[Run], made: _Assembly) -> None:
        """Load one source and move its runs to where they stand now."""
        if not runs:
            return
        step = self.space.block_tokens
        blocks = -(-max(run.old + run.length for run in runs) // step)
        keys, values = self._allocate(blocks * step)
        region = SequenceRegion.from_layers(keys, values, self.space.spec)
        loaded = self.space.load(source.match, region, region.positions(0, np.arange(blocks) * step)) * step
        for run in runs:
            length = min(run.length, loaded - run.old)
            if length <= 0:
                continue
            old = slice(run.old, run.old + length)
            here = [k[:, :, old] for k in keys]
            if run.new != run.old:
                by = torch.full((length,), run.new - run.old, device=self.device)
                turns = self._rotation.turns(here[0], by)
                here = [self._rotation.turn(k, turns) for k in here]
            made.put(run.new, here, [v[:, :, old] for v in values], approximate=not run.exact)
            made.compute[run.new : run.new + (0 if run.exact else min(self._reuse.margin, length))] = True

    def _choose(self, made: _Assembly) -> None:
        """Compute what is missing, and the share of what is reused that is furthest off at the second layer."""
        made.compute |= ~made.known
        count = round(self._reuse.recompute * int(made.reused.sum()))
        if not count:
            return
        early = min(_JUDGED_LAYERS, len(made.keys))
        rows = (made.reused | ~made.known).nonzero()[:, 0]  # what is exact is right already
        error = judge(self.model, made.ids, rows, made.keys[:early], made.values[:early], made.reused)
        furthest = error.topk(count).indices
        made.compute[made.reused.nonzero()[furthest, 0]] = True

    def _measured(self) -> dict[str, Any]:
        """The next token behind the prompt, without reuse and with it."""
        whole = torch.from_numpy(self.call.ids).to(self.device)
        name, inner = cache_argument(self.model), base_model(self.model)
        here = new_cache(self.model)
        fill(here, [x.keys for x in self.cache.layers], [x.values for x in self.cache.layers])
        with torch.no_grad():
            true, found = (
                inner(input_ids=ids, use_cache=True, **{name: cache}).logits[0, -1].float().log_softmax(-1)
                for ids, cache in ((whole, new_cache(self.model)), (whole[:, -1:], here))
            )
        return {"kl": float((true.exp() * (true - found)).sum()), "top1": bool(true.argmax() == found.argmax())}
