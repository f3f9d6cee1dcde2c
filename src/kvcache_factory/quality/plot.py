"""A picture of quality against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plotting import require_matplotlib, save

_LEAST = 1e-7  # what a logarithmic axis shows for "no difference"
_LINE, _NEAR = 10, 140  # pixels: of a label's height, and within which labels can meet
_PANELS = (("kl", "Reading on", "#2f6fed"), ("recall_kl", "Recalling the prefix", "#e07b39"))


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows of :func:`~kvcache_factory.quality.run.run_quality` to *path*: divergence against bytes a token.

    Raises MissingDependencyError without matplotlib, ConfigError when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharex=True, sharey=True)
    for axes, (key, title, colour) in zip(panels, _PANELS, strict=True):
        points = [(row["bytes_per_token"], max(row[key], _LEAST)) for row in rows]
        axes.scatter(*zip(*points, strict=True), color=colour)
        axes.set(title=title, xlabel="bytes a token", yscale="log", xlim=(0, 1.15 * max(x for x, _ in points)))
        axes.set_ylim(_LEAST / 2, 20 * max(_LEAST, *(row[key] for row in rows for key, _, _ in _PANELS)))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("KL divergence from the full cache (nats)")
    figure.draw_without_rendering()  # where things are in pixels
    for axes, (key, _, _) in zip(panels, _PANELS, strict=True):
        _label(axes, rows, key)
    save(figure, path)


def _label(axes: Any, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """Name all points, from below, each label above those that it would meet."""
    placed: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: float(row[key])):
        point = (row["bytes_per_token"], max(row[key], _LEAST))
        x, y = axes.transData.transform(point)
        wanted = y
        for other_x, other_y in placed:
            if abs(other_x - x) < _NEAR and other_y - _LINE < wanted < other_y + _LINE:
                wanted = other_y + _LINE
        placed.append((x, wanted))
        name = row["method"] + (f" {row['parameters']}" if row["parameters"] else "")
        offset = (6, (wanted - y) * 72 / axes.figure.dpi - 3)
        axes.annotate(name, point, xytext=offset, textcoords="offset points", fontsize=7)
