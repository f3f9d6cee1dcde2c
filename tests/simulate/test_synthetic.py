"""Made-up workloads: the same everywhere, unlike each other, and usable wherever a trace is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvcache_factory.cli import main
from kvcache_factory.errors import ConfigError
from kvcache_factory.registry import make_policy
from kvcache_factory.simulate.optimum import optimum
from kvcache_factory.simulate.replay import Replay, Settings, Size
from kvcache_factory.simulate.synthetic import KINDS, make_workload
from kvcache_factory.simulate.workload import Workload, read_trace

from .conftest import Write


def digest(workload: Workload) -> tuple[int, int, float]:
    return workload.blocks, int(workload.nodes.astype(np.int64).sum()), float(workload.at_s.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_a_workload(kind: str) -> None:
    """Twice the same, in order of time; another seed is another."""
    with make_workload(kind, requests=600) as once, make_workload(f"synthetic:{kind}", requests=600) as again:
        assert digest(once) == digest(again)
        assert (np.diff(once.at_s) >= 0).all()
        assert len(once) == 600
        assert once.name == f"synthetic:{kind}"
        with make_workload(kind, seed=2, requests=600) as other:
            assert digest(other) != digest(once)


def test_the_kinds_differ_in_what_comes_back() -> None:
    """Agents repeat nearly all of their prompt, chats about half, and questions about documents only what is shared."""
    reuse = {}
    for kind in KINDS:
        with make_workload(kind, requests=3000) as made:
            reuse[kind] = 1 - made.unique / made.blocks
            assert optimum(made, made.unique) == pytest.approx(reuse[kind])
    assert reuse["agents"] > 0.9 > reuse["chat"] > 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("percent", [1, 5, 20])
def test_gre_is_not_much_worse_than_lru_on_traffic_it_was_not_made_for(kind: str, percent: float) -> None:
    """At most one point below leaf-first LRU, on shorter runs than those in the documentation."""
    with make_workload(kind, requests=3000) as made:
        size = [Size("cache", max(made.unique * percent // 100, 1))]
        gre, lru = (Replay(made, make_policy(name), size).run().usable_hit for name in ("gre", "lru"))
    assert gre >= lru - 0.01


def test_what_a_session_says_helps(write: Write) -> None:
    """With the hints of the workload, GRE finds no less on agents than without."""
    with make_workload("agents", requests=3000) as made:
        size = [Size("cache", made.unique // 100)]
        said, silent = (
            Replay(made, make_policy("gre"), size, Settings(hints=hints)).run().usable_hit  # type: ignore[arg-type]
            for hints in ("trace", "none")
        )
    assert said > silent - 0.005


def test_another_kind_is_an_error_with_the_nearest_name() -> None:
    """As everywhere."""
    with pytest.raises(ConfigError, match="did you mean agents"):
        make_workload("agent")


def test_commands_take_them_in_place_of_files() -> None:
    """``replay synthetic:chat``, with a seed; a kind that is none is one clean line."""
    run = CliRunner().invoke(main, ["replay", "synthetic:rag", "--capacity", "2%", "--seed", "3", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["rows"][0]["trace"] == "synthetic:rag"
    wrong = CliRunner().invoke(main, ["replay", "synthetic:chet"])
    assert wrong.exit_code == 2
    assert "did you mean chat" in wrong.stderr


SAMPLE = Path(__file__).parent / "data" / "qwen_bailian_sample.jsonl"


def test_a_sample_in_the_published_schema_of_qwen_bailian_is_replayed() -> None:
    """Twelve chats in the fields of the published traces, made for this test: told by their fields, replayed by all."""
    with read_trace(SAMPLE, strict=True) as read:
        assert (read.block_tokens, len(read)) == (16, 36)
        size = [Size("cache", read.unique // 3)]
        best = optimum(read, read.unique // 3)
        found = {name: Replay(read, make_policy(name), size).run().usable_hit for name in ("gre", "lru", "s3fifo")}
    assert all(0 < hit <= best for hit in found.values())
