"""`bench` runs one measurement and prints its rows; the measurements have their own tests."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from kvcache_factory.cli import main
from kvcache_factory.cli.bench import TABLES

NEEDED = {"l2": ("--connector", "MOCK", "--option", "share=x")}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_passes_its_options_on_and_prints_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--quick reaches the measurement, progress is offered, rows come out unchanged as JSON."""
    seen: dict[str, Any] = {}

    def run(*, progress: Any, quick: bool, **options: Any) -> list[dict[str, Any]]:
        progress(1, 2, "half")
        seen.update(options, quick=quick)
        return [{"case": "x", "ms": 1.5}]

    room = ModuleType(f"kvcache_factory.bench.{name}")
    setattr(room, f"run_{name}", run)
    monkeypatch.setitem(sys.modules, "kvcache_factory.bench", ModuleType("kvcache_factory.bench"))
    monkeypatch.setitem(sys.modules, room.__name__, room)
    result = CliRunner().invoke(main, ["bench", name, "--quick", "--json", *NEEDED.get(name, ())])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["command"] == f"bench {name}"
    assert printed["rows"] == [{"case": "x", "ms": 1.5}]
    assert seen == {"quick": True, **({"connector": "MOCK", "option": ("share=x",)} if name == "l2" else {})}
