"""The table holds every documented variable, with its documented default, and the page shows what the table says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcache_factory.connector import ConnectorOptions, connector_class, known_connectors
from kvcache_factory.connector.base import OptionsConnector, secret_fields
from kvcache_factory.environment import PREFIX, ROWS, Environment
from kvcache_factory.environment.table import ROW_OF, pair

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT.parent / "shared" / "reference" / "environment.md"


def documented() -> dict[str, str]:
    """Defaults by variable, in the words of the reference; empty where a cell names no single value for each."""
    found: dict[str, str] = {}
    for line in REFERENCE.read_text(encoding="utf-8").split("## Membership")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or not re.match(r"[A-Z0-9]", cells[0]) or cells[0] == "name":
            continue
        first, *others = cells[0].split(" / ")
        stem = first.split("_")[0]
        names = [first, *(stem + other if other.startswith("_") else other for other in others)]
        values = cells[1].split(" / ")
        values = values * len(names) if len(values) == 1 else values
        found |= dict(zip(names, values, strict=True))
    return found


@pytest.mark.skipif(not REFERENCE.exists(), reason="the reference pages are not beside this checkout")
def test_every_documented_variable_is_here_with_its_default() -> None:
    """A deployment moves over without editing a line: no name is missing, no default differs."""
    wanted = documented()
    assert len(wanted) > 55
    for name, text in wanted.items():
        row = ROW_OF[name.lower()]
        default = row.default
        shown = (
            str(int(default))
            if isinstance(default, bool)
            else f"{default:.10g}"
            if isinstance(default, float)
            else default
        )
        assert str(shown) == text.strip('"'), name


def test_the_page_shows_what_the_table_says() -> None:
    """docs/environment.md has a line for each variable: name, default, what is allowed, meaning."""
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    assert lines == [page_line(row) for row in ROWS]


def page_line(row: Any) -> str:
    """How the page shows a row; `python -m tests.environment.test_table` prints the whole table."""
    default = int(row.default) if isinstance(row.default, bool) else row.default
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"| `{row.field.upper()}` | {f'`{shown}`' if shown else ''} | {row.allowed} | {row.meaning} |"


def test_names_are_the_fields_in_capitals() -> None:
    """One rule maps a variable to its field, so none can be mapped twice."""
    assert [row.name for row in ROWS] == [PREFIX + field.upper() for field in Environment.__struct_fields__]
    older = [name for row in ROWS for name in row.older]
    assert len(set(older)) == len(older)
    assert not set(older) & set(Environment.__struct_fields__)


def test_unknown_fields_are_forbidden_and_defaults_are_allowed() -> None:
    """The table checks itself: its own defaults pass, a field that is none does not."""
    assert msgspec.convert({}, Environment) == Environment()
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"chunk": 1}, Environment)


def test_no_password_is_printed() -> None:
    """Neither alone nor inside an address."""
    text = repr(Environment(priskv_password="hush", meta_service_url="redis://user:hush@host:6379/0"))
    assert "hush" not in text
    assert "redis://***@host:6379/0" in text


@pytest.mark.parametrize(
    ("text", "expected"), [("4,0.1", (4, 0.1)), ("3", (3, 0.0)), ("0,1", (0, 1.0)), (" 2 , 0.5 ", (2, 0.5))]
)
def test_a_threshold_is_blocks_and_a_share(text: str, expected: tuple[int, float]) -> None:
    """A single value is the count only, as deployments write it."""
    assert pair(text) == expected


OPTIONS = {
    name: connector_class(name).Options
    for name, target in known_connectors().items()
    if isinstance(target, str) and target.startswith("kvcache_factory.")
    if issubclass(connector_class(name), OptionsConnector)
}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_options_of_connectors_are_those_of_the_table(name: str) -> None:
    """What the table calls an option of a connector is one, with the same default, and secret where that is."""
    options: type[ConnectorOptions] = OPTIONS[name]
    fields = {field.name: field.default for field in msgspec.structs.fields(options)}
    for row in ROWS:
        part, _, option = row.place.partition(".")
        if part == name:
            assert option in fields, row.name
            assert fields[option] == row.default, row.name
            assert not row.secret or option in secret_fields(options)


def test_every_option_of_a_shipped_connector_has_a_variable() -> None:
    """What can be said in Python can be said in the environment; `share` only means something inside a process."""
    places = {row.place for row in ROWS}
    wanted = {f"{name}.{field}" for name, options in OPTIONS.items() for field in options.__struct_fields__}
    assert wanted - places == {"MOCK.share"}


if __name__ == "__main__":
    print("\n".join(map(page_line, ROWS)))
