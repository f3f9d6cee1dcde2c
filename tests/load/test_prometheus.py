"""A real Prometheus is one more that counts: after its last scrape it says what the generator counted, to the token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.servers import free_port, prometheus

from kvcache_factory import CacheManager
from kvcache_factory.cli import main
from kvcache_factory.errors import ConfigError
from kvcache_factory.load.prometheus import Prometheus
from kvcache_factory.load.run import Plan, run_load

EXACT = ("asked", "reusable", "served", "first tokens", "hit rate")


def test_prometheus_agrees_to_the_token(tmp_path: Path) -> None:
    """Little memory, so that not everything is served, while it scrapes every second; the command says the same."""
    port = free_port()
    with prometheus(tmp_path, f"127.0.0.1:{port}") as number:
        arguments = f"load --duration 5s --users 6 --think-s 0 --memory-mb 2 --metrics-port {port} --json".split()
        result = CliRunner().invoke(main, [*arguments, "--prometheus", f"http://127.0.0.1:{number}"])
    assert result.exit_code == 0, result.output
    counts = {row["name"]: row for row in json.loads(result.stdout)["rows"] if row["kind"] == "count"}
    for name in EXACT:
        assert counts[name]["prometheus"] == counts[name]["own"], counts[name]
    assert 0 < counts["served"]["own"] < counts["reusable"]["own"] < counts["asked"]["own"]
    latency = counts["mean time to first token"]
    assert latency["prometheus"] == latency["metrics"] == latency["ledger"] > 0
    assert latency["agree"] is True


def test_sums_of_latency_are_the_ledgers_to_the_last_bit(tmp_path: Path) -> None:
    """Sum and count of a histogram come through a scrape as they are."""
    with CacheManager(enable_metrics=True, metrics_port=0, name="load") as manager:
        for number in range(100):
            manager.ledger.observe("manager", "first_token", 0.1 + number / 7)
        assert manager.metrics_address is not None
        with prometheus(tmp_path, f"127.0.0.1:{manager.metrics_address[1]}") as number:
            server = Prometheus(f"http://127.0.0.1:{number}/", "load")
            server.wait_for_scrape(server.now())
            read = server.reader()
            spent = next(d for d in manager.state()["durations"] if d["operation"] == "first_token")
            assert (read("first_token_seconds_sum"), read("first_token_seconds_count")) == (spent["sum_s"], 100)
            assert read("hit_ratio") is None
            with pytest.raises(ConfigError, match=r"has not scraped manager 'other' for 0\.5 s.*scrape_configs"):
                Prometheus(f"http://127.0.0.1:{number}", "other").wait_for_scrape(0.0, 0.5)


def test_a_server_that_is_not_there_is_told_before_anything_runs() -> None:
    """And so is a run that nobody could scrape."""
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match="no Prometheus answers at"):
        run_load(Plan(duration_s=3600, metrics_port=0, prometheus=nobody))
    with pytest.raises(ConfigError, match="needs metrics_port"):
        Plan(duration_s=1, prometheus=nobody)
    with pytest.raises(ConfigError, match="http://host:port"):
        Prometheus("localhost:9090", "load")
