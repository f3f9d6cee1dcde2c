"""Advice: each rule is a row of the page, names what exists, and fires on figures that deserve it and on no others."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvcache_factory import CacheManager, ConfigError, SessionSettings
from kvcache_factory.cli import main
from kvcache_factory.maintenance.advice import RULES, Rule, advise
from kvcache_factory.observe.catalog import CATALOG, PREFIX
from kvcache_factory.testing import Opener, sized_level, tiny_spec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
SYMPTOMS = {
    "no speed-up",
    "slower",
    "garbled or repeated replies",
    "crash after hours",
    "batch throughput down",
    "hit rate low",
    "out of memory",
    "latency growing with turns",
}


def page_rows() -> list[tuple[str, ...]]:
    """Symptom, cause, metric, command and knob of each row of the page."""
    rows = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        symptom = section.split("\n")[0].lower()
        for cells in re.findall(r"^\| (.*) \| `(.*)` \| `kvcache-factory (.*)` \| (.*) \|$", section, re.MULTILINE):
            rows.append((symptom, *cells))
    return rows


def test_the_rules_are_the_rows_of_the_page() -> None:
    """The same, word for word, in the same order, and every symptom is there."""
    assert page_rows() == [rule[:5] for rule in RULES]
    assert {rule.symptom for rule in RULES} == SYMPTOMS


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.cause[:40])
def test_what_a_rule_names_exists(rule: Rule) -> None:
    """The metric is exported, and the command with its options is understood."""
    assert PREFIX + rule.metric in CATALOG
    words, command = shlex.split(rule.command), main
    context = click.Context(command, info_name="kvcache-factory")
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name!r}"
        command, context = found, click.Context(found, parent=context)  # type: ignore[assignment]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    assert bool(arguments) == any(not word.startswith("--") for word in words[:1])


def said(state: dict[str, Any]) -> set[str]:
    return {row["cause"] for row in advise(state)}


def of(part: str) -> str:
    """The one cause that contains these words."""
    (cause,) = {rule.cause for rule in RULES if part in rule.cause}
    return cause


def healthy() -> dict[str, Any]:
    """The state of a manager in good health, small enough to spoil in one place."""
    tier = {"tier": "cpu", "held_bytes": 1000, "budget_bytes": 2000, "prefaulted": 1.0, "fragmentation": {"64": 10}}
    session = {"session": "s", "requests": 9, "asked_tokens": 900, "reused_tokens": 800, "pinned": False}
    return {
        "name": "m",
        "open": True,
        "bypassed": False,
        "block_tokens": 1,
        "reusable_tokens": 900,
        "tiers": [tier, {**tier, "tier": "disk"}],
        "sessions": [session],
        "leases": 0,
        "events": [
            event("manager", "asked", 1000),
            event("cpu", "hit", 600),
            event("disk", "hit", 200),
            event("cpu", "stored", 500),
            event("cpu", "evicted", 100, "kept_below"),
            event("cpu", "unused", 10),
            event("manager", "recomputed", 20, "gone"),
            event("disk", "store_error", 3, "full"),
            event("disk", "load_failed", 2, "deadline"),
        ],
        "durations": [duration("manager", "match", 1.0), duration("cpu", "lock_wait", 0.01)],
        "comparisons": [{"kind": "load", "times": 50, "predicted_s": 1.0, "actual_s": 1.1}],
        "worst": [],
        "io": {"abandoned_reads": 0},
    }


def event(tier: str, name: str, blocks: int, reason: str = "") -> dict[str, Any]:
    return {"tier": tier, "event": name, "reason": reason, "times": 1, "blocks": blocks, "bytes": 0}


def duration(tier: str, operation: str, seconds: float) -> dict[str, Any]:
    return {"tier": tier, "operation": operation, "sum_s": seconds}


def test_nothing_is_said_of_a_healthy_manager() -> None:
    """Advice that always comes is none."""
    assert advise(healthy()) == []


def test_threads_that_hardly_worked_did_not_wait_for_each_other() -> None:
    """A fifth of a few milliseconds is the start of a process, and no cause."""
    state = healthy()
    state["durations"] = [duration("manager", "match", 0.05), duration("cpu", "lock_wait", 0.02)]
    assert advise(state) == []


ILL: dict[str, dict[str, Any]] = {
    "no request reaches": {"events": [], "reusable_tokens": 0},
    "is bypassed": {"bypassed": True},
    "nothing in common": {"reusable_tokens": 0},
    "disagree about": {"events": [event("manager", "asked", 9), event("disk", "found", 50)]},
    "longer than predicted": {"comparisons": [{"kind": "load", "times": 50, "predicted_s": 1.0, "actual_s": 9.0}]},
    "come in time": {"+": [event("manager", "recomputed", 90, "not_loaded")]},
    "wait for each other": {"durations": [duration("manager", "match", 1.0), duration("cpu", "lock_wait", 0.5)]},
    "damaged": {"+": [event("disk", "load_failed", 2, "header_checksum")]},
    "one key": {"+": [event("cpu", "miss", 1, "record_differs")]},
    "lossy": {"worst": [{"tier": "cpu", "name": "codec_error", "value": 0.01}]},
    "never end": {"+": [event("manager", "lease_expired", 0)]},
    "a store fails": {"+": [event("disk", "store_error", 1, "eio"), event("disk", "load_failed", 6, "eio")]},
    "reads hang": {"io": {"abandoned_reads": 3}},
    "cache itself fails": {"+": [event("manager", "error", 0, "match:ValueError")]},
    "do not keep up": {"+": [event("disk", "not_stored", 8, "queue_full")]},
    "before anybody uses": {"+": [event("cpu", "unused", 90)]},
    "not been touched": {"tiers": [{**healthy()["tiers"][0], "prefaulted": 0.5}]},
    "too small": {"+": [event("manager", "recomputed", 300, "gone"), event("cpu", "evicted", 9, "capacity")]},
    "at their quotas": {"+": [event("cpu", "not_stored", 1, "quota")]},
    "does not admit": {"+": [event("cpu", "not_stored", 5000, "not_admitted")]},
    "judged faster": {"+": [event("manager", "recomputed", 300, "chosen")]},
    "leased or pinned": {"+": [event("cpu", "not_stored", 1, "full")]},
    "end before they return": {
        "+": [event("manager", "recomputed", 300, "gone"), event("cpu", "dropped", 400, "session_destroyed")]
    },
    "much larger": {"tiers": [{**healthy()["tiers"][0], "fragmentation": {"64": 900}}]},
    "more than its budget": {"tiers": [{**healthy()["tiers"][0], "held_bytes": 9000}]},
    "do not go on": {"sessions": [{**healthy()["sessions"][0], "reused_tokens": 10}]},
    "a slower tier": {"+": [event("disk", "hit", 2000)]},
}


@pytest.mark.parametrize("part", ILL)
def test_each_rule_fires_on_what_it_is_for(part: str) -> None:
    """One thing is wrong, its row comes, with a figure, and no other."""
    state, wrong = healthy(), dict(ILL[part])
    state["events"] = [*wrong.pop("events", state["events"]), *wrong.pop("+", [])]
    state.update(wrong)
    assert said(state) == {of(part)}
    assert all(row["figure"] and row["manager"] == "m" for row in advise(state))


def test_every_rule_has_such_a_case() -> None:
    """A rule that nobody can make fire is one that nobody has seen."""
    assert [of(part) for part in ILL] == [rule.cause for rule in RULES]


def test_real_figures_are_understood(open_cache: Opener, tmp_path: Path) -> None:
    """A session at its quota, and a bypass: in process, from a file, and as JSON."""
    size = float(sized_level(2, tiny_spec()).size_gb or 0)
    cache = open_cache(64, 64, sessions=SessionSettings(quota_gb=size))
    cache.manager.create_session("s")
    cache.save(range(16), session="s")
    cache.manager.wait()
    assert of("at their quotas") in said(cache.manager.state())
    cache.manager.bypass()
    file = tmp_path / "state.json"
    file.write_text(json.dumps(cache.manager.state()), encoding="utf-8")
    result = CliRunner().invoke(main, ["advise", "--state", str(file), "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {of("is bypassed"), of("at their quotas")} <= {row["cause"] for row in rows}
    assert CliRunner().invoke(main, ["advise", "--state", str(file)]).exit_code == 0


@pytest.mark.parametrize("text", ["", "[]x", "7", "{}", '[{"tiers": 3}]', '{"managers": [{"tiers": [{}]}]}'])
def test_a_file_that_holds_no_state_is_a_typed_error(tmp_path: Path, text: str) -> None:
    """One line that says what is wrong with it."""
    file = tmp_path / "state.json"
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(main, ["advise", "--state", str(file)])
    assert result.exit_code == 2
    assert "[ConfigError]" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_manager_that_was_never_opened_has_figures() -> None:
    """Nothing has happened yet, and nothing is said."""
    manager = CacheManager()
    assert advise(manager.state()) == []
    manager.close()
    with pytest.raises(ConfigError, match="not the state"):
        advise({"events": []})
