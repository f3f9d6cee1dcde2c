"""``kvcache-factory calibrate``: make the table that the codecs pca and low_rank need."""

from __future__ import annotations

from pathlib import Path

import click

from .output import emit, json_option, progress_bar
from .text import read_text, text_option


@click.command(epilog="Example: kvcache-factory calibrate --model ./my-model --text corpus.txt")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory of a model; by default the demo's.",
)
@text_option("half of Python's language reference")
@click.option("--windows", type=click.IntRange(min=1), default=6, show_default=True, help="Windows that are read.")
@click.option("--tokens", type=click.IntRange(min=64), default=2048, show_default=True, help="Tokens of each.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory of the table; by default that where `quality` looks.",
)
@click.option("--model-id", metavar="NAME", help="The name by which engines register the model, if they do.")
@json_option
def calibrate(
    model: Path | None,
    text: Path | None,
    windows: int,
    tokens: int,
    out: Path | None,
    model_id: str | None,
    as_json: bool,
) -> None:
    """Measure what a model's keys and values have in common, and write it to a file that is named by its content.

    More tokens than the widest group of layers has channels (some 1,200) are needed; 12,000 are good.
    """
    from ..codec.calibration import load, tables_directory
    from ..quality.calibrate import make_table
    from ..quality.run import load_reader

    content = read_text(text)
    with progress_bar("calibrate") as progress:
        reader, tokenizer = load_reader(model, progress)
        out = out or tables_directory()
        size = {"num_windows": windows, "tokens": tokens}
        file = make_table(reader, tokenizer, out, text=content, model_id=model_id, progress=progress, **size)
    found = load(file)
    layers, heads, dim = found.geometry
    widest = max(len(part.mean) for part in found.keys)
    if windows * tokens <= widest:
        click.echo(
            f"{windows * tokens:,} tokens say too little about {widest:,} channels, which a group of layers has; "
            "give more --windows or --tokens for a table of use",
            err=True,
        )
    row = {
        "table": str(file),
        "bytes": file.stat().st_size,
        "model": found.model,
        "fingerprint": found.fingerprint,
        "layers": layers,
        "heads": heads,
        "head_dim": dim,
        "tokens": windows * tokens,
        "groups": len(found.keys),
    }
    emit("calibrate", [row], as_json=as_json, title="Calibration")
