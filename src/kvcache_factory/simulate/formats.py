"""Formats of traces, told by their fields: Mooncake, Qwen-Bailian, coding-agent sessions, and our own recordings.

Each has identifiers of blocks in place of tokens; an identifier means the same block only after the same blocks.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from ..observe.record import MAGIC, VERSION
from ..policy.base import REUSE_HINTS
from .lines import Faults, Lines

Ids: TypeAlias = npt.NDArray[np.uint64]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

DAY_S = 86400.0
REORDERED = 4096
"""Requests of a recording that are put in order at a time."""


class TraceRequest(NamedTuple):
    """One request of a trace.

    *blocks* are identifiers within *scope*; *thread* names the conversation where the trace does, so that what it has
    in common with its last request is found quickly; *reuse* is what the trace says of the session's future.
    """

    at_s: float
    blocks: Ids
    input_tokens: int
    output_tokens: int
    scope: int = 0
    thread: int = -1
    reuse: str = "unknown"


class Options(msgspec.Struct, frozen=True):
    """How to read what a trace leaves open."""

    seed: int = 1
    """For the starts of coding-agent sessions."""
    window_s: float = DAY_S
    """Their starts are drawn uniformly over so many seconds."""


DEFAULTS = Options()


class MooncakeLine(msgspec.Struct):
    timestamp: Seconds
    hash_ids: list[Count]
    input_length: Count = 0
    output_length: Count = 0


class QwenLine(MooncakeLine):
    chat_id: int = -1
    parent_chat_id: int = -1


class SessionLine(msgspec.Struct):
    t: list[Seconds]
    keep: list[Count]
    add: list[Count]
    inputs: list[Count] = msgspec.field(name="in")
    out: list[Count] = []
    stop_tool: list[int] = []
    ids: dict[str, list[Count]] = {}


class HeaderLine(msgspec.Struct):
    kvcache_factory_trace: int
    block_tokens: Annotated[int, msgspec.Meta(gt=0)]
    started_s: float


class RecordLine(msgspec.Struct):
    t: Seconds
    ids: list[Count]
    inputs: Count = msgspec.field(name="in", default=0)
    out: Count = 0
    reuse: str = "unknown"
    thread: int = -1


class Mooncake:
    """https://github.com/kvcache-ai/Mooncake, FAST25-release: milliseconds, blocks of 512 tokens."""

    block_tokens: ClassVar[int] = 512
    seconds: ClassVar[float] = 1e-3
    line: ClassVar[type[MooncakeLine]] = MooncakeLine

    def read(self, lines: Iterator[tuple[int, bytes]], source: Lines, faults: Faults) -> Iterator[TraceRequest]:
        """Requests in the order of the file."""
        decoder = msgspec.json.Decoder(self.line)
        for number, text in lines:
            try:
                row = decoder.decode(text)
                blocks = np.array(row.hash_ids, np.uint64)
            except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
                faults.note(source.path, number, str(error))
                continue
            yield TraceRequest(row.timestamp * self.seconds, blocks, row.input_length, row.output_length)


class Qwen(Mooncake):
    """https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon: seconds, blocks of 16 tokens."""

    block_tokens: ClassVar[int] = 16
    seconds: ClassVar[float] = 1.0
    line: ClassVar[type[MooncakeLine]] = QwenLine


class Recording:
    """What ``CacheManager(record=...)`` writes; one header for each run of a manager."""

    block_tokens: int = 0

    def __init__(self, first: bytes) -> None:
        self.block_tokens = msgspec.json.decode(first, type=HeaderLine).block_tokens

    def read(self, lines: Iterator[tuple[int, bytes]], source: Lines, faults: Faults) -> Iterator[TraceRequest]:
        """Requests in order of time.

        A line is written when its request ends, so that a few are too early in the file: they wait in a small heap.
        """
        waiting: list[tuple[float, int, TraceRequest]] = []
        for number, request in enumerate(self._read(lines, source, faults)):
            heapq.heappush(waiting, (request.at_s, number, request))
            if len(waiting) > REORDERED:
                yield heapq.heappop(waiting)[2]
        while waiting:
            yield heapq.heappop(waiting)[2]

    def _read(self, lines: Iterator[tuple[int, bytes]], source: Lines, faults: Faults) -> Iterator[TraceRequest]:
        decoder = msgspec.json.Decoder(RecordLine)
        scope, begun, offset = 0, 0.0, 0.0
        for number, text in lines:
            try:
                if MAGIC.encode() in text[:64]:
                    header = msgspec.json.decode(text, type=HeaderLine)
                    if (header.kvcache_factory_trace, header.block_tokens) != (VERSION, self.block_tokens):
                        raise TraceError(f"{source.path}:{number}: another version or block size than the first run's")
                    begun = begun or header.started_s
                    scope, offset = scope + 1, max(header.started_s - begun, 0.0)
                    continue
                row = decoder.decode(text)
                if row.reuse not in REUSE_HINTS:
                    raise msgspec.ValidationError(f"reuse is {row.reuse!r}")
                blocks = np.array(row.ids, np.uint64)
            except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
                faults.note(source.path, number, str(error))
                continue
            yield TraceRequest(offset + row.t, blocks, row.inputs, row.out, scope, row.thread, row.reuse)


