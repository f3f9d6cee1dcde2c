"""From the description of a cluster to its connector."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ..connector.base import Connector, ConnectorConfig, OptionsConnector
from ..connector.names import connector_class, create_connector
from ..errors import ConfigError
from .connector import ClusterConnector
from .membership import Node
from .meta_service import meta_service
from .placement import placement_class

KEYS = {"INFINISTORE": "kvcache_nodes", "HPKV": "hpkv_cluster_metadata", "PRISKV": "priskv_cluster_metadata"}
"""Keys in use for the memberships of some systems."""
_PLACES = {
    "INFINISTORE": ("host_addr", "service_port"),
    "HPKV": ("remote_addr", "remote_port"),
    "PRISKV": ("remote_addr", "remote_port"),
}
"""Options of connectors that say where a server is."""


class MetaServiceBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the membership of a cluster is kept."""

    backend: str
    """``"REDIS"`` or ``"ETCD"``."""
    url: str
    """``redis://[user:password@]host:port[/database]``, or ``http://host:port`` of etcd; not shown."""
    key: str = ""
    """Key of the membership; by default the one in use for the connector, where it has one."""
    refresh_interval_s: float = 30.0
    """Seconds between two looks at it; 0: it is read once."""
    placement: str = "SIMPLE"
    """Rule by which keys belong to members."""

    def __post_init__(self) -> None:
        if self.backend.upper() not in ("REDIS", "ETCD"):
            raise ConfigError(f"MetaServiceBackend(backend={self.backend!r}): use 'REDIS' or 'ETCD'")
        msgspec.structs.force_setattr(self, "backend", self.backend.upper())
        schemes = ("redis", "rediss", "unix") if self.backend == "REDIS" else ("http", "https")
        if urlsplit(self.url).scheme not in schemes:  # the value may hold a password
            raise ConfigError(f"MetaServiceBackend(url=...): say where {self.backend} is, as {schemes[0]}://host:port")
        if not 0 <= self.refresh_interval_s < float("inf"):
            raise ConfigError(
                f"MetaServiceBackend(refresh_interval_s={self.refresh_interval_s!r}): give seconds, or 0 to read once"
            )
        placement_class(self.placement)

    def __repr__(self) -> str:
        url = re.sub(r"//.*@", "//***@", self.url)
        return f"MetaServiceBackend(backend={self.backend!r}, url={url!r}, key={self.key!r})"


def open_cluster(
    config: ConnectorConfig, options: Mapping[str, Any] | None, meta: MetaServiceBackend
) -> ClusterConnector:
    """The unopened connector of a cluster of *config*'s connectors; *options* hold for every member.

    Raises ConfigError when there is no key for the membership, or no such connector.
    """
    name = config.backend_name
    short = {"PRIS": "PRISKV"}.get(name.upper(), name.upper()) if ":" not in name else name
    key = meta.key or KEYS.get(short, "")
    if not key:
        raise ConfigError(f"a cluster of {name} needs the key of its membership: MetaServiceBackend(key=...)")

    options_of_places(short)

    def make(node: Node) -> Connector[bytes, Any]:
        return create_connector(config, member_options(short, options or {}, node))

    sample = create_connector(config, options)
    shorter = isinstance(sample, OptionsConnector) and sample.shorter_values
    opened = meta_service(meta.backend, meta.url)
    return ClusterConnector(make, sample.feature, opened, key, meta.refresh_interval_s, meta.placement, shorter)


def member_options(connector: str, options: Mapping[str, Any], node: Node) -> dict[str, Any]:
    """Options of the connector to one member: those of all, the place of this one, and what its entry says."""
    if connector == "REDIS":
        parts = urlsplit(options.get("url", "redis://127.0.0.1"))
        access, at, _ = parts.netloc.rpartition("@")
        place = {"url": parts._replace(netloc=f"{access}{at}{node.place}").geturl()}
    else:
        addr, port = options_of_places(connector)
        place = {addr: node.addr, port: node.port}
    known = _options(connector)
    own = {name: value for name, value in node.fields if known is None or name in known}
    return {**options, **place, **own}


def options_of_places(connector: str) -> tuple[str, str]:
    """Names of the options that say where a server is; ConfigError for a connector that has none."""
    addr, port = _PLACES.get(connector, ("addr", "port"))
    known = _options(connector)
    if connector != "REDIS" and known is not None and not {addr, port} <= set(known):
        raise ConfigError(
            f"a meta service lists servers, but {connector} goes to none by address; leave the meta service out"
        )
    return addr, port


def _options(connector: str) -> tuple[str, ...] | None:
    """Options of a connector; None where they are not known."""
    return getattr(getattr(connector_class(connector), "Options", None), "__struct_fields__", None)
