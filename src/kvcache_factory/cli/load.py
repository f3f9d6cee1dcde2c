"""``kvcache-factory load``: simulated users against a real adapter, for minutes or hours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from .output import emit, json_option, print_rows, progress_bar
from .plot import plot_option

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds, given as a number with s, m or h behind it, or nothing."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", value.strip())
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is no duration above 0: use 90, 90s, 10m or 2h", ctx, param)
    return float(match[1]) * _UNITS[match[2]]


@click.command(epilog="Example: kvcache-factory load --duration 10m --users 32 --plot load.png")
@click.option("--duration", callback=seconds_of, required=True, metavar="TIME", help="How long: 90s, 10m, 2h.")
@click.option("--users", type=click.IntRange(min=1), default=32, show_default=True, help="Users at a time.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Threads that answer them.")
@click.option("--think-s", type=click.FloatRange(min=0), default=4.0, show_default=True, help="Mean time to think.")
@click.option("--memory-mb", type=click.IntRange(min=1), default=48, show_default=True, help="MiB of the memory tier.")
@click.option(
    "--disk", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Directory of a disk tier below it."
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure lengths, pauses and changes of topic from this trace.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="What the users say follows from it.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), help="Serve metrics meanwhile, and compare; 0: any port."
)
@click.option("--prometheus", metavar="URL", help="Compare with this server too, which scrapes that port.")
@plot_option("Draw memory and hit rate.")
@json_option
def load(
    duration: float,
    users: int,
    workers: int,
    think_s: float,
    memory_mb: int,
    disk: Path | None,
    trace: Path | None,
    seed: int,
    metrics_port: int | None,
    prometheus: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Have simulated users hold conversations with a tiny random model behind the Transformers adapter.

    They think, switch topics, bring long documents, leave and are followed by others.  The report compares the
    generator's own count with the manager's, to the token, and says what drifted: memory, fragmentation, latency.
    How long a turn takes is told in processor time too, beside a yardstick for the machine: others who use it make both
    longer, growth only the one.  Exit code 1 when counts disagree.
    """
    from ..load.plot import draw
    from ..load.run import Plan, run_load
    from ..load.statistics import BUILT_IN, measure

    with progress_bar("load") as progress:
        facts = measure(trace, progress) if trace is not None else BUILT_IN
        plan = Plan(
            duration_s=duration,
            users=users,
            workers=workers,
            think_s=think_s,
            memory_mb=memory_mb,
            disk=disk,
            seed=seed,
            statistics=facts,
            metrics_port=metrics_port,
            prometheus=prometheus,
        )
        rows = run_load(plan, progress)
    if plot is not None:
        draw(rows, plot)
    if as_json:
        emit("load", rows, as_json=True)
    else:
        _print(rows, facts.source)
    if not all(row["agree"] for row in rows if row["kind"] == "count"):
        raise SystemExit(1)


def _print(rows: list[dict[str, Any]], source: str) -> None:
    tables = {
        "count": "The generator's own count and the others",
        "drift": f"Second and last quarter; users as in {source}",
    }
    for kind, title in tables.items():
        shown = [{key: value for key, value in row.items() if key != "kind"} for row in rows if row["kind"] == kind]
        print_rows(shown, title=title)