class CodingAgents:
    """Sessions of https://github.com/callanjfox/kv-cache-tester, one a line, without absolute times: starts are drawn.

    Requests of all sessions are merged by time, so this format is read before the first request comes; it takes a few
    numbers a request, and no blocks.
    """

    block_tokens: ClassVar[int] = 512

    def __init__(self, options: Options) -> None:
        self._options = options

    def read(self, lines: Iterator[tuple[int, bytes]], source: Lines, faults: Faults) -> Iterator[TraceRequest]:
        """Requests of all sessions in order of time."""
        draw = random.Random(self._options.seed)
        decoder = msgspec.json.Decoder(SessionLine)
        sessions: list[_Session] = []
        times: list[npt.NDArray[np.float64]] = []
        for number, text in lines:
            start = draw.uniform(0, self._options.window_s)  # for broken lines too: they must not move the others
            try:
                row = decoder.decode(text)
                sessions.append(_Session(row))
            except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
                faults.note(source.path, number, str(error))
                continue
            times.append(start + np.array(row.t, np.float64))
        if not sessions:
            return
        owner = np.repeat(np.arange(len(times)), [len(t) for t in times])
        at = np.concatenate(times)
        for i in np.lexsort((owner, at)).tolist():
            yield sessions[owner[i]].next_request(float(at[i]), int(owner[i]))


class _Session:
    """The requests of one session, made one after the other."""

    def __init__(self, row: SessionLine) -> None:
        length = len(row.t)
        if {len(row.keep), len(row.add), len(row.inputs)} != {length} or row.t != sorted(row.t):
            raise msgspec.ValidationError("t, in, keep and add must be equally long, and t must not go back")
        self._row = row
        self._at = 0
        self._created = 0
        self._chain: Ids = np.empty(0, np.uint64)
        self._new = {int(number): np.array(ids, np.uint64) for number, ids in row.ids.items()}
        for i, (keep, add) in enumerate(zip(row.keep, row.add, strict=True)):
            before = row.keep[i - 1] + row.add[i - 1] if i else 0
            if keep > before or (i in self._new and len(self._new[i]) != add):
                raise msgspec.ValidationError(f"request {i} keeps {keep} of {before} blocks and adds {add}")

    def next_request(self, at_s: float, number: int) -> TraceRequest:
        row, i = self._row, self._at
        self._at += 1
        new = self._new.get(i)
        if new is None:
            new = np.arange(self._created, self._created + row.add[i], dtype=np.uint64)
        if len(new):
            self._created = max(self._created, int(new.max()) + 1)
        self._chain = np.concatenate((self._chain[: row.keep[i]], new))
        output = row.out[i] if i < len(row.out) else 0
        reuse = "tool_pending" if i < len(row.stop_tool) and row.stop_tool[i] else "unknown"
        return TraceRequest(at_s, self._chain, row.inputs[i], output, number, number, reuse)


Format: TypeAlias = "Mooncake | Recording | CodingAgents"


def detect(first: bytes, options: Options) -> Format | None:
    """The format of a trace by one line of it; None when the line is no JSON object."""
    try:
        row = msgspec.json.decode(first)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return _of_fields(row, options, first) if isinstance(row, dict) else None


def _of_fields(row: dict[str, Any], options: Options, text: bytes) -> Format | None:
    if MAGIC in row:
        try:
            return Recording(text)
        except msgspec.ValidationError:
            return None
    known: Sequence[tuple[set[str], Format]] = (
        ({"hash_ids", "timestamp", "chat_id"}, Qwen()),
        ({"hash_ids", "timestamp"}, Mooncake()),
        ({"t", "keep", "add", "in"}, CodingAgents(options)),
    )
    return next((made for fields, made in known if fields <= row.keys()), None)
