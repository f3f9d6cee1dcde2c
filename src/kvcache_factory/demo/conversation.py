"""One phase of the demo: the same conversation, turn by turn, timed to the first token of each answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .text import question

if TYPE_CHECKING:
    from ..backend import Backend

_CACHE_GB = 1.0
_SEGMENT_MB = 64
_LEAVES_S = 900
_WARM_UP = "A sentence that no turn of the conversation begins with, said often enough to fill a block. " * 8

Row = dict[str, Any]


class FirstToken:
    """A streamer that notes when the first generated token arrives; the prompt is put before it."""

    def __init__(self) -> None:
        self._puts = 0
        self._started_s = time.perf_counter()
        self.seconds = float("nan")

    def put(self, value: Any) -> None:
        """Called by Transformers with the prompt, and then with each token."""
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter() - self._started_s

    def end(self) -> None:
        """Called by Transformers when the sequence is complete."""


def backend_on(directory: Path) -> Backend:
    """DRAM above *directory*, with room for the conversation in both beside what the directory holds already."""
    from ..backend import GIB, CPUBackend, DiskBackend, HierarchicalBackend
    from ..store.disk.directory import Directory

    held_gb = 0.0
    with contextlib.suppress(OSError):  # absent, or of no use, which opening it will say
        held_gb = Directory(directory).list().used_bytes / GIB
    disk = DiskBackend(str(directory), size_gb=held_gb + _CACHE_GB, segment_mb=_SEGMENT_MB)
    return HierarchicalBackend([CPUBackend(size_gb=_CACHE_GB), disk])


def backend_over(url: str, namespace: str) -> Backend:
    """DRAM above the Redis server at *url*; blocks leave there by themselves after a while."""
    from ..backend import CPUBackend, HierarchicalBackend, RemoteBackend

    remote = RemoteBackend(
        connector="REDIS", options={"url": url, "ttl_s": _LEAVES_S}, namespace=namespace, ingestion="all"
    )
    return HierarchicalBackend([CPUBackend(size_gb=_CACHE_GB), remote])


def converse(
    adapter: Any, phase: str, text: str, turns: int, max_new_tokens: int, said: Callable[[Row, list[int]], None]
) -> None:
    """Hold the conversation once; *said* is told the row of each turn and the tokens of its answer."""
    session = adapter.manager.create_session(f"demo-{phase}")
    messages: list[dict[str, str]] = []
    for turn in range(1, turns + 1):
        content = question(turn) if messages else f"{text}\n\n{question(turn)}"
        messages.append({"role": "user", "content": content})
        clock = FirstToken()
        reply = adapter.chat(session, messages, max_new_tokens=max_new_tokens, do_sample=False, streamer=clock)
        messages.append({"role": "assistant", "content": reply.text})
        row = {
            "phase": phase,
            "turn": turn,
            "prompt_tokens": reply.prompt_tokens,
            "reused_tokens": reply.reused_tokens,
            "ttft_s": clock.seconds,
        }
        said(row, list(reply.token_ids))


def warm_up(model: Any, tokenizer: Any) -> None:
    """Let the first calls' own costs (allocations, lazy imports, compilation) fall outside of what is measured.

    Two calls: where there is a cache, the first saves and the second loads.
    """
    from ..jit import warm_up as compile_kernels

    compile_kernels()
    ids = tokenizer(_WARM_UP, return_tensors="pt")["input_ids"]
    for _ in range(2):
        model.generate(ids, max_new_tokens=2, do_sample=False)
