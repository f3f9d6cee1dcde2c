"""``kvcache-factory quality``: every method over the same prefixes, and how the model then reads on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..block.spec import DEFAULT_BLOCK_TOKENS
from ..codec.base import RAW, BlockCodec
from ..codec.low_rank import LowRank
from ..codec.pca import Pca
from ..codec.spectral import SpectralCodec
from ..demo.model import Progress, load_model, silent
from ..errors import ConfigError
from ..integration.transformers.pruning import PruningMethod
from ..jit import is_warm, want_late, warm_up
from .blocks import EXACT_BLOCKS, Coded, speed, through
from .calibrate import find_or_make
from .methods import parse_method, placed, turned
from .placed import DEMOTE, DROP, Demotion, Placing, drop
from .pruned import prune
from .reader import KV, Reader, divergence, surprise
from .texts import ANSWER, QUESTION, chapters, windows, with_needle

METHODS = ("raw", "bf16x", "int8", "fp8", "int4g", "rot4", "pca:step=0.25", "pca:step=0.5", "low_rank:rank=0.25")
PRUNING_METHODS = ("streaming", "h2o", "snapkv", "pyramidkv", "l2norm", "keydiff")
PLACING_METHODS = (DROP, DEMOTE)
QUICK_METHODS = ("raw", "bf16x", "int8", "fp8", "int4g", "rot4")
_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)

Row = dict[str, Any]


class Plan(msgspec.Struct, frozen=True):
    """How much is measured."""

    windows: int = 4
    tokens: int = 2048
    forward: int = 128
    greedy: int = 32
    depths: tuple[float, ...] = _DEPTHS


QUICK = Plan(windows=1, tokens=1024, forward=128, greedy=0, depths=())


class Window(msgspec.Struct, frozen=True):
    """A prefix and what the model makes of it with its full cache."""

    ids: list[int]
    kv: KV
    onward: list[int]
    again: list[int]
    onward_log: Any
    again_log: Any
    greedy: list[int]


class Needle(msgspec.Struct, frozen=True):
    """A prefix with a needle, the question, and the tokens of the answer."""

    ids: list[int]
    kv: KV
    question: list[int]
    answer: list[int]


def run_quality(
    methods: Sequence[str] = (),
    *,
    ratio: float | None = None,
    quick: bool = False,
    model: Path | None = None,
    table: Path | None = None,
    text: str | None = None,
    plan: Plan | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """A row for each method (``name`` or ``name:parameter=value,…``); all of them, or those that are quick, by default.

    *ratio* has methods with a knob turned to it.  *table* is the calibration of methods that need one; by default that
    of the demo's model, which is made when it is not there.  *text* is read instead of the language reference.  Raises
    ConfigError and MissingDependencyError.
    """
    plan = plan or (QUICK if quick else Plan())
    names = methods or (QUICK_METHODS if quick else METHODS + PRUNING_METHODS + PLACING_METHODS)
    parsed = {name: parse_method(name) for name in names}
    reader, tokenizer = load_reader(model, progress)
    for method in parsed.values():
        if isinstance(method, BlockCodec):
            _open(method, reader, table)
    want_late()
    warm_up()
    kvs, needles = _read(reader, tokenizer, text or chapters(0), plan, progress)
    rows = []
    for done, (name, method) in enumerate(parsed.items()):
        progress(done, len(parsed), name)
        if isinstance(method, BlockCodec):
            ready = _ready(method, reader, tokenizer, ratio, kvs[0].kv, progress)
            rows.append(_measure_codec(name.partition(":")[0], ready, reader, kvs, needles, plan))
        elif isinstance(method, Placing):
            rows.append(_measure_placing(placed(method, ratio), reader, kvs, needles, plan))
        else:
            rows.append(_measure_pruning(turned(method, ratio), reader, kvs, needles, plan))
    progress(1, 1, "done")
    return rows


def _open(codec: BlockCodec, reader: Reader, table: Path | None) -> None:
    """What a model's blocks cannot have is said before the text is read; a calibration may have to be made later."""
    if isinstance(codec, SpectralCodec):
        codec.table = codec.table or (str(table) if table is not None else None)
    if not isinstance(codec, SpectralCodec) or codec.table is not None:
        codec.open(reader.spec)


