"""Managers from the environment and from files: defaults < file < environment < arguments."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ..config import ManagerConfig, parse_config
from ..connector.names import check_name
from ..errors import ConfigError
from .compose import DOCUMENTED, Draft, check_needs, check_policy, options_of_others
from .files import known_presets, read_file
from .reading import read_arguments, read_environment, warn
from .table import PREFIX, ROW_OF, ROWS, Environment, Row

__all__ = [
    "PREFIX",
    "ROWS",
    "Environment",
    "Explanation",
    "Row",
    "Setting",
    "compose",
    "explain",
    "known_presets",
    "read_environment",
    "read_file",
]


class Setting(msgspec.Struct, frozen=True):
    """One variable as it stands: its value, who said so, and its meaning."""

    name: str
    value: Any
    source: Literal["default", "file", "environment"]
    meaning: str


class Explanation(msgspec.Struct, frozen=True):
    """All variables, sentences about what is wrong, and about what has no effect."""

    settings: list[Setting]
    errors: list[str]
    notes: list[str]


def compose(
    environ: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[ManagerConfig, dict[str, Any]]:
    """A configuration, and those of the *arguments* that are the constructor's own, which nothing else overrides.

    *environ* is ``os.environ`` unless given; without *file* the documented defaults are below it.  Each of *arguments*
    is named like a field of the table or like an argument of :class:`CacheManager`.  Raises ConfigError naming
    variable, value and what is allowed; logs a warning about names and settings that have no effect.
    """
    given = dict(arguments or {})
    own = {name: given.pop(name) for name in list(given) if name in _OWN}
    wrong = next((name for name in given if name not in ROW_OF), None)
    if wrong is not None:
        near = difflib.get_close_matches(wrong, [*ROW_OF, *_OWN], 1)
        raise ConfigError(f"{wrong} is no argument" + (f"; did you mean {near[0]}?" if near else ""))
    values = read_arguments(given)
    reading = read_environment(os.environ if environ is None else environ)
    errors = [error for field, error in reading.errors.items() if field not in values]
    if errors:
        raise ConfigError("; ".join(errors))
    draft = Draft(DOCUMENTED if file is None else _checked(file))
    draft.apply({**reading.given, **values})
    check_policy(draft, {**reading.given, **values})
    check_needs(draft)
    read = options_of_others(draft, os.environ if environ is None else environ, "l2_cache_backend" in reading.given)
    warn([*_without(reading.notes, read), *draft.notes])
    return parse_config(draft.data()), own


def explain(environ: Mapping[str, str] | None = None, file: str | os.PathLike[str] | None = None) -> Explanation:
    """Each variable as it stands, and what is wrong or may be; a file that cannot be read is a ConfigError."""
    reading = read_environment(os.environ if environ is None else environ)
    base = _checked(file) if file is not None else None
    below, errors, read = Draft(base or {}), list(reading.errors.values()), set[str]()
    draft = Draft(DOCUMENTED if base is None else base)
    try:
        draft.apply(reading.given)
        check_policy(draft, reading.given)
        check_needs(draft)
        read = options_of_others(draft, os.environ if environ is None else environ, "l2_cache_backend" in reading.given)
        parse_config(draft.data())
    except ConfigError as error:
        errors.append(str(error))
    settings = []
    for row in ROWS:
        said = None if base is None else below.value(row)
        if row.field in reading.errors:
            wrong = reading.errors[row.field].partition("=")[2].partition(": use ")[0].strip("'")
            setting = Setting(row.name, wrong, "environment", row.meaning)
        elif row.field in reading.given:
            setting = Setting(row.name, row.shown(reading.given[row.field]), "environment", row.meaning)
        elif said is not None:
            setting = Setting(row.name, row.shown(said), "file", row.meaning)
        else:
            setting = Setting(row.name, row.default, "default", row.meaning)
        settings.append(setting)
    return Explanation(settings, errors, [*_without(reading.notes, read), *draft.notes])


def _without(notes: list[str], read: set[str]) -> list[str]:
    """Notes but those about variables that were *read* after all."""
    return [note for note in notes if note.partition(" ")[0] not in read]


def _checked(file: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file says, which is a configuration also without what the environment adds."""
    data = read_file(file)
    try:
        parse_config(data)
        check_policy(draft := Draft(data), {})
        if draft.remote is not None:
            check_name(draft.remote["connector"])
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(file)}: {error}") from None
    return data


_OWN = (*ManagerConfig.__struct_fields__, "process_group")
