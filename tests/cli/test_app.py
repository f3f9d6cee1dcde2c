"""The command group: lazy, self-explaining, and polite about errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from kvcache_factory.cli import app, main
from kvcache_factory.errors import CapacityError


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    yield prefix
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name)


@pytest.mark.parametrize("path", list(commands(main)), ids=lambda path: " ".join(path) or "main")
def test_every_help_ends_with_an_example(path: tuple[str, ...]) -> None:
    """Someone who asks for help gets a line to copy."""
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0, result.output
    last = result.output.rstrip().splitlines()[-1].strip()
    assert last.startswith(" ".join(["Example: kvcache-factory", *path]))


def test_both_names_print_the_version() -> None:
    """`kvf` is `kvcache-factory`."""
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("kvcache-factory, version ")


def test_an_unknown_command_is_a_usage_error() -> None:
    """A misspelt command must not fall through to a traceback."""
    result = CliRunner().invoke(main, ["docter"])
    assert result.exit_code == 2
    assert "docter" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["docter"], "No such command 'docter'"),
        (["--nonsense"], "No such option"),
        (["plan", "--nonsense"], "No such option"),
        (["bench", "nothing"], "No such command 'nothing'"),
        (["replay"], "Missing argument"),
    ],
)
def test_a_usage_error_is_one_line_that_says_where_help_is(arguments: list[str], says: str) -> None:
    """Not four, of which three repeat the usage."""
    result = CliRunner().invoke(main, arguments, prog_name="kvcache-factory")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"kvcache-factory: {says}")
    assert result.stderr.count("\n") == 1
    assert "--help" in result.stderr


def test_a_group_without_a_command_shows_its_help() -> None:
    """Whoever types half a command sees how it goes on."""
    result = CliRunner().invoke(main, ["bench"])
    assert result.output.startswith("Usage:")


def fail() -> None:
    raise CapacityError("a slab needs at least one slot,\nnot 0; raise size_gb")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvcache_factory.cli.failing")
    module.failing = click.Command("failing", callback=fail)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(app, "COMMANDS", (*app.COMMANDS, "failing"))


@pytest.mark.usefixtures("failing")
def test_a_typed_error_is_one_line_and_exit_code_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """What, where, what to do, and the class for those who search: on stderr, on one line, without a traceback."""
    monkeypatch.delenv("KVCACHE_FACTORY_DEBUG", raising=False)
    result = CliRunner().invoke(main, ["failing"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "kvcache-factory: a slab needs at least one slot, not 0; raise size_gb [CapacityError]\n"


@pytest.mark.usefixtures("failing")
def test_the_debug_variable_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer sees where the error was raised."""
    monkeypatch.setenv("KVCACHE_FACTORY_DEBUG", "1")
    result = CliRunner().invoke(main, ["failing"])
    assert isinstance(result.exception, CapacityError)


def test_the_help_needs_neither_torch_nor_numpy() -> None:
    """Help must answer at once: the heavy packages belong to the commands that use them."""
    script = (
        "import sys; from click.testing import CliRunner; from kvcache_factory.cli import main;"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0;"
        "assert CliRunner().invoke(main, ['bench', '--help']).exit_code == 0;"
        "print(sorted({'torch', 'numpy', 'numba', 'transformers', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
