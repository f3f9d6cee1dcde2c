"""Prometheus: what :meth:`CacheManager.state` says, as series of the catalog.  Nothing is counted here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, make_asgi_app, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ..engine.ledger import MANAGER
from .catalog import CATALOG, PREFIX
from .series import Series, series_of

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

MOST_SERIES = 64
"""Series of one family and manager that are told apart by a reason; what comes beyond is summed up as ``other``."""
FREE_LABELS = ("reason", "operation")
"""Labels whose values come from code that others may write."""


class Source(Protocol):
    """What is exported: a manager."""

    def state(self) -> dict[str, Any]: ...


Sources = Callable[[], Mapping[str, Source]]
"""Returns the managers by the value of their label ``manager``."""


class ManagerCollector(Collector):  # type: ignore[misc]
    """Reads managers whenever somebody scrapes.

    Parameters
    ----------
    sources:
        What is read.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._rates: dict[str, _Rate] = {}

    def describe(self) -> Iterable[Family]:
        """No names: two managers may be registered with one registry, since the label tells them apart."""
        return []

    def collect(self) -> Iterator[Family]:
        families = {name: _family(name) for name in CATALOG}
        for label, source in self._sources().items():
            for name, state in _states(label, source.state()):
                rate = self._rates.setdefault(name, _Rate())
                for series in _bounded(series_of(state, rate)):
                    _add(families[PREFIX + series.name], name, series)
        yield from families.values()


def registry_of(manager: Source) -> CollectorRegistry:
    """A registry with the metrics of one manager."""
    registry = CollectorRegistry(auto_describe=False)
    name = getattr(getattr(manager, "config", None), "name", "default")
    registry.register(ManagerCollector(lambda: {name: manager}))
    return registry


def registry_of_all(sources: Sources) -> CollectorRegistry:
    """A registry with the metrics of several managers, which may come and go."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ManagerCollector(sources))
    return registry


def wsgi_app(*managers: Source) -> Any:
    """``/metrics`` of these managers for a WSGI server that you have already."""
    return make_wsgi_app(registry_of_all(lambda: dict(labelled(managers))))


def asgi_app(*managers: Source) -> Any:
    """``/metrics`` of these managers for an ASGI server that you have already."""
    return make_asgi_app(registry_of_all(lambda: dict(labelled(managers))))


def labelled(managers: Sequence[Source]) -> Iterator[tuple[str, Source]]:
    """Managers with their names; those of a name that was there already with a number."""
    seen: dict[str, int] = {}
    for manager in managers:
        name = str(getattr(getattr(manager, "config", None), "name", "default"))
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}", manager


class _Rate:
    """How fast a count grows between two readings that are not too close to each other."""

    LEAST_S = 1.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._at, self._rate = 0, time.monotonic(), 0.0

    def of(self, count: int) -> float:
        with self._lock:
            now = time.monotonic()
            if now - self._at >= self.LEAST_S:
                self._rate = max(count - self._count, 0) / (now - self._at)
                self._count, self._at = count, now
            return self._rate


def _states(label: str, state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A manager's own state, or those of the engines' processes where it is only their client."""
    engines = [engine for engine in state.get("engines", ()) if engine]
    if state["open"] or not engines:
        yield label, state
    for number, engine in enumerate(engines):
        only = len(engines) == 1 and not state["open"]
        yield label if only else f"{label}/engine{number}", {**engine, "engines": []}


def _family(name: str) -> Family:
    kind, labels, meaning = CATALOG[name]
    made = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}[kind]
    return made(name, meaning, labels=[MANAGER, *labels])


def _add(family: Any, manager: str, series: Series) -> None:
    labels = [manager, *series.labels]
    if series.buckets is not None:
        family.add_metric(labels, buckets=series.buckets, sum_value=series.value)
    else:
        family.add_metric(labels, series.value)


def _bounded(all_series: Iterable[Series]) -> Iterator[Series]:
    """Each series once, and at most so many values of a free label; what is too much is added up."""
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    counts: dict[str, int] = {}
    for series in all_series:
        if series.buckets is not None:
            yield series
            continue
        name, labels = series.name, series.labels
        if (name, labels) not in sums:
            counts[name] = counts.get(name, 0) + 1
            if counts[name] > MOST_SERIES:
                names = CATALOG[PREFIX + name].labels
                labels = tuple("other" if n in FREE_LABELS else v for n, v in zip(names, labels, strict=True))
        sums[name, labels] = sums.get((name, labels), 0.0) + series.value
    for (name, labels), value in sums.items():
        yield Series(name, labels, value)
