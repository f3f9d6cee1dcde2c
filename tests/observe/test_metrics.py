"""What is exported is what the page lists, it follows the conventions, and it is what the ledger says."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvcache_factory import CacheManager
from kvcache_factory.engine.ledger import MANAGER, Event
from kvcache_factory.observe.catalog import CATALOG
from kvcache_factory.observe.metrics import MOST_SERIES, ManagerCollector, asgi_app, wsgi_app
from kvcache_factory.testing import Opener

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
PROMTOOL = shutil.which("promtool")
TOKENS = list(range(16))


def exported(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """One sample of ``kvcache_factory_<name>`` of the manager ``default``."""
    return exported(registry)["kvcache_factory_" + name, frozenset({"manager": "default", **labels}.items())]


def test_the_page_lists_exactly_what_is_exported(open_cache: Opener) -> None:
    """Names, labels and meanings of the tables are the catalog's, and every family of it is in a scrape."""
    rows = re.findall(r"^\| `(kvcache_factory_\w+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    listed = {name: (tuple(re.findall(r"`(\w+)`", labels)), meaning) for name, labels, meaning in rows}
    assert listed == {name: (metric.labels, metric.meaning) for name, metric in CATALOG.items()}
    text = generate_latest(open_cache(8).manager.registry).decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M))
    assert types == {name: metric.kind for name, metric in CATALOG.items()}


def test_samples_have_the_labels_of_the_catalog(open_cache: Opener) -> None:
    """No label more, none less, on tiers of several kinds that have been at work."""
    cache = open_cache(4, 8, enable_metrics=True)
    for turn in range(4):
        cache.save([turn, *TOKENS])
        cache.load([turn, *TOKENS])
    cache.manager.wait()
    seen = set()
    for name, labels in exported(cache.manager.registry):
        family = next(n for n in (name, re.sub(r"_(bucket|sum|count)$", "", name)) if n in CATALOG)
        names = {label for label, _ in labels} - {"le"}
        assert names == {MANAGER, *CATALOG[family].labels}, name
        seen.add(family)
    missing = {name.removeprefix("kvcache_factory_") for name in set(CATALOG) - seen}
    assert missing <= {  # what has not happened to this cache
        "breaker_open",
        "codec_error_ratio",
        "codec_ratio",
        "corrupt_blocks_total",
        "dropped_blocks_total",
        "encoded_blocks_total",
        "errors_total",
        "first_token_seconds",
        "load_decisions_total",
        "load_failed_blocks_total",
        "lock_wait_seconds",
        "missed_blocks_total",
        "recomputed_tokens_total",
        "remote_member_slots",
        "remote_member_up",
        "remote_running_operations",
        "store_errors_total",
        "work_actual_seconds_total",
        "work_predicted_seconds_total",
    }


def test_names_follow_the_conventions() -> None:
    """Counters end in _total and nothing else does; units are base units, at the end."""
    for name, metric in CATALOG.items():
        assert re.fullmatch(r"kvcache_factory_[a-z_]+", name)
        assert (metric.kind == "counter") == name.endswith("_total")
        assert metric.kind != "histogram" or name.endswith("_seconds")
        assert not re.search(r"_(ms|us|kb|mb|gb|percent)(_|$)", name)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (make setup-system)")
def test_promtool_finds_nothing_wrong(open_cache: Opener) -> None:
    """The linter of Prometheus itself reads a scrape."""
    cache = open_cache(4, 8, enable_metrics=True)
    cache.save(TOKENS)
    cache.load(TOKENS)
    scrape = generate_latest(cache.manager.registry)
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=scrape, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_figures_are_the_ledgers(open_cache: Opener) -> None:
    """To the token: what was asked, hit, served, evicted, and why."""
    cache = open_cache(4)
    cache.save(TOKENS)
    cache.load([*TOKENS, 1, 2, 3, 4])
    registry = cache.manager.registry
    assert value(registry, "served_tokens_total") == value(registry, "reusable_tokens_total") == 16
    assert value(registry, "hit_ratio") == 1
    assert value(registry, "lookup_blocks_total", tier="cpu", result="hit") == 4
    assert value(registry, "lookup_tokens_total", tier="all", result="miss") == 4
    assert value(registry, "tier_hit_ratio", tier="all") == 0.8
    assert value(registry, "missed_blocks_total", tier="all", reason="absent") == 1
    assert value(registry, "evicted_unused_blocks_total", tier="cpu") == 0
    cache.save([9, 9, 9, 9])
    assert value(registry, "evicted_blocks_total", tier="cpu", policy="lru", reason="capacity") == 1
    assert value(registry, "tier_blocks", tier="cpu") == 4
    assert value(registry, "up") == 1


def test_decisions_and_what_came_of_them_are_exported(open_cache: Opener) -> None:
    """Predictions are useful beside what was measured."""
    manager = open_cache(4).manager
    manager.ledger.decided("load")
    manager.ledger.decided("recompute")
    manager.ledger.compare("load", 0.5, 0.75)
    assert value(manager.registry, "load_decisions_total", decision="recompute") == 1
    assert value(manager.registry, "work_predicted_seconds_total", kind="load") == 0.5
    assert value(manager.registry, "work_actual_seconds_total", kind="load") == 0.75


