"""``kvcache-factory doctor``: what this machine offers, what is missing, and what is broken."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from .. import __version__
from . import machine
from .doctor_disk import check_disk
from .output import DEBUG_VARIABLE, debugging, emit, json_option, progress_bar

GIB = 1 << 30
STREAMING = ("x86_64", "amd64")
REQUIRED = ("click", "msgspec", "numpy", "prometheus-client", "rich", "torch", "xxhash")
OPTIONAL = {
    "numba": ("fast", "compiled copies and lookups"),
    "transformers": ("transformers", "the Transformers adapter"),
    "safetensors": ("transformers", "the Transformers adapter"),
    "accelerate": ("transformers", "the Transformers adapter"),
    "gguf": ("transformers", "the model of the demo"),
    "matplotlib": ("plot", "every --plot"),
    "starlette": ("server", "the page, health checks and actions of metrics_port"),
    "uvicorn": ("server", "the page, health checks and actions of metrics_port"),
    "zstandard": ("compression", "the codecs bf16x and zstd"),
    "cryptography": ("encryption", "encrypting what the disk tier writes"),
    "rocksdict": ("rocksdb", "the connector ROCKSDB"),
    "httpx": ("etcd", "clusters with membership in etcd"),
    "pyyaml": ("yaml", "configuration files in YAML"),
}


class State(StrEnum):
    """How a check ended; only BROKEN changes the exit code."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


Finding = dict[str, Any]


def finding(check: str, value: object, state: State = State.OK, advice: str = "") -> Finding:
    """One row of the report."""
    return {"check": check, "value": "-" if value is None else str(value), "state": state.value, "advice": advice}


def check_versions() -> Iterable[Finding]:
    """The library, Python, and the packages it needs or can use."""
    yield finding("kvcache-factory", __version__)
    yield finding("python", platform.python_version())
    for name in REQUIRED:
        version = machine.version_of(name)
        advice = "" if version else f"pip install {name}"
        yield finding(name, version or "missing", State.OK if version else State.BROKEN, advice)
    for name, (extra, purpose) in OPTIONAL.items():
        version = machine.version_of(name)
        advice = "" if version else f"for {purpose}: pip install 'kvcache-factory[{extra}]'"
        yield finding(name, version or "missing", State.OK if version else State.NOTE, advice)


def check_machine() -> Iterable[Finding]:
    """Cores, memory, limits, huge pages, NUMA."""
    yield finding("cpu", machine.cpu_model())
    limit = machine.cpu_limit()
    yield finding("cores", machine.cores() if limit is None else f"{machine.cores()} (limited to {limit:.3g})")
    total, cap = machine.memory_bytes(), machine.memory_limit_bytes()
    yield finding("memory", None if total is None else f"{total / GIB:.1f} GiB")
    tight = cap is not None and total is not None and cap < total
    yield finding(
        "memory limit (cgroup)",
        f"{cap / GIB:.1f} GiB" if cap is not None else "none",
        State.NOTE if tight else State.OK,
        "keep size_gb of all managers and the model below this limit" if tight else "",
    )
    mode = machine.huge_pages()
    slow = mode not in ("always", "madvise")
    advice = "slabs use small pages: copies lose 10 to 40 %" if slow else ""
    yield finding("huge pages", mode or "not offered", State.NOTE if slow else State.OK, advice)
    nodes = machine.numa_nodes()
    advice = "pin the process to one node: a slab is not spread by node" if nodes > 1 else ""
    yield finding("NUMA nodes", nodes, State.NOTE if nodes > 1 else State.OK, advice)


def check_platform() -> Iterable[Finding]:
    """What this system and processor do without."""
    system, processor = platform.system(), platform.machine().lower()
    portable = []
    if system != "Linux":
        portable.append("no huge-page advice and no population by the kernel: slabs are pre-faulted by touching them")
    if system == "Windows":
        portable.append("memory comes from the paging file: leave room for it")
    if processor not in STREAMING:
        portable.append("non-temporal stores are used on x86-64 only: copies take the numpy path")
    yield finding("platform", f"{system} {processor}", State.NOTE if portable else State.OK, "; ".join(portable))


