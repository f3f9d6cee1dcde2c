"""What `replay` and `plan` have in common: reading traces, and options about models and costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .output import Progress

if TYPE_CHECKING:
    from ..simulate.cost import CostModel
    from ..simulate.models import Model
    from ..simulate.workload import Workload

_F = TypeVar("_F", bound=Callable[..., Any])

file_path = click.Path(exists=True, dir_okay=False, path_type=Path)
SYNTHETIC = "synthetic:"


class TracePath(click.Path):
    """A file that exists, or the name of a synthetic workload."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.startswith(SYNTHETIC):
            return Path(value)
        return super().convert(value, param, ctx)


trace_path = TracePath(exists=True, dir_okay=False, path_type=Path)

_OPTIONS = (
    click.option("--kv-dtype", default="bfloat16", show_default=True, help="Type of the model's KV."),
    click.option("--prefill-rate", type=float, metavar="TOKENS/S", help="Cost of prefill: a constant rate."),
    click.option("--prefill-file", type=file_path, metavar="FILE", help="... or measured: output of `demo --json`."),
    click.option("--tflops", type=float, help="... or of the model at so many TFLOP/s; 300 when nothing is given."),
    click.option("--block-tokens", type=click.IntRange(min=1), help="Tokens of a block, where not the format's own."),
    click.option(
        "--seed", type=int, default=1, show_default=True, help="For what traces leave open, and for synthetic ones."
    ),
    click.option(
        "--window-h",
        type=click.FloatRange(min=0, min_open=True),
        default=24.0,
        show_default=True,
        help="Hours over which sessions of such traces start.",
    ),
    click.option("--strict", is_flag=True, help="Stop at the first broken line instead of skipping it."),
)


def trace_options(function: _F) -> _F:
    """Add the common options."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def read(
    path: Path, progress: Progress, *, strict: bool, seed: int, window_h: float, block_tokens: int | None
) -> Workload:
    """Read one trace, or make a synthetic one, saying on stderr what was skipped."""
    from ..simulate.formats import Options
    from ..simulate.synthetic import make_workload
    from ..simulate.workload import read_trace

    if str(path).startswith(SYNTHETIC):
        text = f"making {path}"
        return make_workload(str(path), seed=seed, progress=lambda done, total: progress(done, total, text))
    text = f"reading {path.name}"
    workload = read_trace(
        path,
        options=Options(seed=seed, window_s=3600 * window_h),
        strict=strict,
        block_tokens=block_tokens,
        progress=lambda done, total: progress(done, total, text),
    )
    if workload.faults.count:
        click.echo(f"{path}: {workload.faults.count:,} broken lines skipped", err=True)
        for line in workload.faults.shown:
            click.echo(f"  {line}", err=True)
    return workload


def cost_model(
    model: Model | None, rate: float | None, measured: Path | None, tflops: float | None
) -> CostModel | None:
    """The cost of prefill that was asked for; None when nothing says anything about it."""
    from ..errors import ConfigError
    from ..simulate.cost import ASSUMED_TFLOPS, CostModel

    if sum(given is not None for given in (rate, measured, tflops)) > 1:
        raise ConfigError("give one of --prefill-rate, --prefill-file and --tflops")
    if rate is not None:
        return CostModel.from_rate(rate)
    if measured is not None:
        return CostModel.from_file(measured)
    if model is None:
        if tflops is not None:
            raise ConfigError("--tflops needs a --model, whose operations it divides")
        return None
    return CostModel.of_model(model, ASSUMED_TFLOPS if tflops is None else tflops)
