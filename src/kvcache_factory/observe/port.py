"""The port on which managers are looked at.  All managers of a process that name the same one share it.

With the extra ``server`` it is the page and the control port of :mod:`kvcache_factory.server`, which lies above this
floor and is therefore found by its name; without, ``/metrics`` alone, by prometheus_client.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..errors import ConfigError

PAGE = "kvcache_factory.server"
NEEDED = ("starlette", "uvicorn")


class Serving(NamedTuple):
    """A server at work: where, and how to end it."""

    address: tuple[str, int]
    stop: Callable[[], object]


class Port:
    """One server and the managers that it shows, which it does not keep alive."""

    def __init__(self, host: str, number: int) -> None:
        self._managers: dict[int, weakref.ref[Any]] = {}
        self._serving = _serve(host, number, self.managers)
        self.key = (host, self.address[1])  # the one that was free, for whoever joins it by its number

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self._serving.address

    def managers(self) -> dict[str, Any]:
        """The managers that are there, by the value of their label ``manager``."""
        from .metrics import labelled

        there = [manager for ref in list(self._managers.values()) if (manager := ref()) is not None]
        return dict(labelled(there))

    def join(self, manager: Any) -> None:
        """Show *manager* until it leaves or nobody holds it."""
        number = id(manager)
        self._managers[number] = weakref.ref(manager)
        weakref.finalize(manager, self._left, number).atexit = False

    def leave(self, manager: Any) -> None:
        """Show *manager* no longer; the server ends with the last.  Idempotent."""
        self._left(id(manager))

    def disown(self) -> None:
        """Forget the managers, and leave the server to the process whose it is."""
        self._managers.clear()

    def _left(self, number: int) -> None:
        with _LOCK:
            if self._managers.pop(number, None) is None or self._managers:
                return
            _PORTS.pop(self.key, None)
        self._serving.stop()


_PORTS: dict[tuple[str, int], Port] = {}
_LOCK = threading.RLock()  # a manager may be collected while another joins


def join_port(manager: Any, host: str, number: int) -> Port:
    """Show *manager* on a port, opening it if that was not done yet; ConfigError when it cannot be opened."""
    with _LOCK:
        port = _PORTS.get((host, number)) if number else None
        if port is None:
            port = Port(host, number)
            _PORTS[port.key] = port
        port.join(manager)
        return port


def _disown() -> None:
    """In a forked child: no server runs here, and whoever held the lock is not here either."""
    global _LOCK
    _LOCK = threading.RLock()
    for port in _PORTS.values():
        port.disown()
    _PORTS.clear()


os.register_at_fork(after_in_child=_disown)


def has_page() -> bool:
    """Whether what the page needs is installed."""
    return all(find_spec(name) is not None for name in NEEDED)


def _serve(host: str, number: int, managers: Callable[[], dict[str, Any]]) -> Serving:
    try:
        if has_page():
            serving: Serving = import_module(PAGE).serve(host, number, managers)
            return serving
        return _serve_metrics(host, number, managers)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"metrics_port={number} cannot be opened on {host}: {error}; choose a port that is free, or "
            "metrics_port=None and mount manager.registry in a server of yours"
        ) from error


def _serve_metrics(host: str, number: int, managers: Callable[[], dict[str, Any]]) -> Serving:
    from prometheus_client import start_http_server

    from .metrics import registry_of_all

    server, thread = start_http_server(number, host, registry_of_all(managers))

    def end() -> None:
        server.shutdown()
        server.server_close()

    def stop() -> None:
        if thread is threading.current_thread():  # a manager was collected here: the loop cannot wait for itself
            threading.Thread(target=end, daemon=True).start()
            return
        end()
        thread.join()

    return Serving((host, server.server_port), stop)
