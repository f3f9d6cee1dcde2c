"""``kvcache-factory env``: what holds, who said so, and whether it can work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcache_factory.cli import main
from kvcache_factory.environment import PREFIX, ROWS


def run(*arguments: str, code: int = 0, **environ: str) -> Any:
    """Run the command in an environment with these variables only; names without the prefix."""
    clean: dict[str, str | None] = {row.name: None for row in ROWS}
    result = CliRunner().invoke(main, ["env", *arguments], env=clean | {PREFIX + k: v for k, v in environ.items()})
    assert result.exit_code == code, result.output
    return result


def rows(*arguments: str, **environ: str) -> dict[str, dict[str, Any]]:
    """Rows of the JSON output by variable, the prefix cut off."""
    document = json.loads(run("--json", *arguments, **environ).stdout)
    assert document["command"] == "env"
    return {row["name"].removeprefix(PREFIX): row for row in document["rows"]}


def test_every_variable_has_a_row() -> None:
    """Name, value, source and meaning of each, the documented default where nobody said anything."""
    found = rows()
    assert list(found) == [row.field.upper() for row in ROWS]
    assert all(list(row) == ["name", "value", "source", "meaning"] and row["meaning"] for row in found.values())
    assert found["L1_CACHE_CAPACITY_GB"]["value"] == 10
    assert {row["source"] for row in found.values()} == {"default"}


def test_sources_are_told_apart(tmp_path: Path) -> None:
    """File over default, environment over file; `--set` leaves the defaults out."""
    file = tmp_path / "cache.toml"
    text = 'key_builder = "RAW"\neviction_policy = "lru"\nbackend = { type = "cpu", size_gb = 3 }\n'
    file.write_text(text, encoding="utf-8")
    found = rows("--file", str(file), "--set", L1_CACHE_CAPACITY_GB="4")
    values = {name: (row["value"], row["source"]) for name, row in found.items()}
    assert values == {
        "L2_CACHE_KEY_BUILDER": ("RAW", "file"),
        "L1_CACHE_EVICTION_POLICY": ("LRU", "file"),
        "L1_CACHE_CAPACITY_GB": (4, "environment"),
    }


def test_the_table_is_for_people() -> None:
    """Names without the prefix, values as they are written."""
    text = run("--set", DEVICE="CUDA", PRISKV_PASSWORD="hush").stdout
    assert "DEVICE" in text
    assert "cuda" in text
    assert "hush" not in text


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"L1_CACHE_CAPACITY_GB": "much"}, "L1_CACHE_CAPACITY_GB='much': use a number above 0"),
        ({"L1_CACHE_ENABLED": "0"}, "both tiers off"),
    ],
)
def test_check_fails_on_an_error(environ: dict[str, str], message: str) -> None:
    """A wrong value or a combination that cannot work: named on stderr, exit code 1; without --check only named."""
    assert message in run("--check", code=1, **environ).stderr
    assert message in run(code=0, **environ).stderr


def test_check_passes_what_only_has_no_effect() -> None:
    """A note is no error."""
    result = run("--check", HPKV_REMOTE_PORT="7", NO_SUCH_THING="1")
    assert "HPKV_REMOTE_PORT has no effect" in result.stderr
    assert "NO_SUCH_THING is no variable" in result.stderr


def test_a_file_that_is_not_there_is_one_clean_line() -> None:
    """As everywhere in the command line."""
    assert "No such file" in run("--file", "nowhere.toml", code=2).stderr
