"""Several policies at several capacities on one trace, and what is worth knowing of each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from ..block.spec import BlockSpec
from ..errors import CapacityError, ConfigError
from ..policy.base import EvictionPolicy
from ..policy.placement import size_cap_gb
from ..registry import make_policy
from .cost import CostModel, saved_s
from .flat import replay_flat
from .optimum import optimum
from .replay import KINDS, Outcome, Replay, Settings, Size
from .still import row_bytes
from .workload import Progress, Workload

Semantics = Literal["prefix", "flat"]
Row = dict[str, Any]

GIB = 1 << 30
LOAD_GB_S = {"gpu": 1000.0, "dram": 25.0, "cache": 25.0, "nvme": 6.0, "disk": 6.0, "remote": 2.0}
"""GB/s at which a tier of this name is assumed to be read, where nothing is given."""
_UNITS = {"%": 0.0, "": 1.0, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}


class Capacity(NamedTuple):
    """A capacity as it was asked for: in per cent of the unique blocks, in blocks, or in bytes."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """From ``5%``, ``20000``, ``64GiB``; CapacityError when it is zero or no capacity."""
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|[a-zA-Z]*)\s*", text)
        if match is None or match[2].lower() not in _UNITS:
            raise CapacityError(f"{text!r} is no capacity; use 5% of the unique blocks, 20000 blocks, or 64GiB")
        if not float(match[1]) > 0:
            raise CapacityError(f"a capacity of {text.strip()} holds nothing; give more than zero")
        return cls(float(match[1]), match[2].lower())

    def blocks(self, workload: Workload, spec: BlockSpec | None) -> int:
        """In blocks of *workload*; at least one, unless bytes of a model do not hold one."""
        if self.unit == "%":
            return max(1, int(workload.unique * self.value / 100))
        if not self.unit:
            return max(1, int(self.value))
        if spec is None:
            raise ConfigError("a capacity in bytes needs to know what a block weighs; name a --model")
        blocks = int(self.value * _UNITS[self.unit] / row_bytes(spec))
        if blocks < 1:
            raise CapacityError(
                f"{self.value:g} {self.unit} does not hold one block of {row_bytes(spec) / 2**20:,.1f} MiB"
            )
        return blocks


def parse_tiers(text: str) -> list[tuple[str, Capacity]]:
    """From ``dram=5%,nvme=40%``, the fastest first."""
    tiers = []
    for part in text.split(","):
        name, found, size = part.partition("=")
        if not found or not re.fullmatch(r"\s*[a-z][a-z0-9_]*\s*", name):
            raise ConfigError(f"{part!r} is no tier; use name=capacity, as in dram=5%,nvme=40%")
        tiers.append((name.strip(), Capacity.parse(size)))
    if len({name for name, _ in tiers}) < len(tiers):
        raise ConfigError(f"{text!r} names a tier twice")
    return tiers


def capped(sizes: list[Size], policy: EvictionPolicy, spec: BlockSpec | None) -> list[Size]:
    """*sizes* under the ``max_size_gb`` of *policy*: of single tiers, and of all in memory together."""
    kinds = [KINDS.get(size.name, "cpu") for size in sizes]
    caps, left = [size_cap_gb(policy, kind) for kind in kinds], size_cap_gb(policy, None)
    if left is None and not any(caps):
        return sizes
    if spec is None:
        raise ConfigError(f"{policy!r}: max_size_gb needs to know what a block weighs; name a --model")
    weight, held = row_bytes(spec) / GIB, []
    for size, kind, cap in zip(sizes, kinds, caps, strict=True):
        blocks = size.blocks if cap is None else min(size.blocks, int(cap / weight))
        if left is not None and kind != "disk":
            blocks = min(blocks, int(left / weight))
            left -= blocks * weight
        if blocks < 1:
            raise CapacityError(f"{policy!r} leaves {size.name} no room for one block of {1024 * weight:,.1f} MiB")
        held.append(Size(size.name, blocks))
    return held


def parse_policy(text: str) -> EvictionPolicy:
    """From a name, with options: ``s3fifo``, ``s3fifo:threshold=1:small_ratio=0.3``."""
    name, *given = text.strip().split(":")
    options = {}
    for part in given:
        key, found, value = part.partition("=")
        if not found:
            raise ConfigError(f"{part!r} in {text!r} is no option of a policy; use name:option=value")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return make_policy(name, **options)


class Study(msgspec.Struct, frozen=True):
    """What is asked of every replay.

    Attributes
    ----------
    policies:
        As they were written, with the policy.
    sizes:
        Sets of tiers, each a list of (name, capacity).
    load_gb_s:
        GB/s by tier name; :data:`LOAD_GB_S` where it is missing.
    """

    policies: list[tuple[str, EvictionPolicy]]
    sizes: list[list[tuple[str, Capacity]]]
    settings: Settings = Settings()
    semantics: Semantics = "prefix"
    cost: CostModel | None = None
    load_gb_s: dict[str, float] = {}
    with_optimum: bool = True

    def run(self, workload: Workload, progress: Progress = lambda done, total: None) -> list[tuple[Row, Outcome]]:
        """A row and the outcome it comes from for each set of tiers and policy."""
        if self.semantics == "flat" and (self.settings.service or any(len(tiers) > 1 for tiers in self.sizes)):
            raise ConfigError("flat semantics knows no tiers and no requests in flight; use prefix semantics")
        found: list[tuple[Row, Outcome]] = []
        uses = workload.next_uses() if self.with_optimum else None
        best_of = cache(lambda blocks: optimum(workload, blocks, uses))
        runs = len(self.sizes) * len(self.policies)
        for tiers in self.sizes:
            sizes = [Size(name, asked.blocks(workload, self.settings.spec)) for name, asked in tiers]
            for name, policy in self.policies:
                held = capped(sizes, policy, self.settings.spec)
                best = best_of(sum(size.blocks for size in held)) if uses is not None else None
                done = len(found)

                def step(at: float, total: float, done: int = done) -> None:
                    progress(done + at / total, runs)

                outcome = self._replay(workload, policy, held, step)
                found.append((self._row(workload, name, outcome, best), outcome))
        progress(runs, runs)
        return found

    def _replay(self, workload: Workload, policy: EvictionPolicy, sizes: list[Size], step: Progress) -> Outcome:
        if self.semantics == "flat":
            return replay_flat(workload, policy, sizes[0].blocks, step)
        return Replay(workload, policy, sizes, self.settings).run(step)

    def _row(self, workload: Workload, policy: str, outcome: Outcome, best: float | None) -> Row:
        blocks = sum(size.blocks for size in outcome.sizes)
        row: Row = {
            "trace": workload.name,
            "policy": policy,
            "capacity_fraction": blocks / workload.unique,
            "capacity_blocks": blocks,
            "usable_hit": outcome.usable_hit,
            "block_hit": outcome.block_hit,
            "optimum": best,
            "saved_prefill_s": self.saved_s(workload, outcome),
            "evictions": outcome.evicted[-1],
            "us_per_block": 1e6 * outcome.seconds / outcome.blocks,
        }
        for number, size in enumerate(outcome.sizes):
            if len(outcome.sizes) > 1:
                row[f"{size.name}_hit"] = float(outcome.hits[number].sum()) / outcome.blocks
                row[f"{size.name}_moved"] = outcome.moved[number]
            spec = self.settings.spec
            row[f"{size.name}_gib"] = outcome.held[number] * row_bytes(spec) / GIB if spec is not None else None
        return row

    def saved_s(self, workload: Workload, outcome: Outcome, tiers: int | None = None) -> float | None:
        """Seconds of prefill that the hits of the first *tiers* saved, less loading; None without a cost model."""
        if self.cost is None:
            return None
        weight = self.settings.spec.payload_bytes if self.settings.spec is not None else 0
        rates = [1e9 * self.load_gb_s.get(size.name, LOAD_GB_S.get(size.name, 25.0)) for size in outcome.sizes[:tiers]]
        hits = [np.asarray(row, np.int64) for row in outcome.hits[:tiers]]
        return saved_s(self.cost, hits, workload.block_tokens, workload.inputs, weight, rates)


def parse_list(text: str) -> Sequence[str]:
    """The parts of a list with commas, but for those in brackets, blanks taken away; ConfigError when there is none."""
    parts = [part.strip() for part in re.split(r",(?![^\[\]]*\])", text) if part.strip()]
    if not parts:
        raise ConfigError(f"{text!r} is an empty list")
    return parts
