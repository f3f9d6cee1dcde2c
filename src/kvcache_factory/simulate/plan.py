"""How much memory a workload is worth: the curve of hits over capacity, its knee, and two tiers that reach a target.

What is stored goes to the slower tier as well, so that the slower one decides what is found, and the faster one how
quickly.  The curve gives both sizes; a replay through the two tiers together says what they really do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import ConfigError
from ..policy.base import EvictionPolicy
from .cost import CostModel
from .models import Model
from .replay import Outcome, Replay, Settings, Size
from .still import row_bytes
from .study import GIB, LOAD_GB_S, Study
from .workload import Progress, Workload

Row = dict[str, Any]

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Capacities of the curve, as parts of the unique blocks."""
REFINEMENTS = 5
"""Replays that narrow the capacity of the target down."""
HOURS_A_MONTH = 730.0
BUSY = 0.5
"""Share of the bandwidth of the NVMe that may be used on average, where no prices decide."""
SHORT = 0.02
"""By what part of the target two tiers together may fall short of it before they get more DRAM."""
DRAM, NVME = "dram", "nvme"


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What things cost, in one currency."""

    dram: float | None = None
    """A GiB of DRAM for a month."""
    nvme: float | None = None
    """A GiB of NVMe for a month."""
    gpu: float | None = None
    """An hour of the accelerator that computes prefill."""

    @classmethod
    def parse(cls, text: str) -> Prices:
        """From ``dram=3.2,nvme=0.08,gpu=2.5``, or a JSON file with these names."""
        try:
            if Path(text).is_file():
                prices = msgspec.json.decode(Path(text).read_bytes(), type=cls)
            else:
                pairs = dict(part.split("=", 1) for part in text.replace(" ", "").split(","))
                prices = msgspec.convert({name: float(value) for name, value in pairs.items()}, cls)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"prices {text!r}: {error}; use dram=3.2,nvme=0.08,gpu=2.5 or a JSON file") from error
        if any(price is not None and not 0 <= price < float("inf") for price in msgspec.structs.astuple(prices)):
            raise ConfigError(f"prices {text!r}: a price is a number from 0 on")
        return prices

    def month(self, dram_gib: float, nvme_gib: float) -> float | None:
        """Price of so much for a month; None when a price that is needed is not known."""
        if (dram_gib and self.dram is None) or (nvme_gib and self.nvme is None):
            return None
        return dram_gib * (self.dram or 0.0) + nvme_gib * (self.nvme or 0.0)


class Point(msgspec.Struct, frozen=True):
    """One capacity of the curve and what it serves."""

    blocks: int
    outcome: Outcome

    @property
    def hit(self) -> float:
        """Usable hit rate."""
        return self.outcome.usable_hit


class Planner:
    """Sizes for one workload and model.

    Parameters
    ----------
    target:
        Share (0..1) of the prefix tokens that an unlimited cache would find.
    """

    def __init__(
        self,
        workload: Workload,
        model: Model,
        policy: EvictionPolicy,
        *,
        target: float = 0.9,
        kv_dtype: str = "bfloat16",
        cost: CostModel | None = None,
        prices: Prices | None = None,
        load_gb_s: dict[str, float] | None = None,
    ) -> None:
        if not 0 < target <= 1:
            raise ConfigError(
                f"a target of {100 * target:g} % of the prefix tokens cannot be; use above 0 and up to 100"
            )
        self.workload = workload
        self.policy = policy
        self.target = target
        self.prices = prices or Prices()
        self.spec = model.spec(workload.block_tokens, kv_dtype)
        self.load_gb_s = LOAD_GB_S | (load_gb_s or {})
        settings = Settings(spec=self.spec)
        self.study = Study([], [], settings, cost=cost or CostModel.of_model(model), load_gb_s=self.load_gb_s)
        self._points: dict[int, Point] = {}
        self._steps = len(FRACTIONS) + REFINEMENTS + 1

    @property
    def reusable(self) -> float:
        """Share of the block accesses that an unlimited cache finds."""
        return 1 - self.workload.unique / self.workload.blocks

    def run(self, progress: Progress = lambda done, total: None) -> list[Row]:
        """The rows of the plan: ``curve``, ``knee``, ``target``, and the parts of the ``answer``."""
        sizes = sorted({max(1, int(fraction * self.workload.unique)) for fraction in FRACTIONS})
        curve = [self._at(blocks, progress) for blocks in sizes]
        enough = self._enough(curve, progress)
        knee = self.knee(curve)
        fast = self._fast(sorted(self._points.values(), key=lambda point: point.blocks), enough, knee)
        rows = [self._row("curve", DRAM, point.blocks, point.outcome) for point in curve]
        rows.append(self._row("knee", DRAM, knee.blocks, knee.outcome))
        rows.append(self._row("target", NVME, enough.blocks, enough.outcome))
        rows += self._answer(fast, enough, progress)
        progress(1, 1)
        return rows

    def _at(self, blocks: int, progress: Progress) -> Point:
        if blocks not in self._points:
            done = len(self._points)
            replay = Replay(self.workload, self.policy, [Size(DRAM, blocks)], self.study.settings)
            outcome = replay.run(lambda at, total: progress(done + at / total, self._steps))
            self._points[blocks] = Point(blocks, outcome)
        return self._points[blocks]

    def _enough(self, curve: list[Point], progress: Progress) -> Point:
        """The smallest capacity found that serves the target."""
        wanted = self.target * self.reusable * (1 - 1e-9)
        high = next((point for point in curve if point.hit >= wanted), curve[-1])
        low = max((point.blocks for point in curve if point.blocks < high.blocks), default=1)
        for _ in range(REFINEMENTS):
            middle = round((low * high.blocks) ** 0.5)
            if not low < middle < high.blocks or high.blocks < 1.03 * low:
                break
            point = self._at(middle, progress)
            low, high = (low, point) if point.hit >= wanted else (middle, high)
        return high

    @staticmethod
    def knee(curve: list[Point]) -> Point:
        """Where more memory begins to pay less: farthest above a straight line, over the logarithm of the capacity."""
        if len(curve) < 3 or curve[-1].hit <= curve[0].hit:
            return curve[0]
        x = np.log([point.blocks for point in curve])
        y = np.array([point.hit for point in curve])
        bend = (y - y[0]) / (y[-1] - y[0]) - (x - x[0]) / (x[-1] - x[0])
        return curve[int(bend.argmax())]

    def _fast(self, points: list[Point], enough: Point, knee: Point) -> Point:
        """The faster tier: what earns most by the prices; else the least that leaves the NVMe half idle, or a knee."""
        # What is stored comes in through DRAM: a request that does not fit there is cut off.
        longest = int(self.workload.lengths.max())
        choices = [point for point in points if longest <= point.blocks <= enough.blocks] or [enough]
        if None not in (self.prices.dram, self.prices.nvme, self.prices.gpu):
            return max(choices, key=lambda point: self._earns(point, enough))
        idle = [point for point in choices if self._nvme_load(point, enough) <= BUSY]
        return idle[0] if idle else min(choices, key=lambda point: abs(point.blocks - knee.blocks))

    def _nvme_load(self, fast: Point, enough: Point) -> float:
        """Share of the NVMe's bandwidth that is used on average when *fast* lies in DRAM before it."""
        read = max(enough.hit - fast.hit, 0.0) * self.workload.blocks * self.spec.payload_bytes / 1e9
        return read / self._span_s / self.load_gb_s[NVME]

    @property
    def _span_s(self) -> float:
        return max(float(self.workload.at_s[-1] - self.workload.at_s[0]), 1.0)

    def _earns(self, fast: Point, enough: Point) -> float:
        """What a month saves with *fast* in DRAM before *enough* on NVMe, less what that costs."""
        weight = self.spec.payload_bytes
        seconds = self.study.saved_s(self.workload, enough.outcome) or 0.0
        slow = max(enough.hit - fast.hit, 0.0) * self.workload.blocks * weight / 1e9
        seconds -= slow / self.load_gb_s[NVME] - slow / self.load_gb_s[DRAM]
        nvme = 0.0 if fast is enough else self._gib(enough.blocks)
        return self._a_month(seconds) - (self.prices.month(self._gib(fast.blocks), nvme) or 0.0)

    def _a_month(self, seconds: float) -> float:
        return seconds / self._span_s * (self.prices.gpu or 0.0) * HOURS_A_MONTH

    def _answer(self, first: Point, enough: Point, progress: Progress) -> list[Row]:
        """The parts and the whole; DRAM grows until both tiers serve nearly what the NVMe alone would."""
        wanted = (1 - SHORT) * min(enough.hit, self.target * self.reusable)
        for fast in sorted(self._points.values(), key=lambda point: point.blocks):
            if first.blocks <= fast.blocks < enough.blocks:
                outcome = self._together(fast, enough, progress)
                if outcome.usable_hit >= wanted:
                    return self._parts(fast, enough, outcome)
        return [self._row("answer", DRAM, enough.blocks, enough.outcome)]

    def _together(self, fast: Point, enough: Point, progress: Progress) -> Outcome:
        sizes = [Size(DRAM, fast.blocks), Size(NVME, enough.blocks)]
        return Replay(self.workload, self.policy, sizes, self.study.settings).run(
            lambda at, total: progress(self._steps - 1 + at / total, self._steps)
        )

    def _parts(self, fast: Point, enough: Point, outcome: Outcome) -> list[Row]:
        price = self.prices.month(self._gib(fast.blocks), self._gib(enough.blocks))
        sizes = enumerate(outcome.sizes)
        parts = [self._row("answer", size.name, size.blocks, outcome, number) for number, size in sizes]
        whole = self._row("answer", f"{DRAM}+{NVME}", fast.blocks + enough.blocks, outcome)
        return [*parts, whole | {"price_a_month": price}]

    def _row(self, kind: str, tier: str, blocks: int, outcome: Outcome, number: int | None = None) -> Row:
        """A row; of the whole outcome, or of what tier *number* of it served."""
        gib = self._gib(blocks)
        hit, saved = outcome.usable_hit, self.study.saved_s(self.workload, outcome)
        if number is not None:
            hit = float(outcome.hits[number].sum()) / outcome.blocks
            saved = self.study.saved_s(self.workload, outcome, number + 1)
            if saved is not None and number:
                saved -= self.study.saved_s(self.workload, outcome, number) or 0.0
        on_nvme = tier == NVME
        return {
            "trace": self.workload.name,
            "kind": kind,
            "tier": tier,
            "tier_gib": gib,
            "usable_hit": hit,
            "of_reusable": hit / self.reusable if self.reusable else 1.0,
            "saved_prefill_s": saved,
            "capacity_fraction": blocks / self.workload.unique,
            "price_a_month": self.prices.month(0.0 if on_nvme else gib, gib if on_nvme else 0.0),
        }

    def _gib(self, blocks: int) -> float:
        return blocks * row_bytes(self.spec) / GIB


def describe(rows: list[Row], planner: Planner) -> str:
    """The answer in one sentence."""
    answer = [row for row in rows if row["kind"] == "answer"]
    parts = " and ".join(
        f"{row['tier_gib']:,.1f} GiB of {row['tier'].upper()}" for row in answer if "+" not in row["tier"]
    )
    whole = answer[-1]
    price = whole["price_a_month"]
    return (
        f"{parts} serve {100 * whole['usable_hit']:.1f} % of the prompt tokens, "
        f"{100 * whole['of_reusable']:.1f} % of what any cache could (asked: {100 * planner.target:g} %)"
        + (f", for {price:,.2f} a month" if price is not None else "")
        + "."
    )
