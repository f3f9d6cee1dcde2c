"""A server in a daemon thread: it ends when it is told to, and with the process at the latest."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from ..errors import ConfigError
from ..observe.port import Serving
from . import token
from .app import make_app
from .history import History
from .hosts import is_local

STOP_S = 5.0


def serve(host: str, number: int, managers: Callable[[], dict[str, Any]]) -> Serving:
    """Serve *managers* (by label) on *host*, port *number*; 0: any that is free.  Raises OSError.

    Where no place for a token can be had, nothing that needs one is possible; reading works.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, number), family=family)
    try:
        port = int(listener.getsockname()[1])
        with contextlib.suppress(ConfigError):
            token.publish(port)
        history = History(managers)
        # Its log settings and its choice of an event loop would be the whole process's.
        config = uvicorn.Config(
            make_app(managers, history, lambda: token.read(port), is_local(host)),
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="asyncio",
            ws="none",
            server_header=False,
        )
        server = uvicorn.Server(config)
    except BaseException:
        listener.close()
        raise
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name=f"kvcache-factory-port-{port}", daemon=True
    )
    thread.start()
    history.start()

    def stop() -> None:
        history.stop()
        token.withdraw(port)
        server.should_exit = server.force_exit = True
        if thread is not threading.current_thread():
            thread.join(STOP_S)
        listener.close()

    return Serving((host, port), stop)