def check_copies() -> Iterable[Finding]:
    """Whether numba is in use, which copy path was chosen, and its speed beside memcpy."""
    from .. import jit
    from ..memory import transfer

    chosen = transfer.choose()
    expected = machine.version_of("numba") is not None and not jit.numba_refused()
    failed = State.BROKEN if expected else State.NOTE
    yield finding("numba kernels", jit.status(), State.OK if jit.is_warm() else failed)
    streaming = platform.machine().lower() in STREAMING
    state = State.OK if chosen == "numba" else failed if streaming else State.NOTE
    yield finding("copy path", f"{chosen} ({transfer.why()})", state)
    rates = transfer.measure()
    for name, rate in rates.items():
        ratio = "" if name == "memcpy" else f" ({rate / rates['memcpy']:.2f} of memcpy)"
        yield finding(f"copy speed: {name}", f"{rate:.1f} GB/s{ratio}")


def check_devices() -> Iterable[Finding]:
    """Devices that torch offers for a tier or a model."""
    import torch

    yield finding("device", "cpu")
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory
        yield finding("device", f"cuda:{index} {torch.cuda.get_device_name(index)} {memory / GIB:.0f} GiB")
    if torch.backends.mps.is_available():
        yield finding("device", "mps")


def check_model(directory: Path) -> Iterable[Finding]:
    """The identity of a model directory: what two processes must agree on to share blocks."""
    import json

    from ..block.identity import Identity, fingerprint_directory
    from ..block.spec import DEFAULT_BLOCK_TOKENS, RopeParameters

    yield finding("model", directory)
    with progress_bar("reading the weights") as progress:
        model = fingerprint_directory(directory, progress)
    yield finding("model fingerprint", model)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in ("model_type", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        if config.get(name) is not None:
            yield finding(f"model {name}", config[name])
    rope = RopeParameters.from_config(config)
    yield finding("model rope", " ".join([f"theta={rope.theta:g}", *(f"{k}={v}" for k, v in rope.parameters)]))
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    identity = Identity(model=model, kv_dtype=dtype, block_tokens=DEFAULT_BLOCK_TOKENS)
    kind = f"{identity.kv_dtype}, {DEFAULT_BLOCK_TOKENS} tokens a block, no adapter, no salt"
    yield finding("model identity", f"{identity.digest.hex()} ({kind})")


def examine(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Run one check; whatever it raises is a finding too, for a doctor that dies helps nobody."""
    rows: list[Finding] = []
    try:
        rows.extend(check())
    except Exception as error:
        if debugging():
            raise
        advice = f"{DEBUG_VARIABLE}=1 shows where"
        rows.append(finding(name, f"{type(error).__name__}: {error}", State.BROKEN, advice))
    return rows


@click.command(epilog="Example: kvcache-factory doctor --model ./SmolLM2-135M-Instruct")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also print the identity of this model directory (config.json and *.safetensors).",
)
@click.option(
    "--disk",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Also say whether this directory, which need not exist yet, is a good place for a disk tier.",
)
@json_option
@click.pass_context
def doctor(context: click.Context, model: Path | None, disk: Path | None, as_json: bool) -> None:
    """Say what this machine offers, what is missing and what is broken.

    The exit code is 1 when something is broken; a note is not.
    """
    rows = examine("versions", check_versions)
    rows += examine("machine", check_machine)
    rows += examine("platform", check_platform)
    rows += examine("copies", check_copies)
    rows += examine("devices", check_devices)
    if model is not None:
        rows += examine("model", lambda: check_model(model))
    if disk is not None:
        rows += examine("disk", lambda: check_disk(disk))
    emit("doctor", rows, as_json=as_json)
    broken = [row["check"] for row in rows if row["state"] == State.BROKEN]
    if broken:
        click.echo(f"kvcache-factory: broken: {', '.join(broken)}", err=True)
        context.exit(1)
