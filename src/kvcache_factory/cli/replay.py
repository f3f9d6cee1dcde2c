"""``kvcache-factory replay``: traces through the engine's own index and policies, without moving a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .output import Progress, emit, json_option, progress_bar
from .plot import plot_option
from .traces import cost_model, read, trace_options, trace_path


@click.command(epilog="Example: kvcache-factory replay trace.jsonl --policy lru,fifo --capacity 1%,5%")
@click.argument("traces", nargs=-1, required=True, type=trace_path, metavar="TRACE...")
@click.option("--policy", default="lru", show_default=True, help="Names, with commas; name:option=value sets options.")
@click.option(
    "--capacity",
    multiple=True,
    default=("1%,5%,10%",),
    show_default=True,
    help="In % of unique blocks, blocks, or GiB with a model; may be given several times.",
)
@click.option(
    "--tiers",
    multiple=True,
    metavar="NAME=CAPACITY,...",
    help="Tiers, the fastest first: dram=2%,nvme=20%. Repeatable.",
)
@click.option(
    "--semantics",
    type=click.Choice(["prefix", "flat"]),
    default="prefix",
    show_default=True,
    help="flat: blocks as unrelated objects, one by one.",
)
@click.option(
    "--hints",
    type=click.Choice(["none", "trace", "oracle"]),
    default="none",
    show_default=True,
    help="Reuse hints: none, the trace's, or whether the session really returns.",
)
@click.option("--inflight", is_flag=True, help="Requests take time and hold leases; needs a cost of prefill.")
@click.option(
    "--decode-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=40.0,
    show_default=True,
    help="Tokens a second of one answer, for --inflight.",
)
@click.option(
    "--model", metavar="NAME|DIR", help="Geometry of blocks: llama-3-8b, ..., or a directory with config.json."
)
@trace_options
@click.option("--optimum/--no-optimum", default=True, show_default=True, help="Compute the clairvoyant optimum.")
@plot_option("Draw hit rates over capacity and over time.")
@json_option
def replay(traces: tuple[Path, ...], as_json: bool, plot: Path | None, **options: Any) -> None:
    """Replay traces through index, tiers and policies, and say what would have been found.

    A usable hit is a block of the longest stored prefix of its request.  Formats, told by their fields: Mooncake,
    Qwen-Bailian, sessions of coding agents, and what CacheManager(record="trace.jsonl") wrote; plain or gzip.

    Policies with action=compress only evict here: how small blocks would become, no trace says.
    """
    from ..jit import warm_up
    from ..simulate.plot import draw

    study = _study(options)
    rows, drawn = [], []
    with progress_bar("replay") as progress:
        warm_up()
        for path in traces:
            with _read(path, progress, options) as workload:
                bound = study(workload)
                text = f"replaying {path.name}"
                found = bound.run(workload, lambda done, total, text=text: progress(done, total, text))
                rows += [row for row, _ in found]
                drawn.append((workload, found))
    if plot is not None:
        draw(drawn, plot)
    emit("replay", rows, as_json=as_json, title=_title(options))


def _read(path: Path, progress: Progress, options: dict[str, Any]) -> Any:
    names = ("strict", "seed", "window_h", "block_tokens")
    return read(path, progress, **{name: options[name] for name in names})


def _study(options: dict[str, Any]) -> Any:
    """Everything that can be wrong with the options, before a long trace is read; returns a study for a workload."""
    from ..errors import ConfigError
    from ..policy.placement import compresses
    from ..simulate.models import find_model
    from ..simulate.replay import Service, Settings
    from ..simulate.study import Capacity, Study, parse_list, parse_policy, parse_tiers

    policies = [(name, parse_policy(name)) for name in parse_list(options["policy"])]
    for name, policy in policies:
        if compresses(policy, "gpu") or compresses(policy, "cpu"):
            click.echo(f"{name}: a replay only evicts; how small blocks would become, no trace says", err=True)
    sizes = [parse_tiers(text) for text in options["tiers"]]
    sizes = sizes or [[("cache", Capacity.parse(text))] for text in parse_list(",".join(options["capacity"]))]
    model = find_model(options["model"]) if options["model"] else None
    cost = cost_model(model, options["prefill_rate"], options["prefill_file"], options["tflops"])
    service = None
    if options["inflight"]:
        if cost is None:
            raise ConfigError(
                "--inflight needs to know what prefill costs: give --model, --prefill-rate or --prefill-file"
            )
        service = Service(cost, options["decode_rate"])

    def bind(workload: Any) -> Study:
        spec = model.spec(workload.block_tokens, options["kv_dtype"]) if model is not None else None
        settings = Settings(hints=options["hints"], service=service, spec=spec)
        semantics, best = options["semantics"], options["optimum"]
        return Study(policies, sizes, settings, semantics=semantics, cost=cost, with_optimum=best)

    return bind


def _title(options: dict[str, Any]) -> str:
    extras = [options["semantics"]]
    if options["hints"] != "none":
        extras.append(f"hints: {options['hints']}")
    if options["inflight"]:
        extras.append("requests in flight")
    return f"Replay ({', '.join(extras)})"
