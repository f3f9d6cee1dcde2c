"""``kvcache-factory verify``: read every block of a directory and check it."""

from __future__ import annotations

from pathlib import Path

import click

from .elsewhere import connector_options
from .output import emit, json_option, progress_bar


@click.command(epilog="Example: kvcache-factory verify /var/cache/kv --quarantine")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--quarantine", is_flag=True, help="Take bad blocks out of the logs of segments that no living process owns."
)
@connector_options
@json_option
@click.pass_context
def verify(
    context: click.Context,
    path: Path,
    quarantine: bool,
    connector: str | None,
    store_namespace: str,
    as_json: bool,
) -> None:
    """Read every block in the directory PATH and compare it with its checksums and with the log that names it.

    Processes may use the directory meanwhile.  The exit code is 1 when anything is bad, also after --quarantine.
    With --connector, the copies in its store are read and checked instead.
    """
    from ..maintenance.elsewhere import elsewhere, every_block, remote_rows
    from ..maintenance.survey import survey
    from ..maintenance.verification import is_good, verify_rows

    seen = survey(path)
    if connector is not None:
        with progress_bar("verify") as progress, elsewhere(connector, store_namespace) as store:
            rows = remote_rows(store, every_block(seen), "verify", progress)
        emit("verify", rows, as_json=as_json, title=f"verify {connector}")
        if any(row["bad"] for row in rows):
            context.exit(1)
        return
    with progress_bar("verify") as progress:
        rows = verify_rows(seen, quarantine=quarantine, progress=progress)
    emit("verify", rows, as_json=as_json, title=f"verify {path}")
    bad = [row for row in rows if not is_good(row)]
    blocks, freed = (sum(row[name] for row in rows) for name in ("bad", "quarantined"))
    if bad:
        click.echo(
            f"kvcache-factory: {len(bad)} of {len(rows)} segments are not whole: {blocks} bad blocks, "
            f"{freed} of them quarantined",
            err=True,
        )
        context.exit(1)
