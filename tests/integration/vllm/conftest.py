"""One engine serves many tests: its results are kept for the whole run, whichever worker asks first."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from kvcache_factory.testing import open_cache  # noqa: F401  a fixture

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file are no package

from engines import Once


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once(name, act)``: the result of *act*, done by the first test that asks under this name."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, act: Callable[[], Any]) -> Any:
        file = folder / f"played-{name}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(act()))
        return json.loads(file.read_text())

    return get
