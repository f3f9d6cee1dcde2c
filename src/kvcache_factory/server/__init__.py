"""The page and the control port: metrics, health, state and actions of the managers of this process.

It needs the extra ``server`` and is started by ``CacheManager(enable_metrics=True, metrics_port=...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..observe.port import Serving


def serve(host: str, number: int, managers: Callable[[], dict[str, Any]]) -> Serving:
    """Serve *managers* (by label) on *host*, port *number*; 0: any that is free.  Raises OSError."""
    from .run import serve as run  # uvicorn is imported where it is used

    return run(host, number, managers)
