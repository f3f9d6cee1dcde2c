"""A picture of the demo: time to first token of each turn, in every phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plotting import require_matplotlib, save

_LABELS = {"cold": "without the cache", "warm": "with the cache", "restart": "with the cache, after a restart"}
_COLOURS = {"cold": "#b0b7c3", "warm": "#2f6fed", "restart": "#7fb2ff"}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the rows of :func:`~kvcache_factory.demo.run.run_demo` to *path* as bars (PNG, SVG or PDF by its name).

    Raises MissingDependencyError without matplotlib, ConfigError when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    turns = sorted({int(row["turn"]) for row in rows})
    phases = [phase for phase in _LABELS if any(row["phase"] == phase for row in rows)]
    width = 0.8 / len(phases)
    for number, phase in enumerate(phases):
        place = (number - (len(phases) - 1) / 2) * width
        seconds = {int(row["turn"]): float(row["ttft_s"]) for row in rows if row["phase"] == phase}
        at = [turn + place for turn in turns if turn in seconds]
        bars = axes.bar(at, [seconds[turn] for turn in turns if turn in seconds], width, label=_LABELS[phase])
        for bar in bars:
            bar.set_color(_COLOURS[phase])
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.set(xlabel="turn", ylabel="seconds to first token", xticks=turns)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(phases), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, path)
