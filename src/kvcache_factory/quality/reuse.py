"""``kvcache-factory reuse``: what reuse beyond the exact prefix saves and costs, end to end on a real model and text.

Two cases: tokens put into the middle of a text that was read before, and documents, each read alone, put together in
one prompt.  The whole prompt, read without reuse, is what everything is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ..backend import CPUBackend
from ..demo.model import Progress, silent
from ..integration.transformers import Reuse, TransformersCacheAdapter
from ..integration.transformers.layout import cache_argument
from ..manager import CacheManager
from .reader import divergence, surprise
from .run import load_reader
from .texts import chapters, windows

INSERTED = "\n\nPlease note that this section was checked last week.\n\n"
ROUNDS = 2
"""Of the whole prompt and all ways in turns, so that what else the machine does touches all of them alike."""
Row = dict[str, Any]


class ReusePlan(msgspec.Struct, frozen=True):
    """How much is measured."""

    repeats: int = 3
    edit_tokens: int = 1281
    edit_at: int = 400
    inserted: int = 12
    documents: int = 4
    document_tokens: int = 320
    forward: int = 128
    margins: tuple[int, ...] = (0, 4, 16)
    shares: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.4)


QUICK = ReusePlan(repeats=1, margins=(0,), shares=(0.0, 0.2))


class _Case(msgspec.Struct, frozen=True):
    """A prompt, what was read before it, and what follows it."""

    sources: list[list[int]]
    prompt: list[int]
    onward: list[int]
    again: list[int]


def run_reuse(
    *,
    quick: bool = False,
    model: Path | None = None,
    text: str | None = None,
    plan: ReusePlan | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """A row for each case and way; means over the repeats, times the best of :data:`ROUNDS`.

    *text* is read instead of the language reference.  Raises ConfigError and MissingDependencyError.
    """
    plan = plan or (QUICK if quick else ReusePlan())
    reader, tokenizer = load_reader(model, progress)
    text = text or chapters(0)
    edits: list[dict[str, Any]] = [{"margin": margin} for margin in plan.margins]
    documents: list[dict[str, Any]] = [{"margin": 0, "recompute": share} for share in plan.shares]
    rows: list[Row] = []
    for name, cases, ways in (
        ("edit", _edits(tokenizer, text, plan), edits),
        ("documents", _documents(tokenizer, text, plan), documents),
    ):
        found: list[list[Row]] = [[] for _ in ways]
        for number, case in enumerate(cases):
            progress(len(rows) + number / len(cases), len(edits) + len(documents), name)
            for at, row in enumerate(_serve(reader.model, case, ways)):
                found[at].append(row)
        rows += [_mean(name, way, part) for way, part in zip(ways, found, strict=True)]
    progress(1, 1, "done")
    return rows


def _edits(tokenizer: Any, text: str, plan: ReusePlan) -> list[_Case]:
    """Texts with a sentence put in."""
    new = tokenizer(INSERTED, add_special_tokens=False)["input_ids"]
    new = (new * plan.inserted)[: plan.inserted]
    cases = []
    for ids in windows(tokenizer, text, plan.repeats, plan.edit_tokens + plan.forward):
        old, onward = ids[: plan.edit_tokens], ids[plan.edit_tokens :]
        prompt = [*old[: plan.edit_at], *new, *old[plan.edit_at :]]
        cases.append(_Case([old], prompt, onward, old[plan.edit_at :][: plan.forward]))
    return cases


def _documents(tokenizer: Any, text: str, plan: ReusePlan) -> list[_Case]:
    """Documents from different places, each read alone behind the same first token, and then all in one prompt."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    size, count = plan.document_tokens, plan.documents
    texts = windows(tokenizer, text, plan.repeats * count, size + plan.forward)
    cases = []
    for number in range(plan.repeats):
        group = texts[number :: plan.repeats]
        parts = [text[:size] for text in group]
        prompt = [first, *(token for part in parts for token in part)]
        again = parts[0][size // 4 :][: plan.forward]
        cases.append(_Case([[first, *part] for part in parts], prompt, group[-1][size:], again))
    return cases


def _serve(model: Any, case: _Case, ways: Sequence[dict[str, Any]]) -> list[Row]:
    """Read the sources, then the prompt in every way; what is reused is never stored, so that each starts alike."""
    rows: list[Row] = []
    best = [float("inf")] * len(ways)
    with CacheManager(backend=CPUBackend(size_gb=1)) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, model_id="measured")
        try:
            for source in case.sources:
                _generate(adapter, source)
            whole, full = _read(model, case.prompt)
            truth = [_log(model, whole, ids) for ids in (case.onward, case.again)]
            for number in range(ROUNDS):
                full = min(full, _read(model, case.prompt)[1]) if number else full
                for at, way in enumerate(ways):
                    begun = time.process_time()
                    cache, report = _generate(adapter, case.prompt, reuse=Reuse(sources=case.sources, **way))
                    best[at] = min(best[at], time.process_time() - begun)
                    if not number:
                        rows.append(_compare(model, case, cache, report, truth))
        finally:
            adapter.detach()
    return [{**row, "seconds": seconds, "full_seconds": full} for row, seconds in zip(rows, best, strict=True)]


