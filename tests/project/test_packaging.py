"""What is shipped, and what set-up relies on."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvcache_factory

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    from hatchling.builders.wheel import WheelBuilder

    directory = tmp_path_factory.mktemp("dist")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(directory), versions=["standard"])
    return zipfile.ZipFile(path)


def test_the_wheel_is_pure_python_and_typed(wheel: zipfile.ZipFile) -> None:
    """One wheel for every machine: sources, the data they read, the marker that types are shipped, nothing compiled."""
    assert Path(str(wheel.filename)).name == f"kvcache_factory-{kvcache_factory.__version__}-py3-none-any.whl"
    shipped = [name for name in wheel.namelist() if ".dist-info/" not in name]
    suffixes = {Path(name).suffix for name in shipped}
    assert {".py", ".typed"} <= suffixes <= {".py", ".typed", ".html", ".css", ".js", ".json", ".toml", ".yml"}
    page = {f"kvcache_factory/server/page.{kind}" for kind in ("html", "css", "js")}
    assert page | {f"kvcache_factory/observe/grafana/{name}" for name in ("dashboard.json", "alerts.yml")} <= set(
        shipped
    )
    assert {name.split("/")[0] for name in shipped} == {"kvcache_factory"}


def test_both_commands_and_the_licence_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """`kvf` is an alias of `kvcache-factory`."""
    scripts = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "kvcache-factory = kvcache_factory.cli:main" in scripts
    assert "kvf = kvcache_factory.cli:main" in scripts
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_one_version_is_told_everywhere() -> None:
    """The package, the distribution and the changelog name the same version."""
    assert PROJECT["project"]["version"] == kvcache_factory.__version__
    assert f"## {kvcache_factory.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-tf4.lock", "requirements-infinistore.lock"])
def test_a_lock_pins_versions_and_names_no_place(name: str) -> None:
    """A lock says which versions, never from where: the user's own index decides that."""
    lines = (ROOT / name).read_text(encoding="utf-8").split()
    assert lines
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)


def test_every_dependency_is_locked() -> None:
    """A dependency added to the project and forgotten in the lock would be missing on a fresh machine."""
    locked = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "requirements.lock").read_text().split()
    }
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.match(r"[A-Za-z0-9-]+", text)[0].lower() for text in wanted} - {"kvcache-factory"}  # type: ignore[index]
    assert names <= locked
