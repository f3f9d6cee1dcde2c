"""The command group: lazy, self-explaining, and polite about errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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


@pytest.mark.parametrize("name", ["missing/plot.png", "plot.doc"])
@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["load", "--duration", "1h"],
        ["plan", "synthetic:chat", "--model", "llama-3-8b"],
        ["quality"],
        ["replay", "synthetic:chat"],
    ],
    ids=lambda words: words[0],
)
def test_a_plot_that_cannot_be_written_is_told_before_anything_runs(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the hours whose result is then lost."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [*command, "--plot", name])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"kvcache-factory: the plot cannot be written to {name}: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["quality", "reuse", "calibrate"])
def test_a_text_with_nothing_in_it_is_an_error(command: str, tmp_path: Path) -> None:
    """Rather than figures for another text."""
    (tmp_path / "text.txt").write_text(" \n")
    result = CliRunner().invoke(main, [command, "--text", str(tmp_path / "text.txt")])
    assert result.exit_code == 2
    assert "there is no text in it" in result.stderr


def test_a_group_without_a_command_shows_its_help() -> None:
    """Whoever types half a command sees how it goes on."""
    result = CliRunner().invoke(main, ["bench"])
    assert result.output.startswith("Usage:")


def fail() -> None:
    raise CapacityError("a slab needs at least one slot,\nnot 0; raise size_gb")


def miss_transformers() -> None:
    raise ModuleNotFoundError("No module named 'transformers.cache_utils'", name="transformers.cache_utils")


def miss_something() -> None:
    raise ModuleNotFoundError("No module named 'something'", name="something")


def interrupt() -> None:
    raise KeyboardInterrupt


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
def test_an_optional_package_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is imported; a package that is none of ours stays the error that it is."""
    monkeypatch.delenv("KVCACHE_FACTORY_DEBUG", raising=False)
    command = sys.modules["kvcache_factory.cli.failing"].failing
    command.callback = miss_transformers
    result = CliRunner().invoke(main, ["failing"])
    assert result.exit_code == 2
    assert "pip install 'kvcache-factory[transformers]'" in result.stderr
    assert result.stderr.count("\n") == 1
    command.callback = miss_something
    assert isinstance(CliRunner().invoke(main, ["failing"]).exception, ModuleNotFoundError)


@pytest.mark.usefixtures("failing")
def test_ctrl_c_has_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script must not take it for a finding of the command, which is 1."""
    monkeypatch.delenv("KVCACHE_FACTORY_DEBUG", raising=False)
    sys.modules["kvcache_factory.cli.failing"].failing.callback = interrupt
    result = CliRunner().invoke(main, ["failing"])
    assert (result.exit_code, result.stderr) == (130, "kvcache-factory: stopped by Ctrl-C\n")


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