def load_reader(model: Path | None, progress: Progress) -> tuple[Reader, Any]:
    """The model of a directory, or the demo's, and its tokenizer."""
    if model is None:
        loaded, tokenizer = load_model("float32", progress)
    else:
        loaded, tokenizer = load_directory(model)
    return Reader(loaded, DEFAULT_BLOCK_TOKENS), tokenizer


def load_directory(path: Path) -> tuple[Any, Any]:
    """A model of the user's own, in float32, and its tokenizer; nothing is read from the network."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        return loaded.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path}: no model can be loaded from there: {error}") from error


def _read(
    reader: Reader, tokenizer: Any, text: str, plan: Plan, progress: Progress
) -> tuple[list[Window], list[Needle]]:
    """Prefill everything once."""
    jobs = plan.windows + len(plan.depths)
    found, needles = [], []
    for number, ids in enumerate(windows(tokenizer, text, plan.windows, plan.tokens + plan.forward)):
        progress(number, jobs, "reading the text")
        prefix, onward = ids[: plan.tokens], ids[plan.tokens :]
        again = prefix[plan.tokens * 3 // 10 :][: plan.forward]
        kv = reader.read(prefix)
        log, again_log = (reader.log_probabilities(kv, part) for part in (onward, again))
        greedy = reader.greedy(kv, onward[0], plan.greedy) if plan.greedy else []
        found.append(Window(prefix, kv, onward, again, log, again_log, greedy))
    question = tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    answer = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    hay = windows(tokenizer, text, len(plan.depths), plan.tokens // 2) if plan.depths else []
    for number, (depth, ids) in enumerate(zip(plan.depths, hay, strict=True)):
        progress(plan.windows + number, jobs, "hiding needles")
        hidden = with_needle(tokenizer, ids, depth)
        needles.append(Needle(hidden, reader.read(hidden), question, answer))
    return found, needles


def _ready(
    codec: BlockCodec,
    reader: Reader,
    tokenizer: Any,
    ratio: float | None,
    kv: KV,
    progress: Progress,
) -> BlockCodec:
    """The codec, open, with its calibration, and turned to *ratio* where it has a knob."""
    if isinstance(codec, SpectralCodec) and codec.table is None:
        codec.table = str(find_or_make(reader, tokenizer, progress))
        codec.open(reader.spec)
    if ratio is None:
        return codec
    if isinstance(codec, LowRank):
        turned: BlockCodec = LowRank(rank=1 / max(ratio, 1.01), table=codec.table, max_rel_error=codec.max_rel_error)
    elif isinstance(codec, Pca):
        turned = _search(codec, ratio, reader, kv)
    else:
        return codec
    turned.open(reader.spec)
    return turned


def _search(codec: Pca, ratio: float, reader: Reader, kv: KV) -> Pca:
    """The step with which a few blocks take the *ratio*-th part of their bytes."""
    few = kv[:, :, :, : (EXACT_BLOCKS + 4) * reader.spec.block_tokens]
    low, high = 0.02, 3.0
    for _ in range(10):
        step = (low * high) ** 0.5
        tried = Pca(step=step, table=codec.table, max_rel_error=1.0)
        tried.open(reader.spec)
        coded = through(tried, few, reader.spec)
        low, high = (step, high) if coded.bytes_before / coded.bytes_after < ratio else (low, step)
    return Pca(step=round((low * high) ** 0.5, 4), table=codec.table, max_rel_error=codec.max_rel_error)


def _measure_codec(
    name: str, codec: BlockCodec, reader: Reader, kvs: list[Window], needles: list[Needle], plan: Plan
) -> Row:
    def apply(prefix: Window | Needle) -> Coded:
        return through(codec, prefix.kv, reader.spec)

    encode, decode = speed(codec, kvs[0].kv, reader.spec) if name != RAW else (None, None)
    options = {key: value for key, value in codec.options().items() if key != "table"}
    parameters = ",".join(f"{key}={value}" for key, value in options.items())
    row = _measure(name, parameters, apply, reader, kvs, needles, plan)
    return {**row, "encode_gbps": encode, "decode_gbps": decode}


def _measure_pruning(
    method: PruningMethod, reader: Reader, kvs: list[Window], needles: list[Needle], plan: Plan
) -> Row:
    """No error of an element: what is kept is exact, and what is gone has none."""

    def apply(prefix: Window | Needle) -> Coded:
        return prune(reader.model, prefix.kv, prefix.ids, method)

    others = [part for part in str(method).partition(":")[2].split(",") if part and not part.startswith("keep=")]
    parameters = [f"keep={method.keep:.4g}", *others]
    return _measure(method.name, ",".join(parameters), apply, reader, kvs, needles, plan)


def _measure_placing(method: Placing, reader: Reader, kvs: list[Window], needles: list[Needle], plan: Plan) -> Row:
    """Where blocks are demoted, the ratio is that of the bytes in memory, and decoding is loading all of them."""
    parameters, speed = f"keep={method.keep:.4g}", None
    if method.name == DROP:
        found = _measure(method.name, parameters, lambda p: drop(reader, p, method.keep), reader, kvs, needles, plan)
    else:
        with Demotion(reader, [*kvs, *needles], method.keep) as demotion:
            found = _measure(method.name, parameters, demotion.load, reader, kvs, needles, plan)
            speed = demotion.gbps
    return {**found, "decode_gbps": speed}


def _measure(
    name: str,
    parameters: str,
    apply: Callable[[Window | Needle], Coded],
    reader: Reader,
    kvs: list[Window],
    needles: list[Needle],
    plan: Plan,
) -> Row:
    coded = [apply(window) for window in kvs]
    rows = [_compare(reader, window, one) for window, one in zip(kvs, coded, strict=True)]
    found = [_finds(reader, needle, apply(needle)) for needle in needles]
    ratio = sum(c.bytes_before for c in coded) / sum(c.bytes_after for c in coded)
    mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    return {
        "method": name,
        "parameters": parameters,
        "ratio": ratio,
        "bytes_per_token": reader.spec.bytes_per_token / ratio,
        "kl": mean["kl"],
        "top1": mean["top1"],
        "ppl": float(np.exp(mean["nll"])),
        "recall_ppl": float(np.exp(mean["recall_nll"])),
        "recall_kl": mean["recall_kl"],
        "needle": float(np.mean(found)) if found else None,
        "greedy_tokens": mean["greedy"] if plan.greedy else None,
        "encode_gbps": None,
        "decode_gbps": None,
        "recompute_gbps": reader.read_gbps,
        "max_rel_error": max(c.max_rel_error for c in coded),
        "rms_rel_error": max(c.rms_rel_error for c in coded),
        "raw_blocks": sum(c.kept_raw for c in coded),
        "blocks": sum(c.blocks for c in coded),
        "path": "numba" if is_warm() else "numpy",
    }


def _compare(reader: Reader, window: Window, coded: Coded) -> dict[str, float]:
    onward = reader.log_probabilities(coded.kv, window.onward)
    again = reader.log_probabilities(coded.kv, window.again)
    greedy = reader.greedy(coded.kv, window.onward[0], len(window.greedy)) if window.greedy else []
    same = [a == b for a, b in zip(greedy, window.greedy, strict=True)]
    return {
        "kl": divergence(window.onward_log, onward),
        "top1": float((window.onward_log.argmax(-1) == onward.argmax(-1)).float().mean()),
        "nll": surprise(onward, window.onward),
        "recall_nll": surprise(again, window.again),
        "recall_kl": divergence(window.again_log, again),
        "greedy": float(same.index(False) if False in same else len(same)),
    }


def _finds(reader: Reader, needle: Needle, coded: Coded) -> bool:
    """Whether the model gives the whole answer, greedily."""
    log = reader.log_probabilities(coded.kv, [*needle.question, *needle.answer])
    said = log[len(needle.question) - 1 : -1].argmax(-1).tolist()
    return bool(said == needle.answer)
