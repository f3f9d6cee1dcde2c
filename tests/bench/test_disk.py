"""The disk benchmark runs against either yardstick, and refuses to time blocks that were lost."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcache_factory.bench import disk, fio
from kvcache_factory.errors import StoreError

KEYS = {
    *("op", "block_bytes", "block_tokens", "batch", "threads"),
    *("io", "ratio", "reference", "gb_s", "reference_gb_s"),
}


def test_without_fio_a_quick_run_measures_against_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of the promised shape, progress to the end, and nothing left behind."""
    monkeypatch.setattr(fio, "find", lambda: None)
    seen: list[tuple[float, float]] = []
    rows = disk.run_disk(lambda done, total, text="": seen.append((done, total)), quick=True, path=tmp_path)
    assert [row["op"] for row in rows] == ["put", "get"]
    assert all(set(row) == KEYS and row["reference"] == "probe" for row in rows)
    assert all(row[key] > 0 for row in rows for key in ("ratio", "gb_s", "reference_gb_s", "batch"))
    assert seen[-1] == (1, 1)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def played_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program named fio that notes its arguments and reports a rate, after a warning as the real one gives them."""
    program = tmp_path / "bin" / "fio"
    program.parent.mkdir()
    report = {"jobs": [{"read": {"bw_bytes": 2e9}, "write": {"bw_bytes": 1e9}}]}
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"print('fio: a warning')\nprint({json.dumps(report)!r})\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path / "calls"


def test_fio_is_asked_for_four_psync_jobs_with_a_bound(played_fio: Path, tmp_path: Path) -> None:
    """The file is written once, then single blocks at random; a colon in the path does not become two files."""
    reference = fio.Fio(tmp_path / "a:b", 8192, 1 << 20, 1 << 19, True)
    assert (reference.rate("put"), reference.rate("get")) == (1e9, 2e9)
    prepare, put, get = played_fio.read_text().splitlines()
    for call in (prepare, put, get):
        for option in ("--ioengine=psync", "--numjobs=4", "--direct=1", "--bs=8192", "--runtime=10", r"a\:b"):
            assert option in call
    assert "--rw=write" in prepare
    assert "--rw=randwrite --io_size=131072" in put
    assert "--rw=randread --io_size=131072" in get


def test_a_fio_that_fails_is_an_error_and_not_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a yardstick there is no ratio."""
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho no such engine >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(StoreError, match="no such engine"):
        fio.Fio(tmp_path / "file", 8192, 1 << 20, 1 << 19, True)


def test_blocks_that_are_lost_or_other_end_the_measurement(tmp_path: Path) -> None:
    """A get that reads less, or something else, would look fast; it is an error instead."""
    bed = disk.StoreBed(tmp_path / "store", disk.MODELS[1], 8 << 20, 4 << 20)
    try:
        assert bed.get() > 0
        bed._written[:] = (bed._written + 1) % (disk.THREADS * 4)
        with pytest.raises(StoreError, match="other bytes"):
            bed.get()
        bed.store.free(np.arange(bed.chains * bed.batch, dtype=np.int32))
        with pytest.raises(StoreError, match="lost blocks"):
            bed.get()
    finally:
        bed.close()
