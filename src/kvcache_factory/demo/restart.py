"""The demo's third phase: a fresh process that knows nothing but the directory on the disk.

``python -m kvcache_factory.demo.restart OPTIONS`` holds the conversation there and prints one JSON line a turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..errors import StoreError
from .conversation import Row, backend_on, converse, warm_up
from .model import load_model
from .text import reference_text

COMMAND = (sys.executable, "-m", "kvcache_factory.demo.restart")


class Options(msgspec.Struct, frozen=True):
    """What the fresh process is told."""

    directory: str
    dtype: str
    turns: int
    max_new_tokens: int


def converse_afresh(options: Options, said: Callable[[Row, list[int]], None]) -> None:
    """Start the process, and pass on what it says of each turn; StoreError when it fails."""
    command = [*COMMAND, msgspec.json.encode(options).decode()]
    with (
        tempfile.TemporaryFile("w+") as problems,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=problems, text=True) as process,
    ):
        assert process.stdout is not None
        try:
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
            raise StoreError(f"the restarted process ended with {process.returncode}: {' '.join(last)}", "restart")


def main(arguments: list[str]) -> None:
    """What the fresh process does."""
    from ..integration.transformers import TransformersCacheAdapter
    from ..manager import CacheManager

    options = msgspec.json.decode(arguments[0], type=Options)
    model, tokenizer = load_model(options.dtype)
    with CacheManager(backend=backend_on(Path(options.directory))) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, tokenizer=tokenizer)
        warm_up(model, tokenizer)
        converse(adapter, "restart", reference_text(), options.turns, options.max_new_tokens, _say)
        adapter.detach()


def _say(row: Row, answer: list[int]) -> None:
    print(json.dumps({"row": row, "answer": answer}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
