"""What a Prometheus server says of a run, once it has scraped its end."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError

PATIENCE_S = 90.0
"""For the scrape after the end: longer than the minute that Prometheus leaves between two by default."""
POLL_S = 0.25


class Prometheus:
    """Asks the server at *url* for the series of one manager.

    Parameters
    ----------
    url:
        Where its HTTP API is: ``http://127.0.0.1:9090``.
    manager:
        The label ``manager``.
    """

    def __init__(self, url: str, manager: str) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"{url!r} is no address of a Prometheus server; write http://host:port")
        self._url = url.rstrip("/")
        self._manager = manager

    def now(self) -> float:
        """The server's clock, in seconds since 1970.  Raises ConfigError when nobody answers there."""
        return float(self._query("time()")[1])

    def wait_for_scrape(self, after: float, patience_s: float = PATIENCE_S) -> None:
        """Wait until the manager was scraped *after* that time of the server's clock; raises ConfigError."""
        ended = time.monotonic() + patience_s
        while not self._series(f"timestamp({self._named('up')}) > {after!r}"):
            if time.monotonic() > ended:
                raise ConfigError(
                    f"{self._url} has not scraped manager {self._manager!r} for {patience_s:g} s; add this process's "
                    "metrics port to static_configs of its scrape_configs, and give it that --metrics-port"
                )
            time.sleep(POLL_S)
        sources = self._series(self._named("up"))
        if len(sources) > 1:
            where = ", ".join(str(source["metric"].get("instance")) for source in sources)
            raise ConfigError(f"{self._url} knows several managers {self._manager!r}, at {where}; scrape one of them")

    def reader(self) -> Callable[..., float | None]:
        """Reads a metric, summed over series that have a label; None where there is none."""

        def read(name: str, label: str = "") -> float | None:
            for full in (f"{name}_total", name):
                series = self._series(self._named(full, label))
                if series:
                    total = sum(float(row["value"][1]) for row in series)
                    return int(total) if total.is_integer() else total
            return None

        return read

    def _named(self, name: str, label: str = "") -> str:
        more = f",{label}" if label else ""
        return f'kvcache_factory_{name}{{manager="{self._manager}"{more}}}'

    def _series(self, expression: str) -> list[dict[str, Any]]:
        return list(self._query(expression))

    def _query(self, expression: str) -> Any:
        url = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return json.loads(answer.read())["data"]["result"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"no Prometheus answers at {self._url}: {error}; is the address right?") from error
