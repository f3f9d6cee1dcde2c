"""Continuous profiling: samples of all Python threads, pushed to a Pyroscope server by its own agent."""

from __future__ import annotations

import logging
import threading

from ..errors import MissingDependencyError

APPLICATION = "aibrix.kvcache"
"""Name under which profiles are found; the one that existing dashboards ask for."""
SAMPLES_PER_S = 100

_log = logging.getLogger("kvcache_factory")
_lock = threading.Lock()
_running: list[Profiling] = []


class Profiling:
    """A share in this process's profiling; the agent runs for as long as somebody has one."""

    def __init__(self, server: str) -> None:
        self.server = server

    def end(self) -> None:
        """Give the share back; the last one pushes what is left and stops the agent.  Idempotent."""
        with _lock:
            if self not in _running:
                return
            _running.remove(self)
            if not _running:
                import pyroscope

                pyroscope.shutdown()


def profile(server: str) -> Profiling:
    """Push profiles of this process to *server*, ``http[s]://host:port``, until the share that is returned has ended.

    There is one agent in a process: while it runs, another server is not pushed to, and the log says so.  A server that
    does not answer costs nothing but the agent's own samples.  Raises MissingDependencyError without pyroscope-io.
    """
    try:
        import pyroscope
    except ImportError:
        raise MissingDependencyError.of("pyroscope-io", "profiling", "profiling (PROFILING_ENABLED)") from None
    share = Profiling(server)
    with _lock:
        if not _running:
            pyroscope.configure(
                application_name=APPLICATION, server_address=server, sample_rate=SAMPLES_PER_S, gil_only=False
            )
        elif _running[0].server != server:
            _log.warning(
                "profiles go to %s already, and not to %s: a process has one agent", _running[0].server, server
            )
        _running.append(share)
    return share
