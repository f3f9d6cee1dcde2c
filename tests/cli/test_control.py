"""Commands that talk to a running process: state, top, reset, bypass."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvcache_factory.cli import main
from kvcache_factory.testing import Opener, SmallCache, open_cache  # noqa: F401  a fixture

pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("uvicorn", reason="the extra server is not installed")

A = list(range(16))


@pytest.fixture
def cache(open_cache: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SmallCache:  # noqa: F811
    """A cache with a control port, whose token lies where the server puts it."""
    monkeypatch.delenv("KVCACHE_FACTORY_TOKEN", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    cache = open_cache(16, 16, enable_metrics=True, metrics_port=0)
    cache.save(A)
    cache.load(A)
    cache.manager.wait()
    return cache


def run(cache: SmallCache, *words: str, **options: Any) -> Result:
    """One command against the cache's port."""
    assert cache.manager.metrics_address is not None
    return CliRunner().invoke(main, [*words, "--port", str(cache.manager.metrics_address[1])], **options)


def rows_of(result: Result) -> list[dict[str, Any]]:
    """What it printed."""
    assert result.exit_code == 0, result.output
    printed: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return printed


def test_state_has_a_row_for_each_tier(cache: SmallCache) -> None:
    """What is held and the hit rate, without a token."""
    rows = rows_of(run(cache, "state", "--json"))
    assert [(row["manager"], row["tier"], row["held_blocks"]) for row in rows] == [
        ("default", "gpu", 4),
        ("default", "cpu", 4),
    ]
    assert (rows[0]["hit_rate"], rows[0]["served_tokens"], rows[0]["bypassed"]) == (1.0, 16, False)
    assert "gpu" in run(cache, "state").stdout


def test_top_looks_as_often_as_asked(cache: SmallCache) -> None:
    """One object a line for scripts; bars and sessions for people."""
    cache.manager.create_session("ada [bold]")
    cache.save(A, session="ada [bold]")
    cache.manager._context.log.warning("test", "a tier is slow")
    printed = run(cache, "top", "--count", "2", "--every", "0.1", "--json")
    assert printed.exit_code == 0, printed.output
    looks = [json.loads(line)["rows"][0] for line in printed.stdout.splitlines()]
    assert [row["look"] for row in looks] == [0, 1]
    assert looks[0]["hit_rate"] == 1.0
    shown = run(cache, "top", "--count", "1")
    assert shown.exit_code == 0, shown.output
    for text in ("hit rate 100.0%", "16 tokens saved", "█", "ada [bold]", "! a tier is slow"):
        assert text in shown.stdout


def test_reset_asks_first(cache: SmallCache) -> None:
    """No is no; yes drops everything."""
    assert run(cache, "reset", input="n\n").exit_code == 1
    assert cache.manager.state()["tiers"][0]["held_blocks"] == 4
    assert rows_of(run(cache, "reset", "--yes", "--json"))[0]["what"] == "everything"
    assert [tier["held_blocks"] for tier in cache.manager.state()["tiers"]] == [0, 0]


def test_reset_can_be_of_one_tier_or_session(cache: SmallCache) -> None:
    """It says how many blocks were dropped; an unknown name is a typed error."""
    assert rows_of(run(cache, "reset", "--tier", "gpu", "--yes", "--json"))[0]["dropped_blocks"] == 4
    assert [tier["held_blocks"] for tier in cache.manager.state()["tiers"]] == [0, 4]
    cache.manager.create_session("ada")
    cache.save([7] * 8, session="ada")
    cache.manager.wait()
    assert rows_of(run(cache, "reset", "--session", "ada", "--yes", "--json"))[0]["dropped_blocks"] == 4
    refused = run(cache, "reset", "--session", "nobody", "--yes")
    assert (refused.exit_code, "there is no session 'nobody'" in refused.stderr) == (2, True)
    assert run(cache, "reset", "--session", "a", "--tier", "b", "--yes").exit_code == 2


def test_bypass_goes_on_and_off(cache: SmallCache) -> None:
    """The cache vanishes and comes back."""
    assert rows_of(run(cache, "bypass", "on", "--json")) == [{"manager": None, "bypassed": True}]
    assert cache.load(A) == []
    run(cache, "bypass", "off")
    assert cache.load(A) == [0] * 4


def test_a_wrong_token_is_a_clean_error(cache: SmallCache, tmp_path: Path) -> None:
    """It says what to do, and never shows a token."""
    (tmp_path / "mine").write_text("wrong-token")
    refused = run(cache, "bypass", "on", "--token-file", str(tmp_path / "mine"))
    assert refused.exit_code == 2
    assert "KVCACHE_FACTORY_TOKEN" in refused.stderr
    assert "wrong-token" not in refused.output
    missing = run(cache, "bypass", "on", "--token-file", str(tmp_path / "none"))
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr


def test_nobody_there_is_a_clean_error() -> None:
    """With what a control port needs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        result = CliRunner().invoke(main, ["state", "--port", str(probe.getsockname()[1])])
    assert result.exit_code == 2
    assert "kvcache-factory[server]" in result.stderr
    no_port = CliRunner().invoke(main, ["state", "--port", "99999"])
    assert (no_port.exit_code, "1<=x<=65535" in no_port.stderr) == (2, True)
