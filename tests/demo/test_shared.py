"""`demo --remote`: two processes and a real Redis between them, on a model of two layers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.demo import small as room
from tests.servers import Server, redis_server

from kvcache_factory.cli import main
from kvcache_factory.connector.resp import Access, Address, RespConnection
from kvcache_factory.demo import restart, shared
from kvcache_factory.errors import StoreError


@pytest.fixture
def server() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model and a short text in place of the real ones, here and in the fresh processes."""
    monkeypatch.setattr(shared, "load_model", room.small_model)
    monkeypatch.setattr(shared, "reference_text", room.short_text)
    monkeypatch.setattr(restart, "COMMAND", (sys.executable, str(Path(room.__file__))))


def test_the_second_process_is_warm_from_its_first_turn(server: Server) -> None:
    """Only the server is between them; answers are those without the cache."""
    result = CliRunner().invoke(
        main, ["demo", "--remote", server.url, "--turns", "2", "--max-new-tokens", "8", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["phase"], row["turn"]) for row in rows] == [(p, t) for p in shared.PHASES for t in (1, 2)]
    assert all(row["identical"] for row in rows)
    first, second = rows[2], rows[4]
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] >= second["prompt_tokens"] - 64
    connection = RespConnection(Address(port=server.port), Access())
    keys = connection.ask("KEYS", "*")
    assert keys
    assert all(key.startswith(b"demo-") and connection.ask("TTL", key) > 0 for key in keys)  # they leave by themselves
    connection.close()


def test_the_table_puts_the_processes_beside_each_other() -> None:
    """One row a turn."""
    row = {"turn": 1, "prompt_tokens": 100, "identical": True, "diverges_at": None}
    rows = [
        {**row, "phase": phase, "reused_tokens": reused, "ttft_s": ttft_s}
        for phase, reused, ttft_s in (("cold", 0, 4.0), ("first", 0, 4.5), ("second", 64, 0.5))
    ]
    (told,) = shared.summarise(rows)
    assert told["reused_by_second"] == 64
    assert told["speed_up"] == 8.0
    assert told["output"] == "identical"


def test_without_a_server_nothing_is_run_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the model is loaded, with what to do."""
    monkeypatch.setattr(shared, "load_model", lambda *given: pytest.fail("the model was loaded"))
    with pytest.raises(StoreError, match="start one with: redis-server"):
        shared.run_shared(url="redis://127.0.0.1:1")


def test_a_password_is_on_no_command_line(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options of the fresh process come by its standard input."""
    script = tmp_path / "process.py"
    script.write_text(
        "import sys; told = sys.stdin.read(); assert 'hunter2' in told; assert 'hunter2' not in str(sys.argv)"
    )
    monkeypatch.setattr(restart, "COMMAND", (sys.executable, str(script)))
    options = restart.Options("", "float32", 1, 1, remote="redis://user:hunter2@127.0.0.1")
    restart.converse_afresh(options, lambda row, answer: None)


@pytest.mark.parametrize("other", [["--plot", "x.png"], ["--disk", "kv"], ["--cross-engine"]])
def test_it_is_a_demonstration_of_its_own(other: list[str]) -> None:
    """Options of the others are refused."""
    result = CliRunner().invoke(main, ["demo", "--remote", "redis://127.0.0.1:1", *other])
    assert result.exit_code == 2
    assert "leave out" in result.output
