"""``--plot``: a picture of what a command found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., object])


def plot_option(shows: str) -> Callable[[_Command], _Command]:
    """The option; a place where no picture can be written is an error before the command does anything."""
    return click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE.png",
        callback=_checked,
        help=f"{shows} PNG, SVG or PDF by its name.",
    )


def _checked(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        from ..plotting import require_place

        require_place(path)
    return path
