"""``kvcache-factory reuse``: what reuse beyond the exact prefix saves, and how far it is off."""

from __future__ import annotations

from pathlib import Path

import click

from .output import emit, json_option, progress_bar
from .text import read_text, text_option


@click.command(epilog="Example: kvcache-factory reuse --quick --json")
@click.option("--quick", is_flag=True, help="One text and one group of documents, and fewer ways.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory of a model; by default the demo's.",
)
@text_option("Python's language reference")
@json_option
def reuse(quick: bool, model: Path | None, text: Path | None, as_json: bool) -> None:
    """Measure reuse after an edit and of documents in another order.

    Twelve tokens are put into a text of 1,281 that was read before, and four documents of 320 tokens, each read alone,
    are put together in one prompt.  The model's next words are compared with those behind the whole prompt, read
    without reuse.  Times are CPU time.  Needs the packages of kvcache-factory[transformers].
    """
    from ..quality.reuse import run_reuse

    content = read_text(text)
    with progress_bar("reuse") as progress:
        rows = run_reuse(quick=quick, model=model, text=content, progress=progress)
    hidden = () if as_json else ("full_recall_ppl", "full_seconds", "full_ppl")
    shown = [{key: value for key, value in row.items() if key not in hidden} for row in rows]
    emit("reuse", shown, as_json=as_json, title="Reuse beyond the exact prefix, against reading the whole prompt")
