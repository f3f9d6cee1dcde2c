"""Where the membership of a cluster is kept: a few small values that several programs read and change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module

from ..errors import ConfigError

TIMEOUT_S = 2.0
"""Longest that one call may take."""


class MetaService(ABC):
    """Values by key, with compare-and-set and values that vanish by themselves.

    Every call may raise StoreError with reason ``unavailable``.  Used by one thread at a time.
    """

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value; None when there is none."""

    @abstractmethod
    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Set the value to *new* if it is *old* still (None: if there is none); False when it is not."""

    @abstractmethod
    def put(self, key: str, value: bytes, ttl_s: int | None = None) -> None:
        """Set a value, for *ttl_s* seconds if that is given."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a value, if there is one."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect; idempotent."""


_BACKENDS = {"REDIS": (".redis_meta", "RedisMetaService"), "ETCD": (".etcd_meta", "EtcdMetaService")}


def meta_service(backend: str, url: str) -> Callable[[], MetaService]:
    """What opens the meta service *backend* at *url*.

    Raises ConfigError for another backend or a URL that is none.
    """
    if backend.upper() not in _BACKENDS:
        raise ConfigError(f"there is no meta service {backend!r}; use {' or '.join(_BACKENDS)}")
    module, name = _BACKENDS[backend.upper()]
    service: type[MetaService] = getattr(import_module(module, __package__), name)
    made: Callable[[], MetaService] = service.at(url)  # type: ignore[attr-defined]
    return made