def test_corruption_is_told_from_other_failures(open_cache: Opener) -> None:
    """A block that is not what its record says is more than one that could not be read."""
    manager = open_cache(4).manager
    manager.ledger.add("cpu", Event.LOAD_FAILED, 3, reason="io_error")
    manager.ledger.add("cpu", Event.LOAD_FAILED, 2, reason="header_checksum")
    assert value(manager.registry, "load_failed_blocks_total", tier="cpu", reason="io_error") == 3
    corrupt = {labels: v for (name, labels), v in exported(manager.registry).items() if "_corrupt_" in name}
    assert corrupt == {frozenset({(MANAGER, "default"), ("tier", "cpu"), ("reason", "header_checksum")}): 2}


def test_histograms_are_cumulative_and_end_with_infinity(open_cache: Opener) -> None:
    """Three durations in three buckets, one beyond the last bound."""
    manager = open_cache(4, enable_metrics=True).manager
    for seconds in (1e-5, 0.3, 1000.0):
        manager.ledger.observe("cpu", "load", seconds)
    labels = {"tier": "cpu", "operation": "load"}
    at = {le: value(manager.registry, "operation_duration_seconds_bucket", le=le, **labels) for le in ("1e-05", "0.5")}
    assert at == {"1e-05": 1, "0.5": 2}
    assert value(manager.registry, "operation_duration_seconds_bucket", le="+Inf", **labels) == 3
    assert value(manager.registry, "operation_duration_seconds_sum", **labels) == pytest.approx(1000.30001)


def test_labels_are_bounded(open_cache: Opener) -> None:
    """A store with a thousand words for what goes wrong cannot make a thousand series."""
    manager = open_cache(4).manager
    for number in range(1000):
        manager.ledger.add("cpu", Event.STORE_ERROR, 1, reason=f"reason {number:04}")
    reasons = {
        dict(labels)["reason"]: v
        for (name, labels), v in exported(manager.registry).items()
        if name == "kvcache_factory_store_errors_total"
    }
    assert len(reasons) == MOST_SERIES + 1
    assert (sum(reasons.values()), reasons["other"]) == (1000, 1000 - MOST_SERIES)


def test_several_managers_can_be_in_one_registry_and_have_their_own(open_cache: Opener) -> None:
    """The label tells them apart; the registry of each knows only itself."""
    one, two = open_cache(4, name="one").manager, open_cache(4, name="two").manager
    together = CollectorRegistry()
    for manager in (one, two):
        together.register(ManagerCollector(lambda manager=manager: {manager.config.name: manager}))  # type: ignore[misc]
    assert {dict(labels)[MANAGER] for _, labels in exported(together)} == {"one", "two"}
    assert {dict(labels)[MANAGER] for _, labels in exported(one.registry)} == {"one"}


def test_they_mount_in_a_server_of_ones_own(open_cache: Opener) -> None:
    """As a WSGI application here; managers of one name get a number."""
    one, two = open_cache(4).manager, open_cache(4).manager
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    said: list[str] = []
    body = b"".join(wsgi_app(one, two)(environ, lambda status, headers: said.append(status)))
    assert said == ["200 OK"]
    assert b'kvcache_factory_up{manager="default-2"} 1.0' in body
    assert callable(asgi_app(one))


def test_scraping_while_requests_count_is_safe(open_cache: Opener) -> None:
    """Readers take no lock from those who count, and see sums that only grow."""
    cache = open_cache(8, enable_metrics=True)
    cache.save(TOKENS)
    ended = threading.Event()

    def work() -> None:
        for number in range(300):
            cache.space.match(cache.space.chain(TOKENS), f"r{number}")
            cache.space.release(f"r{number}")
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    counts = [value(cache.manager.registry, "lookup_blocks_total", tier="all", result="hit")]
    while not ended.is_set():
        counts.append(value(cache.manager.registry, "lookup_blocks_total", tier="all", result="hit"))
    thread.join()
    counts.append(value(cache.manager.registry, "lookup_blocks_total", tier="all", result="hit"))
    assert counts == sorted(counts)
    assert counts[-1] == 1200


def test_an_engine_in_another_process_is_shown_by_its_client() -> None:
    """The manager that steers it is empty; its figures are those of the engine's process."""
    manager = CacheManager(name="chat")
    other = CacheManager(name="there")
    other.ledger.add(MANAGER, Event.LEASE_EXPIRED)

    class There:
        def call(self, verb: str, *args: Any) -> Any:
            return other.state() if verb == "state" else None

    manager.follow(There())
    assert exported(manager.registry)["kvcache_factory_leases_expired_total", frozenset({(MANAGER, "chat")})] == 1
    manager.close()
    other.close()


def test_a_remote_level_is_shown_with_its_breaker() -> None:
    """It has no tier's bytes, but it can be down, and work can wait for it."""
    manager = CacheManager()
    state = {
        **manager.state(),
        "remote": {
            "tier": "remote",
            "breaker": "open",
            "out_of_service": False,
            "operations_in_flight": 3,
            "waiting_jobs": 7,
            "members": [{"member": "10.0.0.1:7", "slots": 2048, "usable": False, "why": "refused"}],
        },
    }
    there: Any = type("There", (), {"config": manager.config, "state": lambda self: state})()
    registry = CollectorRegistry()
    registry.register(ManagerCollector(lambda: {"default": there}))
    assert value(registry, "breaker_open", tier="remote", breaker="calls") == 1
    assert value(registry, "breaker_open", tier="remote", breaker="abandoned") == 0
    assert value(registry, "remote_running_operations", tier="remote") == 3
    assert value(registry, "io_queued_jobs", lane="remote") == 7
    assert value(registry, "remote_member_up", tier="remote", member="10.0.0.1:7") == 0
    assert value(registry, "remote_member_slots", tier="remote", member="10.0.0.1:7") == 2048
    manager.close()
