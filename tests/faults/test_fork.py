"""A manager belongs to the process that made it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_forked_child_neither_hangs_nor_touches_what_is_its_parents(tmp_path: Path) -> None:
    """Whatever its threads were doing: in the child everything is a miss, and closing does nothing."""
    program = Path(__file__).with_name("fork_program.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "disk")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "well", done.stderr
