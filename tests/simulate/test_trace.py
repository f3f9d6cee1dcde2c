"""Traces are told by their fields, read line by line, and what is broken in them is named."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvcache_factory.errors import TraceError
from kvcache_factory.policy.base import REUSE_HINTS
from kvcache_factory.simulate.formats import Options
from kvcache_factory.simulate.workload import Workload, read_trace

from .conftest import Write, mooncake

SESSION = {
    "id": "a",
    "model": "m",
    "t": [0.0, 10.0, 20.0],
    "in": [1300, 1600, 900],
    "out": [5, 6, 7],
    "stop_tool": [1, 0, 0],
    "keep": [0, 2, 1],
    "add": [2, 1, 0],
    "ids": {},
}


def chains(workload: Workload) -> list[list[int]]:
    """The numbers of the blocks of each request."""
    return [workload.request(i).tolist() for i in range(len(workload))]


def test_mooncake_counts_milliseconds_and_blocks_of_512_tokens(write: Write) -> None:
    """A block is known by what is before it: id 9 after 1 is not id 9 after 2."""
    with read_trace(write(mooncake([[1, 9], [2, 9], [1, 9, 3]], step_ms=1500))) as read:
        assert read.block_tokens == 512
        assert read.at_s.tolist() == [0.0, 1.5, 3.0]
        assert chains(read) == [[0, 1], [2, 3], [0, 1, 4]]
        assert (read.blocks, read.unique) == (7, 5)
        assert read.book.parents.tolist() == [-1, 0, -1, 2, 1]
        assert read.book.depths.tolist() == [0, 1, 0, 1, 2]
        assert read.inputs.tolist() == [1024, 1024, 1536]


def test_qwen_counts_seconds_and_blocks_of_16_tokens(write: Write) -> None:
    """The published schema of Qwen-Bailian, told by its chat_id."""
    row = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 33, "output_length": 132}
    row |= {"type": "text", "turn": 2, "hash_ids": [2**63, 1090, 1091]}
    with read_trace(write([row])) as read:
        assert (read.block_tokens, read.at_s.tolist(), read.inputs.tolist()) == (16, [61.114], [33])
        assert chains(read) == [[0, 1, 2]]


def test_sessions_of_coding_agents_start_where_the_seed_says(write: Write) -> None:
    """Starts are drawn in the order of the file; requests of all sessions are merged by time."""
    path = write([SESSION, SESSION])
    with read_trace(path, options=Options(seed=1, window_s=100.0)) as read:
        draw = random.Random(1)
        starts = [draw.uniform(0, 100.0) for _ in range(2)]
        expected = sorted(start + t for start in starts for t in (0.0, 10.0, 20.0))
        assert read.at_s.tolist() == pytest.approx(expected)
        assert read.unique == 6  # two sessions share nothing
        assert read.lengths.tolist().count(3) == 2
        assert {REUSE_HINTS[i] for i in read.reuse.tolist()} == {"tool_pending", "unknown"}
    with read_trace(path, options=Options(seed=2, window_s=100.0)) as other:
        assert other.at_s.tolist() != pytest.approx(expected)


def test_a_broken_session_does_not_move_the_others(write: Write) -> None:
    """The start of a line that is passed over is drawn all the same."""
    last = {**SESSION, "t": [0.0, 1.0, 2.0]}
    with read_trace(write([SESSION, SESSION, last])) as whole, read_trace(write([SESSION, "{", last])) as holed:
        assert set(holed.at_s.tolist()) < set(whole.at_s.tolist())
        assert holed.faults.count == 1


def test_listed_ids_return_to_earlier_blocks(write: Write) -> None:
    """Where a session goes back to blocks that it has left, the trace lists them."""
    row = {**SESSION, "keep": [0, 1, 1], "add": [2, 1, 1], "ids": {"2": [1]}}
    with read_trace(write([row])) as read:
        assert chains(read) == [[0, 1], [0, 2], [0, 1]]


@pytest.mark.parametrize(
    "change",
    [{"keep": [0, 3, 1]}, {"add": [2, 1]}, {"t": [5.0, 1.0, 2.0]}, {"ids": {"1": [7, 8]}}, {"in": [-1, 2, 3]}],
    ids=str,
)
def test_a_session_that_contradicts_itself_is_broken(write: Write, change: dict[str, Any]) -> None:
    """More kept than there was, columns of different lengths, time that goes back: the line is named and skipped."""
    with read_trace(write([SESSION, {**SESSION, **change}])) as read:
        assert (len(read), read.faults.count) == (3, 1)
        assert read.faults.shown[0].startswith(f"{write([])}:2: ")


def test_compressed_traces_are_told_by_their_content(tmp_path: Path) -> None:
    """A gzip file reads as the plain one, whatever its name."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(json.dumps(mooncake([[1, 2]])[0]).encode()))
    with read_trace(path) as read:
        assert chains(read) == [[0, 1]]


