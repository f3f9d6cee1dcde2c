"""Connectors by name: shipped ones, registered ones, those of installed packages, and any class by ``module:Class``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ..errors import ConfigError, instead_of
from .base import Connector, ConnectorConfig, OptionsConnector, make_options

ENTRY_POINTS = "kvcache_factory.connectors"
"""Group of entry points in which a package names its connectors."""

_SHIPPED = {
    "EIC": f"{__package__}.eic:EICConnector",
    "HPKV": f"{__package__}.hpkv:HPKVConnector",
    "INFINISTORE": f"{__package__}.infinistore:InfiniStoreConnector",
    "MOCK": f"{__package__}.mock:MockConnector",
    "PRISKV": f"{__package__}.priskv:PrisKVConnector",
    "REDIS": f"{__package__}.redis:RedisConnector",
    "ROCKSDB": f"{__package__}.rocksdb:RocksDBConnector",
    "SHFS": f"{__package__}.shfs:SharedFilesConnector",
}
_ALIASES = {"PRIS": "PRISKV"}
_registered: dict[str, str | type[Connector[Any, Any]]] = {}


def register_connector(name: str, target: str | type[Connector[Any, Any]]) -> None:
    """Make a connector known by *name*, any case: a class, or ``"module:Class"`` that is imported on first use.

    Raises ConfigError when the name is taken by another.
    """
    name = name.upper()
    if not name.isidentifier() or (not isinstance(target, type) and ":" not in target):
        raise ConfigError(f"register_connector({name!r}, {target!r}): give a word, and a class or 'module:Class'")
    taken = known_connectors().get(_ALIASES.get(name, name))
    if taken not in (None, target):
        raise ConfigError(f"the connector name {name!r} is taken by {taken}")
    _registered[name] = target


def known_connectors() -> dict[str, str | type[Connector[Any, Any]]]:
    """Every name and what it stands for; shipped and registered names win over those of installed packages."""
    found = {entry.name.upper(): entry.value for entry in entry_points(group=ENTRY_POINTS)}
    return {**found, **_registered, **_SHIPPED}


def check_name(name: str) -> str | type[Connector[Any, Any]]:
    """What a name, an alias or ``"module:Class"`` stands for, nothing being imported; ConfigError when for nothing."""
    if ":" in name:
        return name
    known = known_connectors()
    short = _ALIASES.get(name.upper(), name.upper())
    if short not in known:
        raise ConfigError(f"there is no connector {name!r}; {instead_of(short, known)} (or give 'module:Class')")
    return known[short]


def connector_class(name: str) -> type[Connector[Any, Any]]:
    """The class of a name, an alias or ``"module:Class"``.

    Raises ConfigError when there is none, MissingDependencyError when a package that its module needs is missing.
    """
    target = check_name(name)
    cls = _import(target) if isinstance(target, str) else target
    if not isinstance(cls, type) or not issubclass(cls, Connector):
        raise ConfigError(f"connector {name!r}: {target} is no subclass of kvcache_factory.connector.Connector")
    return cls


def create_connector(config: ConnectorConfig, options: Mapping[str, Any] | None = None) -> Connector[Any, Any]:
    """A connector, not yet open: from *options* or, with None, from the environment.

    A class without typed options of ours gets *options* as keyword arguments of its ``from_envs``.
    """
    cls = connector_class(config.backend_name)
    if options is None:
        return cls.from_envs(config.conn_id, config.executor)
    if issubclass(cls, OptionsConnector):
        return cls.from_options(config.conn_id, config.executor, make_options(cls.Options, options))
    return cls.from_envs(config.conn_id, config.executor, **options)


def _import(target: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"connector {target!r}: there is no module {error.name!r}") from error
    except AttributeError:
        raise ConfigError(f"connector {target!r}: module {module!r} has no {attribute!r}") from None
