"""A manager's own requests, recorded without what they said, and replayed."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache_factory.errors import ConfigError
from kvcache_factory.manager import CacheManager
from kvcache_factory.observe import record
from kvcache_factory.observe.record import Recorder
from kvcache_factory.policy.base import REUSE_HINTS
from kvcache_factory.policy.order import LRUEvictionPolicy
from kvcache_factory.simulate.replay import Replay, Size
from kvcache_factory.simulate.workload import read_trace
from kvcache_factory.testing import SmallCache, small_cache

TOKENS = list(range(40_000, 40_016))


def ask(cache: SmallCache, tokens: list[int], request_id: str, output: int = 0, **options: Any) -> None:
    """One request from look-up to release."""
    chain = cache.space.chain(tokens)
    cache.space.match(chain, request_id, **options)
    cache.save(tokens)
    cache.space.release(request_id, output)


def recorded(path: Path, work: Callable[[SmallCache], None], blocks: int = 64) -> list[dict[str, Any]]:
    """The lines that a manager writes while *work* uses it."""
    cache = small_cache(blocks, record=path)
    work(cache)
    cache.manager.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_recording_is_replayed_as_it_was(tmp_path: Path) -> None:
    """Blocks, lengths, answers, hints and sessions come back, and the replay finds what the manager found."""

    def work(cache: SmallCache) -> None:
        cache.manager.create_session("anna")
        ask(cache, TOKENS[:8], "a", 5)
        ask(cache, TOKENS, "b", 7, session="anna", reuse_hint="returns")
        ask(cache, [9] * 10, "c")

    path = tmp_path / "trace.jsonl"
    header, *rows = recorded(path, work)
    assert header["block_tokens"] == 4
    assert [row["thread"] for row in rows] == [-1, 0, -1]
    with read_trace(path) as read:
        assert read.block_tokens == 4
        assert [read.request(i).tolist() for i in range(3)] == [[0, 1], [0, 1, 2, 3], [4, 5]]
        assert read.inputs.tolist() == [8, 16, 10]
        assert read.outputs.tolist() == [5, 7, 0]
        assert [REUSE_HINTS[i] for i in read.reuse.tolist()] == ["unknown", "returns", "unknown"]
        assert Replay(read, LRUEvictionPolicy(), [Size("dram", 64)]).run().hits[0].tolist() == [0, 2, 0]


def test_nothing_of_tokens_keys_or_names_is_written(tmp_path: Path) -> None:
    """Two runs over the same conversation have no number in common, and no file holds a token or a key."""

    def work(cache: SmallCache) -> None:
        cache.manager.create_session("anna@example.org")
        ask(cache, TOKENS, "request-of-anna", session="anna@example.org")

    names = []
    for run in ("one", "two"):
        path = tmp_path / f"{run}.jsonl"
        _, row = recorded(path, work)
        names.append(set(row["ids"]))
        text = path.read_text()
        assert "anna" not in text
        assert not any(str(token) in text for token in TOKENS)
        cache = small_cache(4)
        keys = cache.space.chain(TOKENS).keys
        cache.manager.close()
        assert not names[-1] & {int(word) for word in np.concatenate(keys)}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not names[0] & names[1]


def test_a_second_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Its blocks are others, its time goes on."""
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        rows = recorded(path, lambda cache: ask(cache, TOKENS, "a"))
    assert len(rows) == 4
    with read_trace(path) as read:
        assert (len(read), read.unique) == (2, 8)
        assert read.at_s[1] >= read.at_s[0]


def test_requests_come_back_in_order_of_their_beginning(tmp_path: Path) -> None:
    """A long request is written after a short one that began later."""

    def work(cache: SmallCache) -> None:
        cache.space.match(cache.space.chain(TOKENS), "long")
        ask(cache, [1] * 8, "short")
        cache.space.release("long", 99)

    path = tmp_path / "trace.jsonl"
    recorded(path, work)
    with read_trace(path) as read:
        assert read.outputs.tolist() == [99, 0]


def test_requests_that_never_end_are_bounded_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost requests take no memory for ever, and count as asked."""
    monkeypatch.setattr(record, "MAX_OPEN", 2)
    recorder = Recorder(str(tmp_path / "trace.jsonl"), 4)
    for number in range(5):
        recorder.asked(str(number), np.full((1, 2), number, np.uint64), 4, f"session {number}", "unknown")
    assert len(recorder._open) == len(recorder._threads) == 2
    recorder.asked("4", np.full((1, 2), 9, np.uint64), 4, None, "unknown")
    recorder.close()
    recorder.close()
    with read_trace(tmp_path / "trace.jsonl") as read:
        assert len(read) == 6


def test_a_recording_ends_at_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten setting does not fill a disk."""
    monkeypatch.setattr(record, "MAX_BYTES", 1000)
    path = tmp_path / "trace.jsonl"
    recorded(path, lambda cache: [ask(cache, TOKENS, str(i)) for i in range(100)] and None)
    assert path.stat().st_size < 2000


def test_a_file_that_cannot_be_written_any_more_stops_nobody(tmp_path: Path) -> None:
    """It is an error that is counted; requests are served."""
    (tmp_path / "gone").mkdir()
    cache = small_cache(16, record=tmp_path / "gone" / "trace.jsonl")
    (tmp_path / "gone").rmdir()
    ask(cache, TOKENS, "a")
    assert cache.load(TOKENS) == [0, 0, 0, 0]
    reasons = {row["reason"] for row in cache.manager.state()["events"] if row["event"] == "error"}
    cache.manager.close()
    assert "record:FileNotFoundError" in reasons


def test_the_setting_is_part_of_the_configuration(tmp_path: Path) -> None:
    """It survives the way through a configuration, and nothing is opened by constructing."""
    path = tmp_path / "trace.jsonl"
    again = CacheManager.from_config(CacheManager(record=path).to_config())
    assert again.config.record == str(path)
    assert not path.exists()
    for wrong in ("", 3):
        with pytest.raises(ConfigError, match="record"):
            CacheManager(record=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["no/such/directory/trace.jsonl", "."])
def test_a_file_that_cannot_be_written_is_said_before_a_request_comes(tmp_path: Path, place: str) -> None:
    """When the model is registered, with what to give instead."""
    with pytest.raises(ConfigError, match=r"record=.*give the path of one in a directory"):
        small_cache(8, record=tmp_path / place)
