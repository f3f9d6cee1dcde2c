"""``kvcache-factory plan``: how much DRAM and NVMe a workload is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .output import emit, json_option, progress_bar
from .plot import plot_option
from .traces import cost_model, read, trace_options, trace_path


@click.command(epilog="Example: kvcache-factory plan trace.jsonl --model llama-3-8b --target 90")
@click.argument("trace", type=trace_path)
@click.option("--model", required=True, metavar="NAME|DIR", help="llama-3-8b, ..., or a directory with config.json.")
@click.option(
    "--target",
    type=click.FloatRange(0, 100, min_open=True),
    default=90.0,
    show_default=True,
    help="Per cent of the prefix tokens that an unlimited cache would find.",
)
@click.option("--policy", default="lru", show_default=True, help="Eviction policy of all tiers.")
@click.option(
    "--prices", metavar="TABLE", help="dram=3.2,nvme=0.08,gpu=2.5 (a GiB and month; an hour), or a JSON file."
)
@click.option(
    "--dram-gb-s",
    type=click.FloatRange(min=0, min_open=True),
    default=25.0,
    show_default=True,
    help="GB/s that blocks are loaded at from DRAM.",
)
@click.option(
    "--nvme-gb-s",
    type=click.FloatRange(min=0, min_open=True),
    default=6.0,
    show_default=True,
    help="GB/s that blocks are loaded at from NVMe.",
)
@trace_options
@plot_option("Draw the curve and the answer.")
@json_option
def plan(trace: Path, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Say how much DRAM and NVMe serve so many per cent of the prefix tokens.

    NVMe holds all that is kept, DRAM the part that earns most: by the price table where there is one, else up to the
    knee of the curve.  Seconds of prefill saved are those of the whole trace, less the time to load.
    """
    from ..jit import warm_up
    from ..simulate.models import find_model
    from ..simulate.plan import Planner, Prices, describe
    from ..simulate.plot import draw_plan
    from ..simulate.study import parse_policy

    model, policy = find_model(options["model"]), parse_policy(options["policy"])
    cost = cost_model(model, options["prefill_rate"], options["prefill_file"], options["tflops"])
    prices = Prices.parse(options["prices"]) if options["prices"] else Prices()
    reading = {name: options[name] for name in ("strict", "seed", "window_h", "block_tokens")}
    with progress_bar("plan") as progress:
        warm_up()
        with read(trace, progress, **reading) as workload:
            planner = Planner(
                workload,
                model,
                policy,
                target=options["target"] / 100,
                kv_dtype=options["kv_dtype"],
                cost=cost,
                prices=prices,
                load_gb_s={"dram": options["dram_gb_s"], "nvme": options["nvme_gb_s"]},
            )
            rows = planner.run(lambda done, total: progress(done, total, f"planning for {model.name}"))
    if plot is not None:
        draw_plan(rows, plot)
    emit("plan", rows, as_json=as_json, title=describe(rows, planner))
