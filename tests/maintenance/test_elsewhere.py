"""inspect, verify and purge for the store of a connector, by what the directory beside it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvcache_factory import CacheManager, CPUBackend, DiskBackend, HierarchicalBackend
from kvcache_factory.backend import RemoteBackend
from kvcache_factory.cli import main
from kvcache_factory.connector.mock import _shared, forget
from kvcache_factory.testing import FakeEngine, tiny_identity, tiny_spec

SHARE = "maintenance"


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with two conversations of six blocks, all of them in the store of MOCK as well."""
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_MOCK_SHARE", SHARE)
    spec, path = tiny_spec(), tmp_path / "cache"
    levels = [
        CPUBackend(size_gb=0.002, huge_pages=False),
        DiskBackend(str(path), size_gb=0.01, segment_mb=1),
        RemoteBackend(connector="MOCK", options={"share": SHARE}, ingestion="all"),
    ]
    with CacheManager(HierarchicalBackend(levels)) as manager:
        space = manager.register(spec, tiny_identity(spec))
        engine = FakeEngine(spec, 8)
        for start in (0, 100):
            chain = space.chain(range(start, start + 6 * spec.block_tokens))
            assert space.save(chain, engine.region, engine.compute(chain)) == 6
        manager.wait()
    yield path
    forget(SHARE)


def run(verb: str, path: Path, *more: str) -> Result:
    return CliRunner().invoke(main, [verb, str(path), "--connector", "mock", "--json", *more])


def remote(result: Result) -> dict[str, Any]:
    """The one row about the store."""
    (row,) = (row for row in json.loads(result.stdout)["rows"] if row["kind"] == "remote")
    return dict(row)


def test_what_is_there_is_seen(stored: Path) -> None:
    """Blocks of the directory that the store has, beside what inspect says anyway."""
    result = run("inspect", stored)
    assert result.exit_code == 0, result.output
    row = remote(result)
    assert (row["blocks"], row["there"]) == (12, 12)
    _shared[SHARE].pop(next(iter(_shared[SHARE])))
    assert remote(run("inspect", stored))["there"] == 11
    assert remote(run("inspect", stored, "--store-namespace", "other"))["there"] == 0


def test_copies_that_are_not_whole_are_found(stored: Path) -> None:
    """A flipped byte, another length, another block under the name, and one that is missing."""
    good = run("verify", stored)
    assert good.exit_code == 0, good.output
    assert (remote(good)["good"], remote(good)["bad"]) == (12, 0)
    values = _shared[SHARE]
    flipped, shorter, swapped, missing, other = sorted(values)[:5]
    spoilt = bytearray(values[flipped])
    spoilt[tiny_spec().header_bytes + 100] ^= 1
    values[flipped] = bytes(spoilt)
    values[shorter] = values[shorter][:-512]
    values[swapped] = values[other]
    del values[missing]
    result = run("verify", stored)
    row = remote(result)
    assert result.exit_code == 1
    assert (row["there"], row["good"], row["bad"]) == (11, 8, 3)
    assert row["reasons"] == "payload 1, record 1, size 1"


def test_copies_are_deleted_and_the_directory_stays(stored: Path) -> None:
    """After asking; what is deleted is what the conditions choose."""
    asked = CliRunner().invoke(main, ["purge", str(stored), "--all", "--connector", "mock"], input="n\n")
    assert asked.exit_code == 1
    assert len(_shared[SHARE]) == 12
    result = run("purge", stored, "--all", "--yes")
    assert result.exit_code == 0, result.output
    assert (remote(result)["there"], remote(result)["deleted"]) == (12, 12)
    assert not _shared[SHARE]
    assert remote(run("inspect", stored))["blocks"] == 12


def test_a_connector_that_is_none_is_a_typed_error(stored: Path) -> None:
    """One line with names that are close."""
    result = CliRunner().invoke(main, ["inspect", str(stored), "--connector", "mok"])
    assert result.exit_code == 2
    assert "MOCK" in result.stderr
