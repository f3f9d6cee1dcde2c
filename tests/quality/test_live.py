"""Pruning as rows of ``quality``, and ``reuse``, with a model of two layers over bytes in the place of the demo's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from tests.demo.small import small_model

from kvcache_factory.cli import main
from kvcache_factory.codec.values import from_bf16
from kvcache_factory.errors import ConfigError
from kvcache_factory.integration.transformers import SnapKV
from kvcache_factory.quality import reuse, run
from kvcache_factory.quality.methods import parse_method
from kvcache_factory.quality.placed import Demotion, ranks
from kvcache_factory.quality.pruned import prune
from kvcache_factory.quality.reader import KV, PrunedKV, Reader
from kvcache_factory.quality.reuse import ReusePlan, run_reuse
from kvcache_factory.quality.run import METHODS, PLACING_METHODS, PRUNING_METHODS, Plan, run_quality

LONG = Plan(windows=2, tokens=512, forward=16, greedy=4, depths=(0.5,))


class Named(NamedTuple):
    """A prefix."""

    ids: list[int]
    kv: KV


PLAN = Plan(windows=1, tokens=256, forward=16, greedy=4, depths=(0.5,))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "load_model", small_model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_way_of_pruning_is_a_row() -> None:
    """The ratio is what was asked for; what is dropped costs more than nothing."""
    methods = [f"{name}:window=8" if name in ("snapkv", "pyramidkv") else name for name in PRUNING_METHODS]
    rows = run_quality([*methods, "raw"], plan=PLAN, ratio=2.0)
    assert [row["method"] for row in rows] == [*PRUNING_METHODS, "raw"]
    for row in rows[:-1]:
        assert row["ratio"] == pytest.approx(2.0, rel=0.05), row
        assert row["parameters"] == "keep=0.5" + (",window=8" if row["method"] in ("snapkv", "pyramidkv") else "")
        assert row["kl"] > rows[-1]["kl"]
        assert row["encode_gbps"] is row["decode_gbps"] is None
        assert row["recall_kl"] > rows[-1]["recall_kl"]
    assert not set(METHODS) & set(PRUNING_METHODS)


def test_keeping_everything_costs_nothing() -> None:
    for row in run_quality([f"{name}:keep=1.0" for name in PRUNING_METHODS], plan=PLAN):
        assert row["ratio"] == 1
        assert row["kl"] == pytest.approx(0, abs=1e-6)


def test_blocks_that_are_demoted_come_back_and_dropped_ones_do_not() -> None:
    """Half of memory either way: what went to the disk costs nothing of quality, what was dropped does."""
    raw, dropped, demoted = run_quality(["raw", *PLACING_METHODS], plan=LONG, ratio=2.0)
    assert (dropped["parameters"], demoted["parameters"]) == ("keep=0.5", "keep=0.5")
    assert dropped["ratio"] == pytest.approx(2.0, rel=0.01)
    assert demoted["ratio"] > 1.3  # of the windows; the needles' blocks are in the same memory
    for key in ("kl", "recall_kl", "recall_ppl", "top1", "needle", "greedy_tokens"):
        assert demoted[key] == raw[key]
    assert dropped["recall_kl"] > raw["recall_kl"]
    assert dropped["decode_gbps"] is None
    assert demoted["decode_gbps"] > 0


def test_the_least_looked_at_leaves_memory_first() -> None:
    """Across prefixes: memory keeps more of the one whose end its last queries looked at."""
    model, tokenizer = small_model()
    reader = Reader(model, 64)
    texts = ("To be, or not to be, that is the question. " * 8, "9" * 400)
    prefixes = [Named(ids := tokenizer(text)["input_ids"][:320], reader.read(ids)) for text in texts]
    last = [float(ranks(reader, prefix)[-1]) for prefix in prefixes]
    assert last[0] != last[1]
    with Demotion(reader, prefixes, 0.9) as demotion:
        sizes = [demotion.load(prefix).bytes_after for prefix in prefixes]
    assert sizes.index(min(sizes)) == last.index(min(last))


@pytest.mark.parametrize("text", ["drop_blocks:keep=0", "demote_blocks:keep=many", "drop_blocks:window=3"])
def test_what_placing_takes(text: str) -> None:
    with pytest.raises(ConfigError, match="keep="):
        parse_method(text)


def test_what_is_kept_is_what_was_read() -> None:
    """Bit by bit, though the last queries are computed once more; and a cache of it is anybody's to go on from."""
    model, tokenizer = small_model()
    ids = tokenizer("To be, or not to be, that is the question. " * 6)["input_ids"]
    kv = Reader(model, 64).read(ids)
    coded = prune(model, kv, ids, SnapKV(keep=0.5, window=16))
    assert isinstance(coded.kv, PrunedKV)
    one, other = coded.kv.fresh(), coded.kv.fresh()
    for number, layer in enumerate(one.layers):
        read = from_bf16(kv[number, 0])
        for head, kept in enumerate(layer.keys[0].numpy()):
            assert all((read[head] == key).all(-1).any() for key in kept)
            assert (kept[-16:] == read[head][-16:]).all()
    one.layers[0].keys.zero_()
    assert other.layers[0].keys.abs().sum() > 0
    assert coded.bytes_before / coded.bytes_after == pytest.approx(2, rel=0.02)


SMALL_REUSE = ReusePlan(
    repeats=2,
    edit_tokens=200,
    edit_at=70,
    documents=3,
    document_tokens=64,
    forward=16,
    margins=(0, 8),
    shares=(0.0, 1.0),
)


def test_reuse_says_what_it_saves_and_costs() -> None:
    """Shares and drift of both cases; where all is computed again, nothing is off."""
    rows = run_reuse(plan=SMALL_REUSE)
    assert [(row["case"], row["margin"], row["share"]) for row in rows] == [
        ("edit", 0, 0.0),
        ("edit", 8, 0.0),
        ("documents", 0, 0.0),
        ("documents", 0, 1.0),
    ]
    edit, margin, none, everything = rows
    assert edit["recomputed"] == pytest.approx((12 + 200 - 192 - 1) / 212, abs=0.01)  # the edit, and what no block held
    assert margin["recomputed"] > edit["recomputed"]
    assert edit["drift"] is None
    assert margin["drift"] > 0
    assert none["kl"] > everything["kl"] == pytest.approx(0, abs=1e-4)
    assert everything["recall_kl"] == pytest.approx(0, abs=1e-4)


def test_the_command_of_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "QUICK", SMALL_REUSE)
    done = CliRunner().invoke(main, ["reuse", "--quick", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["command"] == "reuse"
    keys = {"case", "margin", "share", "recomputed", "kl", "top1", "recall_kl", "ppl", "drift", "seconds", "speedup"}
    assert all(keys <= set(row) for row in found["rows"])
