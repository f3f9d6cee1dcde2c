"""A trace as numbers: read once, then replayed any number of times.

Blocks are numbered by (parent, identifier).  The numbers of all requests go to a temporary file that is mapped into
memory, four bytes a block access, so that a trace may be larger than memory; what stays in memory is some sixty bytes a
request and a distinct block.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..engine.table import Keys, KeyTable
from ..errors import TraceError
from ..jit import kernel
from ..policy.base import REUSE_HINTS
from .formats import DEFAULTS, Format, Ids, Options, TraceRequest, detect
from .lines import Faults, Lines

Nodes = npt.NDArray[np.int32]
Progress = Callable[[float, float], None]

THREADS = 65536
"""Conversations whose last request is remembered while a trace is read."""
NEVER = np.iinfo(np.int32).max
"""Number of the next request that uses a block which no later one does."""


class Nodebook:
    """Distinct blocks: their keys, parents and depths, by number."""

    def __init__(self) -> None:
        self.count = 0
        self._resize(1024)

    def _resize(self, rows: int) -> None:
        keys, parents, depths = np.zeros((rows, 2), np.uint64), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        if self.count:
            keys[: self.count], parents[: self.count] = self.keys, self.parents
            depths[: self.count] = self.depths
        self._keys, self._parents, self._depths = keys, parents, depths
        self._table = KeyTable(keys)
        self._table.insert(np.arange(self.count, dtype=np.int32))

    @property
    def keys(self) -> Keys:
        """Key of each block ``[n, 2]``."""
        return self._keys[: self.count]

    @property
    def parents(self) -> Nodes:
        """Block before each; -1 for none."""
        return self._parents[: self.count]

    @property
    def depths(self) -> Nodes:
        """How many blocks lie before each."""
        return self._depths[: self.count]

    def number(self, blocks: Ids, scope: int, known: Nodes) -> Nodes:
        """Numbers of *blocks*, a chain, of which the leading ones have the *known* numbers."""
        first = len(known)
        if first == len(blocks):
            return known
        key = self._keys[known[-1]].tobytes() if first else xxhash.xxh3_128_digest(b"scope %d" % scope)
        fresh = bytearray()
        for identifier in blocks[first:]:
            key = xxhash.xxh3_128_digest(key + identifier.tobytes())
            fresh += key
        keys = np.frombuffer(fresh, np.uint64).reshape(-1, 2)
        nodes = self._table.find(keys)
        new = np.flatnonzero(nodes < 0)
        if len(new):
            nodes[new] = self._add(keys[new])
            above = np.concatenate((known[-1:] if first else np.array([-1], np.int32), nodes[:-1]))
            self._parents[nodes[new]] = above[new]
            self._depths[nodes[new]] = first + new
        return np.concatenate((known, nodes))

    def _add(self, keys: Keys) -> Nodes:
        if self.count + len(keys) > len(self._keys):
            self._resize(2 * (self.count + len(keys)))
        nodes = np.arange(self.count, self.count + len(keys), dtype=np.int32)
        self._keys[nodes] = keys
        self._table.insert(nodes)
        self.count += len(keys)
        return nodes


class Workload:
    """All requests of one trace, in order of time.

    Attributes
    ----------
    name:
        The trace's file name.
    block_tokens:
        Tokens of a block.
    offsets:
        ``int64 [requests + 1]``: request i uses the blocks ``nodes[offsets[i]:offsets[i + 1]]``.
    at_s, inputs, outputs, reuse:
        Columns by request: time in seconds, tokens of prompt and answer, number in ``REUSE_HINTS``.
    faults:
        Lines that were passed over.
    """

    def __init__(self, name: str, block_tokens: int, faults: Faults) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.faults = faults
        self.book = Nodebook()
        self._spool: IO[bytes] = tempfile.TemporaryFile(prefix="kvcache-factory-")  # noqa: SIM115  closed by close()
        self._scratch: list[IO[bytes]] = [self._spool]
        self._columns = (array("q", [0]), array("d"), array("q"), array("q"), array("b"))
        self._last: OrderedDict[int, tuple[Ids, Nodes]] = OrderedDict()

    # -- reading ------------------------------------------------------------------------------------------------------

    def add(self, request: TraceRequest) -> None:
        """Append one request."""
        offsets, times, inputs, outputs, reuse = self._columns
        before = self._last.get(request.thread)
        known: Nodes = np.empty(0, np.int32)
        if before is not None:
            known = before[1][: _common(before[0], request.blocks)]
        nodes = self.book.number(request.blocks, request.scope, known)
        if request.thread >= 0:
            self._last[request.thread] = request.blocks, nodes
            self._last.move_to_end(request.thread)
            if len(self._last) > THREADS:
                self._last.popitem(last=False)
        self._spool.write(nodes.tobytes())
        offsets.append(offsets[-1] + len(nodes))
        times.append(max(request.at_s, times[-1]) if times else request.at_s)
        inputs.append(request.input_tokens or len(nodes) * self.block_tokens)
        outputs.append(request.output_tokens)
        reuse.append(REUSE_HINTS.index(request.reuse))

    def finish(self) -> Workload:
        """End reading: map what was written; TraceError when there is no block in it."""
        offsets, times, inputs, outputs, reuse = self._columns
        self.offsets = np.array(offsets, np.int64)
        self.at_s = np.array(times, np.float64)
        self.inputs, self.outputs = np.array(inputs, np.int64), np.array(outputs, np.int64)
        self.reuse = np.array(reuse, np.int8)
        self._columns = (array("q"), array("d"), array("q"), array("q"), array("b"))
        self._last.clear()
        if not self.blocks:
            raise TraceError(f"the trace {self.name} is empty: it holds no request with a full block")
        self._spool.flush()
        self.nodes: Nodes = _mapped(self._spool, np.int32, self.blocks)
        return self

    # -- what is in it ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def blocks(self) -> int:
        """Block accesses of all requests."""
        return int(self.offsets[-1])

    @property
    def unique(self) -> int:
        """Distinct blocks."""
        return self.book.count

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Blocks of each request."""
        return np.diff(self.offsets)

    def request(self, number: int) -> Nodes:
        """Numbers of the blocks of one request."""
        return self.nodes[self.offsets[number] : self.offsets[number + 1]]

    def next_uses(self) -> Nodes:
        """For each block access, the number of the next request that uses the block, or NEVER; in a temporary file."""
        file: IO[bytes] = tempfile.TemporaryFile(prefix="kvcache-factory-")  # noqa: SIM115  closed by close()
        self._scratch.append(file)
        file.truncate(4 * self.blocks)
        uses: Nodes = _mapped(file, np.int32, self.blocks)
        _next_uses(self.nodes, self.offsets, np.full(self.unique, NEVER, np.int32), uses)
        return uses

    def close(self) -> None:
        """Let go of the temporary files; idempotent."""
        for file in self._scratch:
            file.close()

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@kernel("void(i4[::1], i8[::1], i4[::1], i4[::1])", yields=True)
def _next_uses(nodes: Any, offsets: Any, upcoming: Any, uses: Any) -> None:
    for back in range(len(offsets) - 1):
        request = len(offsets) - 2 - back
        for at in range(offsets[request], offsets[request + 1]):
            uses[at] = upcoming[nodes[at]]
            upcoming[nodes[at]] = request


