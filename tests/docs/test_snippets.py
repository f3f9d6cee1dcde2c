"""What the documentation shows is run: Python as it stands, console lines up to their help, links to their files."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import pytest

from kvcache_factory.cli import main
from kvcache_factory.demo.cross_engine import find_vllm_python
from kvcache_factory.errors import ConfigError
from kvcache_factory.integration.vllm.adapter import CONNECTOR
from kvcache_factory.integration.vllm.settings import ENV_PREFIX, FROM_ENV, Settings, read_settings

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


def needs_vllm(snippet: Snippet) -> bool:
    return re.search(r"^\s*(from|import) vllm\b", snippet.text, re.MULTILINE) is not None


@pytest.mark.parametrize("snippet", [s for s in snippets("python") if needs_vllm(s)], ids=str)
def test_vllm_snippets_run_in_vllms_environment(snippet: Snippet, tmp_path: Path) -> None:
    """Each in a process of its own; where there is no vLLM, at least every name of ours that it uses is there."""
    for node in ast.walk(ast.parse(snippet.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcache_factory"):
            module = importlib.import_module(str(node.module))
            assert {alias.name for alias in node.names} <= {*dir(module), *getattr(module, "__all__", ())}
    try:
        python = find_vllm_python()
    except ConfigError as error:
        note = ROOT / ".venv-vllm" / "unavailable"
        pytest.skip(note.read_text().strip() if note.exists() else str(error))
    program = tmp_path / "snippet.py"
    program.write_text(snippet.text, encoding="utf-8")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [str(python), str(program)],
        cwd=tmp_path,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{snippet}:\n{done.stderr[-3000:]}"


def test_the_settings_of_vllm_are_those_of_the_page() -> None:
    """Names, variables and defaults in the table are the connector's; how a manager is handed over is nobody's."""
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \| (?:`(\w+)` )?\|$", page.split("## Settings")[1], re.MULTILINE)
    ours = {"attached", "attached_pid", "control", "sleeping"}
    assert {name for name, _, _ in rows} == {f.name for f in msgspec.structs.fields(Settings)} - ours
    assert {variable for *_, variable in rows if variable} == {ENV_PREFIX + name.upper() for name in FROM_ENV}
    for name, default, _ in rows:
        value = getattr(Settings(), name)
        if not isinstance(value, msgspec.Struct):
            shown = f"{value:g}" if isinstance(value, (int, float)) else value or "none"
            assert default.strip("`") == shown, name


def test_servers_are_given_a_configuration_that_vllm_takes() -> None:
    """The JSON of every --kv-transfer-config is JSON, names our connector, and its settings are settings."""
    found = [json.loads(text) for s in snippets("console") for text in re.findall(r"config '(\{.*\})'", s.text)]
    assert found
    for config in found:
        assert config.items() >= CONNECTOR.items()
        assert config["kv_load_failure_policy"] == "recompute"
        assert read_settings(config.get("kv_connector_extra_config", {}), {}).memory_gb > 0


@pytest.mark.parametrize("snippet", [s for s in snippets("python") if not needs_vllm(s)], ids=str)
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
