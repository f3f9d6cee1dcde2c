"""``--text``: a text of the user's own, for commands that measure on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., object])


def text_option(otherwise: str) -> Callable[[_Command], _Command]:
    """The option; *otherwise* says what is read without it."""
    return click.option(
        "--text",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help=f"UTF-8 text like what the model will read; by default {otherwise}.",
    )


def read_text(path: Path | None) -> str | None:
    """The content of *path*; UsageError where it cannot be read, or holds nothing."""
    if path is None:
        return None
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--text {path}: {error}") from error
    if not content.strip():
        raise click.UsageError(f"--text {path}: there is no text in it")
    return content
