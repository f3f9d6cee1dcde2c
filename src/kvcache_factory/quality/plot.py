"""A picture of quality against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..demo.plot import require_matplotlib
from ..errors import ConfigError

_LEAST = 1e-7  # what a logarithmic axis shows for "no difference"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows of :func:`~kvcache_factory.quality.run.run_quality` to *path*: divergence against bytes a token.

    Raises MissingDependencyError without matplotlib, ConfigError when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, colour in (("kl", "reading on", "#2f6fed"), ("recall_kl", "recalling the prefix", "#e07b39")):
        points = [(row["bytes_per_token"], max(row[key], _LEAST)) for row in rows]
        axes.scatter(*zip(*points, strict=True), color=colour, label=label)
    for row in rows:
        name = row["method"] + (f" {row['parameters']}" if row["parameters"] else "")
        at = (row["bytes_per_token"], max(row["kl"], _LEAST))
        axes.annotate(name, at, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="bytes a token", ylabel="KL divergence from the full cache (nats)", yscale="log")
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from error
