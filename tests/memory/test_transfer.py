"""Batched copies do what slices do, whatever the sizes and alignments, and a broken compiled loop is never used."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvcache_factory import jit
from kvcache_factory.errors import ConfigError
from kvcache_factory.memory import transfer

SIZES = st.one_of(st.integers(0, 300), st.sampled_from([64, 128, 256, 2048, 6144, 16384, 20001, 300_000]))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.one_of(st.lists(SIZES, max_size=20), st.tuples(SIZES, st.integers(1, 20)).map(lambda x: [x[0]] * x[1])),
    gap=st.integers(0, 70),
    seed=st.integers(0, 2**32 - 1),
)
@example(sizes=[6144] * 8, gap=0, seed=0)
@example(sizes=[6144] * 8 + [300_000], gap=1, seed=0)
def test_pieces_arrive_where_they_belong_and_nowhere_else(path: str, sizes: list[int], gap: int, seed: int) -> None:
    """Any sizes, gaps and source offsets give the bytes that slice assignments give, guard bytes included."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 400_000, dtype=np.uint8)
    size = np.array(sizes, np.uint64)
    to = np.array([gap + sum(sizes[:i]) + gap * i for i in range(len(sizes))], np.uint64)
    at = rng.integers(0, 100_000, len(sizes)).astype(np.uint64)
    order = rng.permutation(len(sizes))
    got, want = (np.full(sum(sizes) + gap * (len(sizes) + 2) + 1, 7, np.uint8) for _ in range(2))
    for d, s, n in zip(to.tolist(), at.tolist(), sizes, strict=True):
        want[d : d + n] = source[s : s + n]
    columns = (to + np.uint64(got.ctypes.data), at + np.uint64(source.ctypes.data), size)
    transfer.copy_batch(*(c[order] for c in columns))
    assert np.array_equal(got, want)


def test_the_self_test_accepts_the_working_paths(path: str) -> None:
    """What the self-test lets through is what serves."""
    assert transfer.agrees_with_slices(transfer.copy_batch)
    assert transfer.chosen_path() == path


@pytest.mark.parametrize("fault", ["drops the last byte", "writes one byte too many", "does nothing"])
def test_the_self_test_rejects_a_loop_that_is_almost_right(fault: str) -> None:
    """A loop that loses, adds or ignores bytes is found out."""

    def broken(dst: Any, src: Any, size: Any) -> None:
        if fault == "drops the last byte":
            transfer._copy_numpy(dst, src, np.where(size > 600, size - np.uint64(1), size))
        elif fault == "writes one byte too many":
            transfer._copy_numpy(dst, src, size + np.uint64(1))

    assert not transfer.agrees_with_slices(broken)


def test_a_loop_that_fails_its_self_test_leaves_the_numpy_path_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says why it does not serve, and copies go on."""
    kernel = transfer._CopyKernel()
    monkeypatch.setattr(transfer.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(jit, "compile_loop", lambda signature, loop, yields: lambda dst, src, size: None)
    monkeypatch.setitem(sys.modules, "kvcache_factory.memory.stream", type("Fake", (), {"SIGNATURE": "", "copy": None}))
    kernel.compile()
    assert kernel.compiled is None
    assert "self-test" in kernel.reason


def test_machines_without_known_streaming_stores_keep_the_numpy_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """On aarch64 nothing is compiled, and the reason names the machine."""
    kernel = transfer._CopyKernel()
    monkeypatch.setattr(transfer.platform, "machine", lambda: "arm64")
    kernel.compile()
    assert kernel.compiled is None
    assert "arm64" in kernel.reason


def test_the_environment_refuses_numba() -> None:
    """With KVCACHE_FACTORY_NO_NUMBA=1 numba is not even imported, and asking for its path is an error that says so."""
    program = (
        "import sys\n"
        "from kvcache_factory.memory import transfer\n"
        "assert transfer.choose() == 'numpy'\n"
        "assert 'numba' not in sys.modules\n"
        "try:\n"
        "    transfer.force('numba').__enter__()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    env = {**os.environ, "KVCACHE_FACTORY_NO_NUMBA": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError")
    assert "KVCACHE_FACTORY_NO_NUMBA" in done.stdout


def test_importing_the_room_imports_neither_torch_nor_numba() -> None:
    """Opening the package costs numpy alone."""
    program = "import sys, kvcache_factory.memory; print(sorted({'torch', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_forcing_an_unknown_path_is_a_config_error() -> None:
    """The message lists the paths there are."""
    with pytest.raises(ConfigError, match="numba, numpy"), transfer.force("cuda"):
        pass


def test_measuring_reports_every_path_beside_memcpy(path: str) -> None:
    """Rates are positive numbers, one for each path that serves here, and one for the yardstick."""
    rates = transfer.measure(pieces=16, piece_bytes=1024, rounds=1)
    assert {"memcpy", "numpy", path} <= set(rates)
    assert all(rate > 0 for rate in rates.values())