def test_a_cut_off_archive_gives_what_it_has(tmp_path: Path) -> None:
    """A download that broke off is used up to there, and counted."""
    lines = "".join(json.dumps(row) + "\n" for row in mooncake([[i, i + 1] for i in range(20000)]))
    path = tmp_path / "trace.gz"
    whole = gzip.compress(lines.encode())
    path.write_bytes(whole[: len(whole) // 2])
    with read_trace(path) as read:
        assert 0 < len(read) < 20000
        assert read.faults.count >= 1
    with pytest.raises(TraceError, match=r"trace\.gz:\d+"):
        read_trace(path, strict=True)


BROKEN = [
    "{",
    "[]",
    '{"timestamp": 1}',
    '{"timestamp": -1, "hash_ids": [1]}',
    '{"timestamp": 1, "hash_ids": [-1]}',
    '{"timestamp": 1, "hash_ids": "x"}',
    '{"timestamp": 1, "hash_ids": [1.5]}',
    '{"timestamp": 1, "hash_ids": [36893488147419103232]}',
    "\x00\x01",
]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named_counted_and_skipped(write: Write, line: str) -> None:
    """One bad line costs one request; --strict makes it the end."""
    rows = mooncake([[1, 2], [1, 2, 3]])
    path = write([rows[0], line, rows[1]])
    with read_trace(path) as read:
        assert chains(read) == [[0, 1], [0, 1, 2]]
        assert read.faults.count == 1
        assert read.faults.shown[0].startswith(f"{path}:2: ")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: "):
        read_trace(path, strict=True)


def test_a_broken_first_line_does_not_hide_the_format(write: Write) -> None:
    """The format is told by the first line that has one."""
    with read_trace(write(["oops", *mooncake([[1]])])) as read:
        assert (len(read), read.faults.count) == (1, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        (["", "  "], "is empty"),
        (mooncake([[]]), "is empty"),
        (['{"prompt": "hello"}'], "no trace of a known format"),
        (["<html>"], "no trace of a known format"),
    ],
)
def test_a_trace_without_a_request_is_an_error(write: Write, rows: list[Any], message: str) -> None:
    """Nothing to replay is said, not divided by."""
    with pytest.raises(TraceError, match=message):
        read_trace(write(rows))


def test_a_trace_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(TraceError, match=r"none\.jsonl"):
        read_trace(tmp_path / "none.jsonl")


def test_time_that_goes_back_stands_still(write: Write) -> None:
    """A line that is late by its clock does not turn the replay's clock back."""
    rows = mooncake([[1], [2], [3]])
    rows[1]["timestamp"] = 9000
    with read_trace(write(rows)) as read:
        assert read.at_s.tolist() == [0.0, 9.0, 9.0]


def test_memory_does_not_grow_with_what_is_repeated(write: Write) -> None:
    """Block accesses lie in a file: a trace of many requests over few blocks takes no more memory for each block."""
    chain = list(range(200))
    with read_trace(write(mooncake([chain] * 50))) as read:
        assert (read.blocks, read.unique) == (10_000, 200)
        assert read.nodes.base is not None
        assert not read.nodes.flags.owndata


def test_a_trace_larger_than_memory_is_streamed(write: Write) -> None:
    """What is allocated while a trace is read is a fraction of the trace, and the same for one four times as long."""
    peaks = []
    for requests in (60, 240):
        path = write(mooncake([list(range(turn % 2, 1000)) for turn in range(requests)]), f"{requests}.jsonl")
        tracemalloc.start()
        with read_trace(path) as read:
            peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert read.blocks > 900 * requests
    assert path.stat().st_size > peaks[1]
    assert peaks[1] < 1.3 * peaks[0]
