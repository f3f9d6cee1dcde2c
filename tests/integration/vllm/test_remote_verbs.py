"""What a client may do to the manager in an engine's process is what a manager offers, under the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvcache_factory import CacheManager
from kvcache_factory.integration.vllm.remote import handlers
from kvcache_factory.integration.vllm.settings import Settings


class There:
    """A manager in another process, without the process."""

    def __init__(self, manager: CacheManager) -> None:
        owner = SimpleNamespace(manager=manager, forget=manager.destroy_session)
        connector: Any = SimpleNamespace(scheduler=SimpleNamespace(owner=owner), awake=True)
        self.handlers = handlers(connector, Settings())

    def call(self, verb: str, *args: Any) -> Any:
        return self.handlers[verb](*args)


def test_a_client_passes_on_what_steers_a_manager() -> None:
    """Bypass, evict, drop a tier and reset reach the manager that has the blocks."""
    with CacheManager() as there, CacheManager() as client:
        client.follow(There(there))
        client.bypass()
        assert there.state()["bypassed"] is True
        client.bypass(False)
        assert there.state()["bypassed"] is False
        assert (client.evict(3), client.evict(3, "cpu"), client.drop_tier("cpu")) == (0, 0, 0)
        client.reset()
        assert client.state()["engines"][0]["name"] == "default"
        assert client.check() == []
