"""``kvcache-factory dashboard``: what Grafana and Prometheus are given."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from ..errors import ConfigError
from .output import emit, json_option

FILES = {
    "dashboard.json": "Grafana dashboard: import it, and choose the Prometheus data source",
    "alerts.yml": "Prometheus alert rules: name the file under rule_files",
}


@click.group(epilog="Example: kvcache-factory dashboard export monitoring")
def dashboard() -> None:
    """The Grafana dashboard and the alert rules."""


@dashboard.command(epilog="Example: kvcache-factory dashboard export monitoring")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@json_option
def export(directory: Path, force: bool, as_json: bool) -> None:
    """Write the dashboard and the alert rules to DIRECTORY."""
    there = [name for name in FILES if (directory / name).exists()]
    if there and not force:
        raise ConfigError(f"{directory / there[0]} is there already; choose another directory, or say --force")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            content = resources.files("kvcache_factory.observe").joinpath("grafana", name).read_bytes()
            (directory / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error}; choose another directory") from error
    rows = [{"file": str(directory / name), "use": use} for name, use in FILES.items()]
    emit("dashboard export", rows, as_json=as_json, title=f"dashboard export {directory}")
