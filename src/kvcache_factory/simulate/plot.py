"""Pictures of replays: hit rate over capacity, and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..plotting import require_matplotlib, save
from .replay import Outcome
from .workload import Workload

Row = Mapping[str, Any]
WINDOWS = 60
"""Points of a line over time."""


def draw(studies: Sequence[tuple[Workload, Sequence[tuple[Row, Outcome]]]], path: Path) -> None:
    """Write a picture (PNG, SVG or PDF by its name) with a row for each trace: over capacity, and over time.

    Raises MissingDependencyError without matplotlib, ConfigError when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6 * len(studies)), layout="constrained")
    axes = figure.subplots(len(studies), 2, squeeze=False)
    for (workload, found), (left, right) in zip(studies, axes, strict=True):
        _over_capacity(left, workload, [row for row, _ in found])
        _over_time(right, workload, [outcome for _, outcome in found])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
    save(figure, path)


def draw_plan(rows: Sequence[Row], path: Path) -> None:
    """Write the curve of a plan, its knee and its answer."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    curve = [row for row in rows if row["kind"] == "curve"]
    axis.plot([row["tier_gib"] for row in curve], [row["usable_hit"] for row in curve], marker="o", label="hit rate")
    for kind, mark in (("knee", "s"), ("target", "*")):
        for row in rows:
            if row["kind"] == kind:
                axis.plot(row["tier_gib"], row["usable_hit"], mark, markersize=11, label=kind)
    axis.set(xscale="log", xlabel="GiB", ylabel="usable hit rate")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    save(figure, path)


def _over_capacity(axis: Any, workload: Workload, rows: Sequence[Row]) -> None:
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = sorted((row["capacity_fraction"], row["usable_hit"]) for row in rows if row["policy"] == policy)
        axis.plot([100 * x for x, _ in own], [y for _, y in own], marker="o", label=policy)
    best = sorted({(row["capacity_fraction"], row["optimum"]) for row in rows if row["optimum"] is not None})
    if best:
        axis.plot([100 * x for x, _ in best], [y for _, y in best], "k--", linewidth=1, label="optimum")
    axis.set(title=workload.name, xscale="log", xlabel="capacity, % of unique blocks", ylabel="usable hit rate")


def _over_time(axis: Any, workload: Workload, outcomes: Sequence[Outcome]) -> None:
    """Lines of the middle capacity only: one for each policy."""
    sizes = sorted({sum(size.blocks for size in outcome.sizes) for outcome in outcomes})
    chosen = sizes[len(sizes) // 2]
    edges = np.linspace(workload.at_s[0], workload.at_s[-1] + 1e-9, WINDOWS + 1)
    window = np.clip(np.searchsorted(edges, workload.at_s, "right") - 1, 0, WINDOWS - 1)
    asked = np.bincount(window, workload.lengths, WINDOWS)
    for outcome in outcomes:
        if sum(size.blocks for size in outcome.sizes) == chosen:
            hits = np.bincount(window, outcome.hits.sum(axis=0), WINDOWS)
            rate = np.divide(hits, asked, out=np.full(WINDOWS, np.nan), where=asked > 0)
            axis.plot(edges[:-1] / 60, rate, linewidth=1.2, label=outcome.policy)
    axis.set(title=f"{chosen:,} blocks", xlabel="minutes", ylabel="usable hit rate")
