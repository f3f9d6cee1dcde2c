"""Processes that use one directory: they store, read back and compare, until they are told or killed.

What a block holds follows from its tokens alone, so every process can tell right bytes from wrong ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.faults.harness import DiskCache, open_cache_over, tokens_of

# Children are forked from a process that has imported everything and has no threads.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.worker", "torch"])
PATIENCE_S = 60.0


def universe(conversations: int, blocks: int) -> list[list[int]]:
    """Conversations of which each pair of neighbours shares its first half."""
    made = []
    for number in range(conversations):
        shared = tokens_of(number // 2 + 1000, blocks // 2)
        made.append(shared + tokens_of(number, blocks - blocks // 2))
    return made


def use(cache: DiskCache, tokens: list[int], name: str) -> int:
    """What an engine does with a prompt: load what is there, compute the rest, store it.  Returns the blocks loaded."""
    loaded = cache.load(tokens, name)
    cache.begin_save(tokens)
    return loaded


def work(pipe: Connection, path: str, seed: int, conversations: int, blocks: int, options: dict[str, Any]) -> None:
    """Use random conversations for ever; says ``"ready"`` when the first is stored, or what went wrong."""
    try:
        cache = open_cache_over(path, **options)
        draw = random.Random(seed)
        prompts = universe(conversations, blocks)
        use(cache, draw.choice(prompts), "first")
        cache.manager.wait()
        pipe.send("ready")
        rounds = 0
        while not pipe.poll():
            use(cache, draw.choice(prompts)[: draw.randint(1, blocks) * cache.space.block_tokens], "request")
            rounds += 1
            if rounds % 8 == 0:
                cache.manager.evict(draw.randint(1, 16))
        cache.manager.wait()
        pipe.send(summary(cache, rounds))
        cache.manager.close()
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def read_all(pipe: Connection, path: str, conversations: int, blocks: int, options: dict[str, Any]) -> None:
    """Read everything that can be matched and compare it; sends how many blocks were right, or what was wrong."""
    try:
        cache = open_cache_over(path, **options)
        right = sum(cache.load(tokens) for tokens in universe(conversations, blocks))
        cache.manager.wait()
        pipe.send(summary(cache, right))
        cache.manager.close()
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def summary(cache: DiskCache, done: int) -> dict[str, Any]:
    """What a process says when it has ended well."""
    refused, problems = cache.counted("load_failed"), cache.manager.check()
    return {"done": done, "refused": refused, "problems": problems, "errors": cache.errors()}


class Child:
    """A process of this module, and the pipe to it."""

    def __init__(self, target: Any, path: Path, *arguments: Any, **options: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(target=target, args=(theirs, str(path), *arguments, options))
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """The next thing that the process says."""
        assert self.pipe.poll(PATIENCE_S), "the process says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.pipe.close()

    def stop(self) -> Any:
        """Have it end by itself; returns its last words."""
        self.pipe.send("stop")
        said = self.answer()
        self.process.join(PATIENCE_S)
        return said


@contextmanager
def children() -> Iterator[list[Child]]:
    """A list of processes, of which none is left behind."""
    started: list[Child] = []
    try:
        yield started
    finally:
        for child in started:
            if child.process.is_alive():
                child.kill()
