"""The connector that the page shows passes the kit, and serves a manager, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec

import kvcache_factory
from kvcache_factory import RemoteBackend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "connectors.md"


def example() -> str:
    """The snippet with the connector."""
    found = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (text,) = [snippet for snippet in found if "ConnectorTests" in snippet]
    return str(text)


def environment(directory: Path) -> dict[str, str]:
    """This package and the module in *directory*, wherever the process is started."""
    package = Path(kvcache_factory.__file__).parents[1]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{package}{os.pathsep}{directory}"}


def test_it_passes_the_kit(tmp_path: Path) -> None:
    """As the test module that the page says it is."""
    (tmp_path / "test_files.py").write_text(example(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_files.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d\d passed", done.stdout)


USE = """
from kvcache_factory import CacheManager, CPUBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.testing import FakeEngine, SmallCache, tiny_identity, tiny_spec

remote = RemoteBackend(
    connector="test_files:FilesConnector", options={"root": "kv"}, ingestion="all", per_token_timeout_ms=60_000,
    max_wait_s=60,
)
spec = tiny_spec()
for turn in range(2):
    with CacheManager(HierarchicalBackend(levels=[CPUBackend(size_gb=0.01), remote])) as manager:
        cache = SmallCache(manager, manager.register(spec, tiny_identity(spec)), FakeEngine(spec, 32))
        cache.space.ask_remotely([cache.space.chain(range(32))], wait_s=60)
        print(len(cache.load(range(32))), cache.save(range(32)))
        assert manager.wait(60)
"""


def test_it_serves_a_manager(tmp_path: Path) -> None:
    """By module:Class; a second manager finds what the first has stored."""
    (tmp_path / "test_files.py").write_text(example(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["0", "8", "8", "0"]


def test_every_field_is_on_the_page() -> None:
    """With its default."""
    rows = PAGE.read_text(encoding="utf-8").split("## RemoteBackend")[1].split("\n\n")[1]
    named = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in rows.splitlines()[2:])))
    fields = msgspec.structs.fields(RemoteBackend)
    assert named == {field.name for field in fields}
    for field in fields:
        if field.name not in ("connector", "options"):
            assert f"{field.default}".lower() in rows.lower(), field.name
