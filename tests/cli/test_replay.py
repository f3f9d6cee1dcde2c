"""`replay` and `plan` as people and scripts use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvcache_factory.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Thirty conversations that take turns."""
    path = tmp_path / "chat.jsonl"
    with path.open("w") as file:
        for turn in range(4):
            for number in range(30):
                ids = [100 * number + i for i in range(2 * turn + 2)]
                row = {"timestamp": 1000 * (30 * turn + number), "input_length": 512 * len(ids), "output_length": 9}
                file.write(json.dumps({**row, "hash_ids": ids}) + "\n")
    return path


def call(*words: Any) -> Result:
    """Run a command."""
    return CliRunner().invoke(main, [str(word) for word in words])


def rows(*words: Any) -> list[dict[str, Any]]:
    """The rows of a command that ends well."""
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["command"] == words[0]
    found: list[dict[str, Any]] = document["rows"]
    return found


def test_replay_prints_a_row_for_each_policy_and_capacity(trace: Path) -> None:
    """The keys that the documentation names are there."""
    found = rows("replay", trace, "--policy", "lru,fifo", "--capacity", "10%,100")
    assert [(row["trace"], row["policy"]) for row in found] == [("chat.jsonl", "lru"), ("chat.jsonl", "fifo")] * 2
    keys = {"capacity_fraction", "usable_hit", "block_hit", "optimum", "us_per_block", "saved_prefill_s", "evictions"}
    assert all(keys <= row.keys() for row in found)
    assert found[2]["capacity_blocks"] == 100


def test_replay_takes_several_traces_and_options(trace: Path, tmp_path: Path) -> None:
    """Tiers, a model, hints, requests in flight and a picture in one go."""
    plot = tmp_path / "replay.png"
    options = ("--tiers", "dram=5%,nvme=50%", "--model", "llama-3-8b", "--hints", "oracle", "--inflight")
    found = rows("replay", trace, trace, *options, "--plot", plot)
    assert len(found) == 2
    assert {"dram_hit", "nvme_hit", "dram_gib", "nvme_gib"} <= found[0].keys()
    assert found[0]["saved_prefill_s"] is not None
    assert plot.stat().st_size > 0
    assert rows("replay", trace, "--semantics", "flat", "--no-optimum")[0]["optimum"] is None


def test_replay_says_that_it_encodes_nothing(trace: Path) -> None:
    """Once for each policy that would, on standard error, and in the help; what it counts is that of eviction."""
    policies = 'lru,lru:action=compress,hybrid:policies=["lru","fifo"]:action=compress'
    result = call("replay", trace, "--policy", policies, "--capacity", "10%", "--json")
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if "only evicts" in line]
    assert [line.split(":")[0] for line in said] == ["lru", "hybrid"]
    plain, encoding, _ = json.loads(result.stdout)["rows"]
    assert plain["usable_hit"] == encoding["usable_hit"]
    assert "action=compress" in call("replay", "--help").stdout


def test_tables_are_for_people(trace: Path) -> None:
    """Without --json there is a table."""
    result = call("replay", trace)
    assert result.exit_code == 0
    assert "usable" in result.stdout


def test_plan_answers_in_gib_and_seconds(trace: Path, tmp_path: Path) -> None:
    """The keys that the documentation names are there, and the sentence is for people."""
    plot = tmp_path / "plan.png"
    words = ("plan", trace, "--model", "llama-3-8b", "--prices", "dram=3,nvme=0.1,gpu=2", "--plot", plot)
    found = rows(*words)
    assert {"curve", "knee", "target", "answer"} == {row["kind"] for row in found}
    assert all({"tier_gib", "usable_hit", "saved_prefill_s"} <= row.keys() for row in found)
    assert "a month" in call(*words).stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "lur"), "did you mean"),
        (("--policy", ""), "empty list"),
        (("--capacity", "0"), "more than zero"),
        (("--capacity", "5GiB"), "--model"),
        (("--model", "lama"), "llama"),
        (("--inflight",), "--prefill-rate"),
        (("--tiers", "dram"), "name=capacity"),
        (("--semantics", "flat", "--tiers", "a=1,b=2"), "flat"),
        (("--prefill-rate", "10", "--tflops", "3"), "one of"),
    ],
)
def test_bad_options_are_one_clean_line(trace: Path, words: tuple[str, ...], message: str) -> None:
    """What is wrong, and what to do about it; exit code 2."""
    result = call("replay", trace, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_broken_lines_are_named_and_counted(trace: Path) -> None:
    """They are skipped with a word on standard error; --strict stops."""
    trace.write_text(trace.read_text() + "{broken\n")
    result = call("replay", trace, "--json")
    assert result.exit_code == 0
    assert "1 broken lines skipped" in result.stderr
    assert "chat.jsonl:121" in result.stderr
    json.loads(result.stdout)
    result = call("replay", trace, "--strict")
    assert result.exit_code == 2
    assert "chat.jsonl:121" in result.stderr


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    """For both commands."""
    path = tmp_path / "empty.jsonl"
    path.touch()
    for words in (("replay", path), ("plan", path, "--model", "llama-3-8b")):
        result = call(*words)
        assert result.exit_code == 2
        assert "is empty" in result.stderr


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_help_ends_with_an_example(command: str) -> None:
    """Somebody who asks for help gets something to copy."""
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"Example: kvcache-factory {command}" in result.stdout
