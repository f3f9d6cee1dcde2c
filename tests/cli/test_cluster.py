"""``kvcache-factory cluster`` against a real redis-server: join, leave, status, rebalance, heartbeats."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from click.testing import CliRunner
from tests.servers import Server, redis_server, until

from kvcache_factory.cli import main
from kvcache_factory.cluster.meta_service import meta_service

PREFIX = "AIBRIX_KV_CACHE_OL_META_SERVICE_"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server() as started:
        yield started


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return f"nodes-{request.node.name}"


def run(server: Server, key: str, *arguments: str, code: int = 0) -> Any:
    """Run a command with the meta service in the environment."""
    environ = {f"{PREFIX}BACKEND": "REDIS", f"{PREFIX}URL": server.url, f"{PREFIX}CLUSTER_META_KEY": key}
    result = CliRunner().invoke(main, ["cluster", *arguments], env=environ)
    assert result.exit_code == code, result.output
    return result


def rows(server: Server, key: str, *arguments: str, code: int = 0) -> list[tuple[str, int, bool | None]]:
    """Server, slots and heartbeat of each row of the JSON output."""
    document = json.loads(run(server, key, *arguments, "--json", code=code).stdout)
    assert document["command"] == f"cluster {arguments[0]}"
    return [(row["server"], row["slots"], row["alive"]) for row in document["rows"]]


def test_servers_come_and_go(server: Server, key: str) -> None:
    """Slots are shared at each step; a second join of the same server changes its fields and keeps its slots."""
    assert rows(server, key, "status", code=1) == []
    assert rows(server, key, "join", "a:1", "--slots", "100") == [("a:1", 100, None)]
    assert rows(server, key, "join", "b:2", "--field", "rank=1") == [("a:1", 50, None), ("b:2", 50, None)]
    assert rows(server, key, "join", "a:1", "--field", "zone=north") == [("a:1", 50, None), ("b:2", 50, None)]
    assert rows(server, key, "join", "[::1]:3") == [("a:1", 34, None), ("b:2", 33, None), ("[::1]:3", 33, None)]
    assert rows(server, key, "status") == [("a:1", 34, None), ("b:2", 33, None), ("[::1]:3", 33, None)]
    assert rows(server, key, "leave", "a:1") == [("b:2", 50, None), ("[::1]:3", 50, None)]
    assert rows(server, key, "rebalance") == [("b:2", 50, None), ("[::1]:3", 50, None)]
    assert "is no member" in run(server, key, "leave", "a:1", code=2).stderr


def test_a_server_that_joins_without_a_heartbeat_is_not_held_to_an_older_one(server: Server, key: str) -> None:
    """Its heart stopped, somebody started it again without one, and nobody had looked in between."""
    assert "nobody has joined yet" in run(server, key, "status", code=1).stderr
    with closing(meta_service("REDIS", server.url)()) as meta:
        meta.put(f"{key}:beating:a:1", b"10")
    assert rows(server, key, "join", "b:2") == [("b:2", 4096, None)]
    assert rows(server, key, "join", "a:1") == [("b:2", 2048, None), ("a:1", 2048, None)]
    assert rows(server, key, "rebalance") == [("b:2", 2048, None), ("a:1", 2048, None)]


def test_a_killed_server_is_taken_out_and_one_that_ends_takes_itself_out(server: Server, key: str) -> None:
    """Three processes keep three servers alive: one is killed with -9, one ended with SIGTERM, the last one stays."""
    script = "from kvcache_factory.cli import main; main()"

    def start(place: str) -> subprocess.Popen[bytes]:
        command = [
            "cluster",
            "join",
            place,
            "--heartbeat",
            "1",
            "--key",
            key,
            "--url",
            server.url,
            "--backend",
            "REDIS",
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, "-c", script, *command], **quiet)

    def places() -> list[str]:
        result = CliRunner().invoke(
            main, ["cluster", "status", "--key", key, "--url", server.url, "--backend", "REDIS", "--json"]
        )
        return [row["server"] for row in json.loads(result.stdout)["rows"]]

    processes = []
    try:
        for number in (1, 2, 3):
            processes.append(start(f"h:{number}"))
            until(lambda n=number: len(places()) == n, "it has joined")
        processes[0].kill()
        until(lambda: places() == ["h:2", "h:3"], "the others took it out")
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(30) == 0
        assert rows(server, key, "status") == [("h:3", 4096, True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("join", "nowhere"), "no address and port"),
        (("join", "a:70000"), "no address and port"),
        (("join", "a:1", "--field", "x"), "name=value"),
        (("join", "a:1", "--field", "slots=1"), "slots cannot be a further field"),
    ],
)
def test_wrong_arguments_are_told(server: Server, key: str, arguments: tuple[str, ...], message: str) -> None:
    """Before anything is written."""
    assert message in run(server, key, *arguments, code=2).stderr
    assert rows(server, key, "status", code=1) == []


def test_without_a_meta_service_the_options_are_named() -> None:
    """Either the option or the variable."""
    environ = {f"{PREFIX}BACKEND": None, f"{PREFIX}URL": None, f"{PREFIX}CLUSTER_META_KEY": None}
    result = CliRunner().invoke(main, ["cluster", "status"], env=environ)
    assert result.exit_code == 2
    assert "--backend" in result.stderr
    assert f"{PREFIX}BACKEND" in result.stderr


def test_a_meta_service_that_does_not_answer_is_one_line() -> None:
    """What, where: as everywhere in the command line."""
    arguments = ["--backend", "REDIS", "--url", "redis://127.0.0.1:1", "--key", "k"]
    result = CliRunner().invoke(main, ["cluster", "status", *arguments])
    assert result.exit_code == 2
    assert "meta service REDIS at 127.0.0.1:1 did not answer" in result.stderr