def _mapped(file: IO[bytes], dtype: Any, count: int) -> npt.NDArray[Any]:
    return np.asarray(np.memmap(file, dtype, "r+", shape=(count,)))


def _common(before: Ids, now: Ids) -> int:
    """Length of the common beginning of two chains."""
    length = min(len(before), len(now))
    differs = before[:length] != now[:length]
    return int(differs.argmax()) if differs.any() else length


def read_trace(
    path: Path,
    *,
    options: Options = DEFAULTS,
    strict: bool = False,
    block_tokens: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Workload:
    """Read a trace of any known format.

    Raises TraceError when the file cannot be read, has no known format, or no request in it; with *strict*, also for
    the first broken line, which is otherwise passed over and counted in ``faults``.  *block_tokens* overrides what the
    format says.
    """
    faults = Faults(strict)
    with closing(Lines(path, faults)) as lines:
        numbered = iter(lines)
        made, first = _detect(numbered, path, faults, options)
        workload = Workload(path.name, block_tokens or made.block_tokens, faults)
        try:
            for number, request in enumerate(made.read(chain([first], numbered), lines, faults)):
                workload.add(request)
                if number % 256 == 0:
                    progress(lines.position, lines.size)
            return workload.finish()
        except BaseException:
            workload.close()
            raise


def _detect(
    lines: Iterator[tuple[int, bytes]], path: Path, faults: Faults, options: Options
) -> tuple[Format, tuple[int, bytes]]:
    for number, text in lines:
        made = detect(text, options)
        if made is not None:
            return made, (number, text)
        faults.note(path, number, "no JSON object of a known trace format")
    if faults.count:
        raise TraceError(
            f"{path} is no trace of a known format (Mooncake, Qwen-Bailian, coding-agent sessions, or a recording of "
            f"CacheManager(record=...)): {faults.shown[0]}"
        )
    raise TraceError(f"the trace {path} is empty; give one with a request a line, or synthetic:chat")
