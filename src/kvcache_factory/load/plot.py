"""A picture of a run: memory, what the tiers hold, and time to first token, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..plotting import require_matplotlib, save
from .sampling import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the samples of :func:`~kvcache_factory.load.run.run_load` to *path* (PNG, SVG or PDF by its name).

    Raises MissingDependencyError without matplotlib, ConfigError when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    samples = [row for row in rows if row["kind"] == "sample"]
    at = [sample["t_s"] for sample in samples]
    figure = Figure(figsize=(8, 6), layout="constrained")
    memory, rate = figure.subplots(2, sharex=True)
    for name, colour, label in (
        ("resident_bytes", "#2f6fed", "resident memory of the process"),
        ("held_bytes", "#7fb2ff", "held by the tiers"),
        ("fragmentation_bytes", "#b0b7c3", "of that, lost to fragmentation"),
    ):
        memory.plot(at, [sample[name] / 2**20 for sample in samples], color=colour, label=label)
    memory.set(ylabel="MiB", ylim=(0, None))
    memory.legend(frameon=False, loc="center right")
    shares = [s["served_tokens"] / s["reusable_tokens"] if s["reusable_tokens"] else None for s in samples]
    rate.plot(at, shares, color="#2f6fed")
    rate.set(xlabel="seconds", ylabel="hit rate since the start", ylim=(0, 1))
    for axes in (memory, rate):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
