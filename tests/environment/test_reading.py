"""Texts become typed values, or an error that names variable, value and what is allowed."""

from __future__ import annotations

import contextlib
import logging
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory import CacheManager, ConfigError
from kvcache_factory.environment import PREFIX, ROWS, Row
from kvcache_factory.environment.reading import parse, read_environment
from kvcache_factory.environment.table import ROW_OF

BOOLEANS = [row for row in ROWS if row.type is bool]
NUMBERS = [row for row in ROWS if row.type in (int, float)]
CHOICES = [row for row in ROWS if typing.get_origin(row.type) is typing.Literal]


@pytest.mark.parametrize("row", BOOLEANS, ids=lambda row: row.field)
def test_booleans_are_written_in_eight_ways(row: Row) -> None:
    """1/true/yes/on and 0/false/no/off in any case; anything else, nothing included, is refused."""
    for text in ("1", "true", "YES", " On "):
        assert parse(row, text) is True
    for text in ("0", "False", "no", "OFF"):
        assert parse(row, text) is False
    for text in ("", "2", "t", "enabled", "None"):
        with pytest.raises(ConfigError, match=f"{row.name}={text!r}: use 1, true, yes or on; 0, false, no or off"):
            parse(row, text)


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.field)
@pytest.mark.parametrize("text", ["", "x", "nan", "-7", "1e400", "0x10"])
def test_numbers_that_are_none_are_refused(row: Row, text: str) -> None:
    """The message has the variable, the value, and the bounds in words."""
    with pytest.raises(ConfigError) as caught:
        parse(row, text)
    assert str(caught.value) == f"{row.name}={text!r}: use {row.allowed}"
    assert "number" in row.allowed


@pytest.mark.parametrize("row", CHOICES, ids=lambda row: row.field)
def test_choices_are_read_in_any_case(row: Row) -> None:
    """Every allowed word in capitals and not; a typo is no choice (it acted as EVICTED elsewhere)."""
    for word in typing.get_args(row.type):
        assert parse(row, word.upper()) == word
        assert parse(row, word.lower()) == word
    with pytest.raises(ConfigError, match=row.name):
        parse(row, "HOTT")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.field)
def test_every_default_is_read_back_from_its_text(row: Row) -> None:
    """What the documentation shows as default can be set and means the same."""
    text = str(int(row.default)) if isinstance(row.default, bool) else str(row.default)
    assert parse(row, text) == row.default


@given(st.sampled_from(ROWS), st.text(max_size=12))
def test_any_text_is_a_value_of_the_type_or_a_config_error(row: Row, text: str) -> None:
    """Nothing else comes out, whatever stands in the environment."""
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(row, text), type(row.default))


def test_secrets_are_in_no_message() -> None:
    """Not even when the value is refused."""
    row = ROW_OF["priskv_password"]
    with pytest.raises(ConfigError) as caught:
        parse(row, typing.cast(typing.Any, b"hush"))
    assert "hush" not in str(caught.value)


def test_an_unknown_name_is_warned_about_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt knob must not do nothing silently; other programs' variables are nobody's business."""
    environ = {PREFIX + "L1_CACHE_CAPACTY_GB": "4", "AIBRIX_OTHER": "1", "PATH": "/"}
    with caplog.at_level(logging.WARNING, "kvcache_factory"):
        CacheManager.from_env(environ)
    assert [record.getMessage() for record in caplog.records] == [
        f"{PREFIX}L1_CACHE_CAPACTY_GB is no variable that is read; did you mean {PREFIX}L1_CACHE_CAPACITY_GB?"
    ]


def test_all_wrong_values_are_said_at_once() -> None:
    """Who mends a deployment does not want to start it once for every mistake."""
    with pytest.raises(ConfigError) as caught:
        CacheManager.from_env({PREFIX + "DEVICE": "tpu", PREFIX + "BLOCK_SIZE": "0"})
    assert f"{PREFIX}DEVICE='tpu'" in str(caught.value)
    assert f"{PREFIX}BLOCK_SIZE='0'" in str(caught.value)


def test_older_names_are_read_where_the_newer_has_nothing() -> None:
    """PRIS_* is what PRISKV_* was called."""
    assert read_environment({PREFIX + "PRIS_REMOTE_PORT": "7"}).given == {"priskv_remote_port": 7}
    both = read_environment({PREFIX + "PRIS_REMOTE_PORT": "7", PREFIX + "PRISKV_REMOTE_PORT": "8"})
    assert both.given == {"priskv_remote_port": 8}
    assert both.notes == [f"{PREFIX}PRIS_REMOTE_PORT is not read because {PREFIX}PRISKV_REMOTE_PORT is set"]
