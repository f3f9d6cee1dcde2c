"""Stages of operations are measured when that is asked for, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_factory import CacheManager, DiskBackend, HierarchicalBackend
from kvcache_factory.memory.ranges import find_ranges
from kvcache_factory.testing import FakeEngine, Opener, SmallCache, sized_level, tiny_identity, tiny_spec

STAGES = {
    "match_find": 1,
    "match_lease": 1,
    "load_verify": 1,
    "load_copy": 1,
    "save_reserve": 1,
    "save_copy": 1,
    "save_seal": 1,
    "save_commit": 1,
}


def stages(cache: SmallCache) -> dict[str, int]:
    """How often each stage was measured."""
    return {
        row["operation"]: row["count"]
        for row in cache.manager.state()["durations"]
        if row["operation"].partition("_")[0] in ("match", "load", "save") and "_" in row["operation"]
    }


def test_each_stage_is_measured_once_for_each_operation(open_cache: Opener) -> None:
    """One save and one load of three blocks: every stage of both, with a time that is not negative."""
    cache = open_cache(8, enable_metrics=True, measure_stages=True)
    cache.save(range(12))
    assert cache.load(range(12)) == [0] * 3
    assert stages(cache) == STAGES
    rows = {(row["tier"], row["operation"]): row["sum_s"] for row in cache.manager.state()["durations"]}
    assert rows["cpu", "load_copy"] <= rows["cpu", "load"]
    assert all(seconds >= 0 for seconds in rows.values())


@pytest.mark.parametrize(
    "options", [{}, {"enable_metrics": True}, {"measure_stages": True}], ids=["nothing", "time", "stages_alone"]
)
def test_otherwise_nothing_is(open_cache: Opener, options: dict[str, bool]) -> None:
    """Stages belong to measuring time: without it they are not measured either."""
    cache = open_cache(8, **options)
    cache.save(range(12))
    cache.load(range(12))
    assert stages(cache) == {}


def test_a_stage_that_fails_is_measured_too(open_cache: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time was spent; the failure is counted as ever, and the block is not stored."""
    cache = open_cache(8, enable_metrics=True, measure_stages=True)

    def fail(*_: Any) -> None:
        raise RuntimeError("no copy today")

    with monkeypatch.context() as patch:
        patch.setattr("kvcache_factory.engine.mover.gather", fail)
        assert cache.save(range(12)) == 0
    assert stages(cache)["save_copy"] == 1
    assert cache.save(range(12)) == 3


def test_stages_are_ranges_of_a_profiler_where_there_is_one(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA (a stand-in here): pushed and popped in pairs, named after the stage."""

    class Ranges:
        log: list[str] = []  # noqa: RUF012

        def range_push(self, name: str) -> None:
            self.log.append(name)

        def range_pop(self) -> None:
            self.log.append("pop")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nvtx", Ranges())
    cache = open_cache(8, enable_metrics=True, measure_stages=True)
    cache.save(range(12))
    assert Ranges.log == [
        text for name in ("reserve", "copy", "seal", "commit") for text in (f"kvcache-factory save_{name}", "pop")
    ]


def test_without_cuda_there_are_no_ranges() -> None:
    """Nothing is loaded or pushed for them."""
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert find_ranges() is None


def test_reading_from_a_disk_is_a_stage_of_loading(tmp_path: Path) -> None:
    """The copy to the engine is told from the read before it."""
    spec = tiny_spec()
    backend = HierarchicalBackend([sized_level(2, spec), DiskBackend(str(tmp_path / "d"), size_gb=0.01, segment_mb=1)])
    with CacheManager(backend, enable_metrics=True, measure_stages=True) as manager:
        cache = SmallCache(manager, manager.register(spec, tiny_identity(spec)), FakeEngine(spec, 32))
        for start in range(0, 400, 100):
            cache.save(range(start, start + 8))
            manager.wait(60)
        assert cache.load(range(8)) == [0, 0]
        rows = {(row["tier"], row["operation"]): row["count"] for row in manager.state()["durations"]}
        assert rows["disk", "load_copy"] == 1
        assert rows["disk", "read"] >= 1
