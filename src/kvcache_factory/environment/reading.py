"""Values of the table from texts: of the environment, or of arguments that carry the same names."""

from __future__ import annotations

import difflib
import logging
import math
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ConfigError
from .table import PREFIX, ROW_OF, ROWS, Environment, Row

_log = logging.getLogger("kvcache_factory")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_NAMES = {row.name: row for row in ROWS}
_OLDER = {PREFIX + older.upper(): row for row in ROWS for older in row.older}


class Reading(msgspec.Struct, frozen=True):
    """What was said: *given* values by field, *errors* about wrong ones by field, *notes* about names that are none."""

    given: dict[str, Any]
    errors: dict[str, str]
    notes: list[str]


def read_environment(environ: Mapping[str, str]) -> Reading:
    """The values that *environ* gives; an error is a sentence that names variable, value and what is allowed."""
    given: dict[str, Any] = {}
    errors: dict[str, str] = {}
    notes: list[str] = []
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        row = _NAMES.get(name) or _OLDER.get(name)
        if row is None:
            notes.append(unknown(name, [*_NAMES, *_OLDER]))
        elif name not in _NAMES and row.name in environ:
            notes.append(f"{name} is not read because {row.name} is set")
        else:
            try:
                given[row.field] = parse(row, environ[name], name)
            except ConfigError as error:
                errors[row.field] = str(error)
    return Reading(given, errors, notes)


def unknown(name: str, known: list[str]) -> str:
    """A sentence about a name that means nothing, with the nearest one that does."""
    near = difflib.get_close_matches(name, known, 1, 0.0)
    return f"{name} is no variable that is read; did you mean {near[0]}?"


def parse(row: Row, value: Any, name: str = "") -> Any:
    """A text, or a value of the row's type, as that type; ConfigError naming *name* (by default the variable)."""
    name = name or row.name
    try:
        typed = _typed(row, value)
        return getattr(msgspec.convert({row.field: typed}, Environment), row.field)
    except (ValueError, OverflowError):  # msgspec.ValidationError is one
        shown = row.shown(value) if not row.secret or "://" in str(value) else "***"
        raise ConfigError(f"{name}={shown!r}: use {row.allowed}") from None


def _typed(row: Row, value: Any) -> Any:
    kind = row.type
    if not isinstance(value, str):
        return float(value) if kind is float and type(value) is int else value
    text = value.strip()
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]
    if kind is int:
        return int(text)
    if kind is float:
        if not math.isfinite(float(text)):
            raise ValueError(text)
        return float(text)
    if typing.get_origin(kind) is typing.Literal:
        return next((word for word in typing.get_args(kind) if word.lower() == text.lower()), text)
    return text if row.ok else value


def read_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Values given by the names of the table's fields; ConfigError for a wrong one."""
    return {name: parse(ROW_OF[name], value, name) for name, value in arguments.items()}


def warn(notes: list[str]) -> None:
    """Log what may be a mistake and stops nothing."""
    for note in notes:
        _log.warning("%s", note)
