"""Pictures as files: whether one could be drawn and written, and writing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import ConfigError, MissingDependencyError


def require_matplotlib() -> None:
    """Raise MissingDependencyError, naming the pip command, unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError.of("matplotlib", "plot", "drawing a plot") from error


def require_place(path: Path) -> None:
    """Raise ConfigError where :func:`save` could not write *path*, before hours are spent on what it is to show.

    MissingDependencyError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"the plot cannot be written to {path}: there is no directory {folder}; make it first")
    kinds = FigureCanvasBase.get_supported_filetypes()
    kind = path.suffix.lower().removeprefix(".")
    if kind and kind not in kinds:
        raise ConfigError(
            f"the plot cannot be written to {path}: its name ends with none of {', '.join(sorted(kinds))}"
        )


def save(figure: Any, path: Path) -> None:
    """Write *figure* (PNG, SVG or PDF by the name); ConfigError when that cannot be."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from error
