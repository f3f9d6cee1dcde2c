"""REDIS: the membership in a key of a Redis server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from ..connector.redis import RedisOptions, redis_access
from ..connector.resp import Access, Address, RespConnection, ServerError
from ..errors import StoreError
from .meta_service import TIMEOUT_S, MetaService

_REPLACE = b"if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) return 1 end return 0"


class RedisMetaService(MetaService):
    """A Redis server; of several addresses in the URL the first that answers."""

    def __init__(self, seeds: list[Address], access: Access) -> None:
        self._seeds = seeds
        self._access = msgspec.structs.replace(access, timeout_s=TIMEOUT_S)
        self._connection: RespConnection | None = None

    @classmethod
    def at(cls, url: str) -> Callable[[], RedisMetaService]:
        """What opens the service at ``redis://[user:password@]host[:port][/database]``; ConfigError for another URL."""
        seeds, access = redis_access(RedisOptions(url=url))
        return lambda: cls(seeds, access)

    def get(self, key: str) -> bytes | None:
        value: bytes | None = self._ask("GET", key)
        return value

    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        if old is None:
            return self._ask("SET", key, new, "NX") is not None
        return bool(self._ask("EVAL", _REPLACE, 1, key, old, new))

    def put(self, key: str, value: bytes, ttl_s: int | None = None) -> None:
        self._ask("SET", key, value, *(() if ttl_s is None else ("EX", ttl_s)))

    def delete(self, key: str) -> None:
        self._ask("DEL", key)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, *words: bytes | str | int) -> Any:
        """One command; what has lost its connection meanwhile is tried once more."""
        fresh = self._connection is None
        try:
            return self._connected().ask(*words)
        except ServerError as error:
            raise self._failed(error) from error
        except OSError as error:
            self.close()
            if fresh or isinstance(error, TimeoutError):
                raise self._failed(error) from error
            return self._ask(*words)

    def _connected(self) -> RespConnection:
        if self._connection is None:
            *others, last = self._seeds
            for seed in others:
                with contextlib.suppress(OSError):
                    self._connection = RespConnection(seed, self._access)
                    return self._connection
            self._connection = RespConnection(last, self._access)
        return self._connection

    def _failed(self, error: Exception) -> StoreError:
        places = ", ".join(map(str, self._seeds))
        return StoreError(f"the meta service REDIS at {places} did not answer: {error}", reason="unavailable")
