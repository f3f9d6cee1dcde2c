"""The command group: commands are imported when they are used, and our errors are printed as one clean line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from .. import __version__
from ..errors import KVCacheError, MissingDependencyError
from .output import debugging

COMMANDS = (
    "advise",
    "bench",
    "bypass",
    "calibrate",
    "cluster",
    "dashboard",
    "demo",
    "doctor",
    "env",
    "inspect",
    "load",
    "plan",
    "purge",
    "quality",
    "replay",
    "reset",
    "reuse",
    "state",
    "top",
    "verify",
)


class CleanError(click.ClickException):
    """One line on stderr and exit code 2, instead of a traceback."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        text = " ".join(self.format_message().split())
        click.echo(f"kvcache-factory: {text}", file=file, err=file is None)


class Interrupted(CleanError):
    """Ended by the user, with the exit code of a program that SIGINT has ended."""

    exit_code = 130


class LazyGroup(click.Group):
    """Commands by name; the module of a command is imported when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f".{cmd_name}", __package__), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _in_one_line(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _in_one_line(error) from error
        except KVCacheError as error:
            if debugging():
                raise
            raise CleanError(f"{error} [{type(error).__name__}]") from error
        except ModuleNotFoundError as error:
            missing = _missing_extra(error)
            if debugging() or missing is None:
                raise
            raise CleanError(f"{missing} [MissingDependencyError]") from error
        except KeyboardInterrupt as error:
            if debugging():
                raise
            raise Interrupted("stopped by Ctrl-C") from error


def _missing_extra(error: ModuleNotFoundError) -> MissingDependencyError | None:
    """What names the command that installs the missing package; None where that is none of our optional ones."""
    from .doctor import OPTIONAL

    package = (error.name or "").partition(".")[0]
    return MissingDependencyError.of(package, OPTIONAL[package][0], "this command") if package in OPTIONAL else None


def _in_one_line(error: click.UsageError) -> click.ClickException:
    """What was typed wrong and where help is, without the usage in front of it; help that was asked for stays help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error
    command = error.ctx.command_path if error.ctx is not None else "kvcache-factory"
    return CleanError(f"{error.format_message()} See: {command} --help")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: kvcache-factory demo --turns 2",
)
@click.version_option(__version__, prog_name="kvcache-factory")
def main() -> None:
    """Keep KV-cache blocks alive beside the inference engine.

    Every command with --json prints one object with command, version, machine and rows.
    KVCACHE_FACTORY_DEBUG=1 shows the traceback of an error.
    """
