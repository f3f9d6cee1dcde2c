"""The options of commands that also ask the store of a connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def connector_options(command: Command) -> Command:
    """``--connector`` and ``--store-namespace``."""
    for option in (
        click.option(
            "--store-namespace",
            default="aibrix",
            show_default=True,
            metavar="N",
            help="With --connector: the namespace of its RemoteBackend.",
        ),
        click.option(
            "--connector",
            metavar="NAME",
            help="Ask this connector's store, set up by its environment variables, about the blocks that PATH names.",
        ),
    ):
        command = option(command)
    return command
