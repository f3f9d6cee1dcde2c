"""Small caches above a MOCK connector, and what tests of the remote level ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcache_factory import HierarchicalBackend, RemoteBackend
from kvcache_factory.backend import Level
from kvcache_factory.connector import mock
from kvcache_factory.engine.ledger import Event
from kvcache_factory.engine.remote import RemoteLevel
from kvcache_factory.manager import CacheManager
from kvcache_factory.testing import FakeEngine, SmallCache, sized_level, tiny_identity, tiny_spec

SHARE = "tests"
SPEC = tiny_spec()
TOKENS = list(range(100, 132))
"""Eight blocks of four tokens."""
PATIENT = {"per_token_timeout_ms": 60_000.0, "max_wait_s": 60.0}


class RemoteCache(SmallCache):
    """A small cache above MOCK, with what tests ask of it."""

    def there(self) -> dict[bytes, bytes]:
        """What the remote store holds."""
        return mock._shared.get(SHARE, {})

    def fetch(self, tokens: Any = TOKENS) -> None:
        """Ask the remote level and wait for the end."""
        ticket = self.space.prefetch(self.space.chain(tokens))
        assert ticket is None or ticket.wait(60)

    def settled(self) -> dict[bytes, bytes]:
        """What the remote store holds when all background work has ended."""
        assert self.manager.wait(60)
        return self.there()

    @property
    def level(self) -> RemoteLevel:
        """The remote level."""
        level = self.manager._chain.remote
        assert level is not None
        return level

    def total(self, event: Event, reason: str | None = None) -> int:
        """Blocks counted for the remote level."""
        return self.manager._ledger.total(event, "remote", reason).blocks


def remote_cache(
    *levels: Level,
    manager: dict[str, Any] | None = None,
    prepare: Callable[[RemoteLevel], object] | None = None,
    **options: Any,
) -> RemoteCache:
    """A cache of 64 blocks, or of other *levels*, above MOCK; *prepare* sees the level before anything is opened."""
    connector = {"share": SHARE, **options.pop("connector", {})}
    backend = RemoteBackend(connector="MOCK", options=connector, **{**PATIENT, **options})
    above = list(levels) or [sized_level(64, SPEC)]
    made = CacheManager(HierarchicalBackend([*above, backend]), **(manager or {}))
    if prepare is not None:
        assert made._chain.remote is not None
        prepare(made._chain.remote)
    return RemoteCache(made, made.register(SPEC, tiny_identity(SPEC)), FakeEngine(SPEC, 64))


@contextmanager
def caches() -> Iterator[Callable[..., RemoteCache]]:
    """Opens caches; at the end none has broken an invariant, and all are closed."""
    made: list[RemoteCache] = []

    def make(*levels: Level, **options: Any) -> RemoteCache:
        made.append(remote_cache(*levels, **options))
        return made[-1]

    try:
        yield make
        for cache in made:
            assert cache.manager.wait(60)
            assert cache.manager.check() == []
    finally:
        for cache in made:
            cache.manager.close()
        mock.forget(SHARE)
