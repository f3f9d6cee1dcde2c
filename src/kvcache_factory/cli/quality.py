"""``kvcache-factory quality``: what a way of compressing costs, on a real model and a real text."""

from __future__ import annotations

from pathlib import Path

import click

from .output import emit, json_option, progress_bar
from .plot import plot_option
from .text import read_text, text_option


@click.command(epilog="Example: kvcache-factory quality --method int8 --plot quality.png")
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="NAME[:PARAMETER=VALUE,...]",
    help="A codec (int8, pca:step=0.5), a way of pruning (snapkv:keep=0.25), drop_blocks or demote_blocks; may be "
    "given again. By default all.",
)
@click.option(
    "--ratio",
    type=click.FloatRange(min=1, min_open=True),
    metavar="R",
    help="Turn methods that have a knob until blocks take one R-th of their bytes.",
)
@click.option("--quick", is_flag=True, help="Within a minute: one short window, no calibrated methods.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory of a model; by default the demo's.",
)
@click.option(
    "--table",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Calibration for pca and low_rank; by default one is made and kept.",
)
@text_option("Python's language reference")
@plot_option("Draw quality against bytes.")
@json_option
def quality(
    methods: tuple[str, ...],
    ratio: float | None,
    quick: bool,
    model: Path | None,
    table: Path | None,
    text: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure codecs and pruning: bytes, speed and error, and how the model reads on, recalls and answers behind them.

    Prefixes of Python's language reference go through a codec in blocks of 64 tokens, the first one exact, and the
    model's next words are compared with those behind the full bfloat16 cache.  Speeds are bytes of original KV a
    second of CPU time.  Needs the packages of kvcache-factory[transformers,compression].
    """
    from ..quality.methods import parse_method

    for method in methods:  # before anything takes long
        parse_method(method)
    content = read_text(text)
    from ..quality.run import run_quality

    with progress_bar("quality") as progress:
        rows = run_quality(methods, ratio=ratio, quick=quick, model=model, table=table, text=content, progress=progress)
    for row in rows:
        if ratio is not None and not 0.9 <= row["ratio"] / ratio <= 1.1:
            why = "it has no knob, or none that goes so far"
            click.echo(f"{row['method']}: the ratio is {row['ratio']:.2f}, not {ratio:g}: {why}", err=True)
    if plot is not None:
        from ..quality.plot import draw

        draw(rows, plot)
    hidden = () if as_json else ("recall_kl", "bytes_per_token", "path", "blocks", "recompute_gbps")
    shown = [{key: value for key, value in row.items() if key not in hidden} for row in rows]
    emit(
        "quality",
        shown,
        as_json=as_json,
        title="What compression costs; codecs leave the first block exact",
    )
