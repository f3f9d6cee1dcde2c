"""The dashboard and the alert rules ask only for what is exported, and say what was agreed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcache_factory.cli import main
from kvcache_factory.cli.dashboard import FILES
from kvcache_factory.observe.catalog import CATALOG

PROMTOOL = shutil.which("promtool")
FOLDER = resources.files("kvcache_factory.observe").joinpath("grafana")
DASHBOARD = json.loads(FOLDER.joinpath("dashboard.json").read_text(encoding="utf-8"))
RULES = FOLDER.joinpath("alerts.yml").read_text(encoding="utf-8")

LOW_AND_FINE = """
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'kvcache_factory_reusable_tokens_total{manager="low"}', values: '0+1000x40'}
      - {series: 'kvcache_factory_served_tokens_total{manager="low"}', values: '0+790x40'}
      - {series: 'kvcache_factory_reusable_tokens_total{manager="fine"}', values: '0+1000x40'}
      - {series: 'kvcache_factory_served_tokens_total{manager="fine"}', values: '0+810x40'}
      - {series: 'kvcache_factory_reusable_tokens_total{manager="idle"}', values: '5+0x40'}
      - {series: 'kvcache_factory_served_tokens_total{manager="idle"}', values: '0+0x40'}
    alert_rule_test:
      - alertname: KVCacheFactoryHitRateLow
        eval_time: 5m
      - alertname: KVCacheFactoryHitRateLow
        eval_time: 30m
        exp_alerts:
          - exp_labels: {severity: warning, manager: low}
            exp_annotations:
              summary: "low: 79% of reusable history tokens are served (target 95 %)"
              description: "kvcache_factory_recomputed_tokens_total says why: gone, not_loaded or chosen."
"""


def names_in(text: str) -> set[str]:
    """Metrics that an expression asks for, by their families."""
    found = set(re.findall(r"\bkvcache_factory_\w+", text))
    return {re.sub(r"_(bucket|sum|count)$", "", name) if name not in CATALOG else name for name in found}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    """Every expression of every panel; every panel is a picture of something."""
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(expressions) >= 20
    for expression in expressions:
        assert names_in(expression), expression
        assert names_in(expression) <= set(CATALOG), expression
        assert '{manager=~"$manager"' in expression


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    """Grafana takes a dashboard that breaks this and shows it wrongly."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells


def test_the_target_line_is_drawn_at_95_percent() -> None:
    """With the alert's threshold beside it."""
    (panel,) = [p for p in DASHBOARD["panels"] if p["title"].startswith("Hit rate; target")]
    defaults = panel["fieldConfig"]["defaults"]
    assert [step["value"] for step in defaults["thresholds"]["steps"]] == [None, 0.8, 0.95]
    assert defaults["custom"]["thresholdsStyle"] == {"mode": "dashed"}


def test_alerts_ask_for_metrics_that_there_are() -> None:
    """Names in the rules are in the catalog."""
    expressions = re.sub(r"^\s*(description|summary|record|#).*$", "", RULES, flags=re.M)
    assert names_in(expressions) - {"kvcache_factory"} <= set(CATALOG)
    assert "kvcache_factory:hit_rate:rate5m < 0.80" in RULES


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (make setup-system)")
def test_promtool_takes_the_rules_and_the_alert_fires_below_80_percent(tmp_path: Path) -> None:
    """79 % for ten minutes is an alert, 81 % is none, and neither is silence."""
    (tmp_path / "alerts.yml").write_text(RULES, encoding="utf-8")
    (tmp_path / "tests.yml").write_text(LOW_AND_FINE, encoding="utf-8")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "tests.yml"]):
        done = subprocess.run([str(PROMTOOL), *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_export_writes_both_and_overwrites_nothing(tmp_path: Path) -> None:
    """What is written is what is shipped; a second time it must be asked for."""
    target = tmp_path / "monitoring"
    result = CliRunner().invoke(main, ["dashboard", "export", str(target), "--json"])
    assert result.exit_code == 0, result.output
    assert [Path(row["file"]).name for row in json.loads(result.stdout)["rows"]] == list(FILES)
    assert json.loads((target / "dashboard.json").read_text(encoding="utf-8")) == DASHBOARD
    again = CliRunner().invoke(main, ["dashboard", "export", str(target)])
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    assert CliRunner().invoke(main, ["dashboard", "export", str(target), "--force"]).exit_code == 0
