"""A phase of the demo in a fresh process that knows nothing but a directory, or a Redis server.

``python -m kvcache_factory.demo.restart`` holds the conversation there and prints one JSON line a turn.  Its options
come by standard input, since the address of a server may hold a password.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..errors import StoreError
from .conversation import Row, backend_on, backend_over, converse, warm_up
from .model import load_model
from .text import reference_text

COMMAND = (sys.executable, "-m", "kvcache_factory.demo.restart")


class Options(msgspec.Struct, frozen=True):
    """What the fresh process is told."""

    directory: str
    dtype: str
    turns: int
    max_new_tokens: int
    remote: str = ""
    namespace: str = "aibrix"
    phase: str = "restart"


def converse_afresh(options: Options, said: Callable[[Row, list[int]], None]) -> None:
    """Start the process, and pass on what it says of each turn; StoreError when it fails."""
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as problems,
        subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=problems, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
                process.stdin.write(msgspec.json.encode(options).decode())
                process.stdin.close()
            for line in process.stdout:
                if line.startswith("{"):
                    told = json.loads(line)
                    said(told["row"], told["answer"])
        except BaseException:
            process.kill()
            raise
        if process.wait():
            problems.seek(0)
            last = [line.strip() for line in problems if line.strip()][-1:]
            raise StoreError(f"the fresh process ended with {process.returncode}: {' '.join(last)}", "restart")


def main(told: str) -> None:
    """What the fresh process does; *told* are its options, as JSON."""
    from ..integration.transformers import TransformersCacheAdapter
    from ..manager import CacheManager

    options = msgspec.json.decode(told, type=Options)
    remote, directory = options.remote, Path(options.directory)
    backend = backend_over(remote, options.namespace) if remote else backend_on(directory)
    model, tokenizer = load_model(options.dtype)
    with CacheManager(backend=backend) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, tokenizer=tokenizer)
        warm_up(model, tokenizer)
        converse(adapter, options.phase, reference_text(), options.turns, options.max_new_tokens, _say)
        adapter.detach()
        manager.wait()  # until all is there for the next one


def _say(row: Row, answer: list[int]) -> None:
    print(json.dumps({"row": row, "answer": answer}), flush=True)


if __name__ == "__main__":
    main(sys.stdin.read())
