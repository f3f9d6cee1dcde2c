"""Two processes that share a Redis server: what the first one computed, the second one loads."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import ConfigError, StoreError
from .conversation import Row, converse, warm_up
from .model import Progress, load_model, silent
from .restart import Options, converse_afresh
from .run import Told, by_turn, check_room, compare
from .text import reference_text

PHASES = {"cold": "without the cache", "first": "in a first process", "second": "in a second process"}


def run_shared(
    *, url: str, dtype: str = "float32", turns: int = 4, max_new_tokens: int = 32, progress: Progress = silent
) -> list[Row]:
    """Hold the conversation without the cache, and in two processes one after the other, over the Redis at *url*.

    Rows as of :func:`~kvcache_factory.demo.run.run_demo`, with the phases of :data:`PHASES`.  Blocks get a namespace of
    this run, and leave the server after a quarter of an hour.

    Raises MissingDependencyError without the packages or the model, ConfigError for a URL or numbers that cannot work,
    StoreError when the server does not answer or a process fails.
    """
    if turns < 1 or max_new_tokens < 1:
        raise ConfigError(f"turns={turns} and max_new_tokens={max_new_tokens} must be at least 1")
    _check_server(url)
    model, tokenizer = load_model(dtype, progress)
    text = reference_text()
    check_room(model, tokenizer, text, turns, max_new_tokens)
    told = Told(PHASES, turns, progress)
    told.tell("cold")
    _without_the_cache(model, tokenizer, text, turns, max_new_tokens, told.said)
    namespace = f"demo-{uuid.uuid4().hex}"
    for phase in ("first", "second"):
        told.tell(phase)
        converse_afresh(Options("", dtype, turns, max_new_tokens, url, namespace, phase), told.said)
    compare(told.rows, told.answers)
    return told.rows


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row for each turn, the processes beside each other: what the table shows."""
    return [
        {
            "turn": turn,
            "prompt_tokens": phases["cold"]["prompt_tokens"],
            "ttft_without_s": phases["cold"]["ttft_s"],
            "reused_by_first": phases["first"]["reused_tokens"],
            "ttft_first_s": phases["first"]["ttft_s"],
            "reused_by_second": phases["second"]["reused_tokens"],
            "ttft_second_s": phases["second"]["ttft_s"],
            "speed_up": phases["cold"]["ttft_s"] / phases["second"]["ttft_s"],
            "output": "identical" if phases["cold"]["identical"] else f"differs from {phases['cold']['diverges_at']}",
        }
        for turn, phases in by_turn(rows).items()
    ]


def _without_the_cache(model: Any, tokenizer: Any, text: str, turns: int, max_new_tokens: int, said: Any) -> None:
    from ..integration.transformers import TransformersCacheAdapter
    from ..manager import CacheManager

    with CacheManager() as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, tokenizer=tokenizer)
        adapter.detach()  # the same conversation, through the same code, without the cache
        warm_up(model, tokenizer)
        converse(adapter, "cold", text, turns, max_new_tokens, said)


def _check_server(url: str) -> None:
    """Find out before the model is loaded, and in words of its own."""
    from ..connector.redis import RedisConnector, RedisOptions

    with ThreadPoolExecutor(1) as executor:
        connector = RedisConnector.from_options("demo", executor, RedisOptions(url=url))
        opened = connector.open()
        connector.close()
    if not opened.is_ok():
        raise StoreError(
            f"{connector.name} cannot be used ({opened.value}); start one with: redis-server --port 6379", "unavailable"
        )
