"""``kvcache-factory bench``: the benchmark tables."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .output import emit, json_option, progress_bar

TABLES = {
    "l1": (
        "Put and get of whole blocks against libc memcpy.",
        "CPU time, cold random slots, ratio to memcpy of whole blocks in the same run.",
    ),
    "match": ("Prefix lookup of long prompts.", "peek, keys known, from tokens, next turn; in milliseconds."),
    "keys": ("Block keys from tokens.", "Nanoseconds a token for each key builder."),
    "disk": (
        "Put and get of blocks on disk against fio.",
        "Wall time, four threads, ratio to fio psync with four jobs where fio is installed, else to a probe.",
    ),
    "l2": (
        "Put and get of blocks through a connector against raw clients of the same store.",
        "Wall time of moving alone, and verified: sealed and proven; ratio above 1 is faster.  --connector is needed.",
    ),
    "policy": ("Cost of eviction policies.", "CPU time a block that is asked for, in a full index, and bytes a row."),
    "sessions": (
        "Many threads on many sessions against one thread.",
        "Turns a second of 1 to 32 threads on 200 sessions with quotas: wall time, ratio to one thread in a round.",
    ),
    "ledger": ("Cost of counting.", "CPU time of an L1 get with counts, and with durations too, by that without."),
    "timing": (
        "What measuring costs: operations with nothing, operations, and their stages measured.",
        "CPU time of this thread, microseconds a call for a small and a large request.",
    ),
    "index": ("Memory and eviction of the index.", "Bytes a block, and eviction with half of the entries leased."),
}
OPTIONS = {
    "disk": (
        click.Option(
            ["--path"],
            type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
            metavar="DIR",
            help="Directory on the disk to measure; by default that of temporary files.",
        ),
    ),
    "l2": (
        click.Option(["--connector"], required=True, metavar="NAME", help="REDIS, ROCKSDB, SHFS, …, or module:Class."),
        click.Option(["--option"], multiple=True, metavar="NAME=VALUE", help="Option of the connector; may repeat."),
    ),
}


EXAMPLES = {"l2": "--connector REDIS "}


@click.group(epilog="Example: kvcache-factory bench l1 --quick --json")
def bench() -> None:
    """Measure the hot paths on this machine."""


def _command(name: str, title: str, detail: str) -> click.Command:
    def run(quick: bool, as_json: bool, **options: Any) -> None:
        room = import_module(f"kvcache_factory.bench.{name}")
        measure: Callable[..., list[dict[str, Any]]] = getattr(room, f"run_{name}")
        given = {key: value for key, value in options.items() if value is not None}
        with progress_bar(f"bench {name}") as progress:
            rows = measure(progress=progress, quick=quick, **given)
        emit(f"bench {name}", rows, as_json=as_json, title=f"bench {name}: {title}")

    quick = click.Option(["--quick"], is_flag=True, help="Fewer rounds and smaller sets: a smoke test, not a figure.")
    command = click.Command(
        name,
        callback=run,
        params=[quick, *OPTIONS.get(name, ())],
        help=f"{title}\n\n{detail}",
        epilog=f"Example: kvcache-factory bench {name} {EXAMPLES.get(name, '')}--json",
    )
    return json_option(command)


for _name, _texts in TABLES.items():
    bench.add_command(_command(_name, *_texts))