def _generate(adapter: TransformersCacheAdapter, ids: list[int], **options: Any) -> tuple[Any, dict[str, Any]]:
    """The cache behind *ids*, and the report."""
    made = adapter.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    cache = made.output.get("cache")
    return cache if cache is not None else made.output["past_key_values"], made.report


def _read(model: Any, ids: list[int]) -> tuple[Any, float]:
    """The cache behind *ids*, read without reuse, and the CPU seconds of that."""
    begun = time.process_time()
    with torch.inference_mode():
        name = cache_argument(model)
        cache = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)[name]
    return cache, time.process_time() - begun


def _log(model: Any, cache: Any, ids: list[int]) -> Any:
    """Log probabilities after each of *ids* behind *cache*, which stays as it is."""
    length = cache.get_seq_length()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), use_cache=True, **{cache_argument(model): cache}).logits[0]
        cache.crop(-len(ids))
    assert cache.get_seq_length() == length
    return logits.float().log_softmax(-1)


def _compare(model: Any, case: _Case, cache: Any, report: dict[str, Any], truth: list[Any]) -> Row:
    onward, again = (_log(model, cache, ids) for ids in (case.onward, case.again))
    true_onward, true_again = truth
    return {
        "recomputed": report["recomputed_tokens"] / len(case.prompt),
        "kl": divergence(true_onward, onward),
        "top1": float((true_onward.argmax(-1) == onward.argmax(-1)).float().mean()),
        "nll": surprise(onward, case.onward),
        "full_nll": surprise(true_onward, case.onward),
        "recall_kl": divergence(true_again, again),
        "recall_nll": surprise(again, case.again),
        "full_recall_nll": surprise(true_again, case.again),
        "drift": report.get("drift") or float("nan"),
    }


def _mean(case: str, way: dict[str, Any], rows: list[Row]) -> Row:
    mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    perplexities = {
        "ppl": "nll",
        "full_ppl": "full_nll",
        "recall_ppl": "recall_nll",
        "full_recall_ppl": "full_recall_nll",
    }
    drift = mean["drift"]
    return {
        "case": case,
        "margin": way["margin"],
        "share": way.get("recompute", 0.0),
        "recomputed": mean["recomputed"],
        "kl": mean["kl"],
        "top1": mean["top1"],
        "recall_kl": mean["recall_kl"],
        **{name: float(np.exp(mean[key])) for name, key in perplexities.items()},
        "drift": None if np.isnan(drift) else drift,
        "seconds": mean["seconds"],
        "full_seconds": mean["full_seconds"],
        "speedup": mean["full_seconds"] / mean["seconds"],
    }
