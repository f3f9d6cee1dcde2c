"""Connectors: how blocks reach a store elsewhere, by the interface that AIBrix documents.  Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..status import Status, StatusCodes
    from .base import (
        Connector,
        ConnectorConfig,
        ConnectorFeature,
        ConnectorOptions,
        ConnectorRegisterDescriptor,
        MemoryRegion,
        OptionsConnector,
        options_from_env,
    )
    from .names import connector_class, create_connector, known_connectors, register_connector

_HOMES = {
    ".base": (
        "Connector",
        "ConnectorConfig",
        "ConnectorFeature",
        "ConnectorOptions",
        "ConnectorRegisterDescriptor",
        "MemoryRegion",
        "OptionsConnector",
        "options_from_env",
    ),
    ".names": ("connector_class", "create_connector", "known_connectors", "register_connector"),
    "..status": ("Status", "StatusCodes"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Connector",
    "ConnectorConfig",
    "ConnectorFeature",
    "ConnectorOptions",
    "ConnectorRegisterDescriptor",
    "MemoryRegion",
    "OptionsConnector",
    "Status",
    "StatusCodes",
    "connector_class",
    "create_connector",
    "known_connectors",
    "options_from_env",
    "register_connector",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
