"""What the documentation shows is run: Python as it stands, console lines up to their help, links to their files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from kvcache_factory.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


class Snippet(NamedTuple):
    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(language: str) -> list[Snippet]:
    """All fenced blocks of a language in all pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Snippet(str(page.relative_to(ROOT)), text.count("\n", 0, match.start()) + 2, match[1]))
    return found


def commands() -> list[Snippet]:
    """All lines of console blocks that run our command."""
    names = ("kvcache-factory", "kvf")
    lines = []
    for block in snippets("console"):
        for offset, line in enumerate(block.text.splitlines()):
            words = line.removeprefix("$ ").split("#")[0].strip()
            if line.startswith("$ ") and words.split(" ")[0] in names:
                lines.append(Snippet(block.page, block.line + offset, words))
    return lines


@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_python_snippets_run(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who copies a snippet gets what the page says: every block runs by itself, its assertions included."""
    monkeypatch.chdir(tmp_path)
    code = compile("\n" * (snippet.line - 1) + snippet.text, str(ROOT / snippet.page), "exec")
    exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("snippet", commands(), ids=str)
def test_console_lines_are_commands_with_these_options(snippet: Snippet) -> None:
    """The command exists and knows every option that the page gives it; nothing is run."""
    words = shlex.split(snippet.text)[1:]
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        inner = command.get_command(click.Context(command), words.pop(0))
        assert inner is not None, f"{snippet}: no such command in {snippet.text!r}"
        command = inner
    known = {
        option
        for param in command.get_params(click.Context(command))
        for option in (*param.opts, *param.secondary_opts)
    }
    given = {word.split("=")[0] for word in words if word.startswith("-")}
    assert given <= known, f"{snippet}: {sorted(given - known)} in {snippet.text!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """A relative link names a file that is there."""
    text = page.read_text(encoding="utf-8")
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []
