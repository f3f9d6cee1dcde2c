"""Plays scenes on real vLLM engines, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcache_factory.demo.model import ensure_model

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test` runs this in .venv-vllm"
)
Once = Callable[[str, Callable[[], Any]], Any]
"""The fixture ``once``: a name and what to do under it."""

PROGRAM = Path(__file__).with_name("engine_program.py")
TIMEOUT_S = 600
"""Far more than any scene takes; a busy machine may need ten times the usual."""


def environment(*, processes: bool = False, **more: str) -> dict[str, str]:
    """The variables that every engine of the tests gets; *processes*: engine and worker in children."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def command(
    scenes: Sequence[str], connector: Mapping[str, Any] | None, engine: Mapping[str, Any], **more: Any
) -> list[str]:
    """How to start the program for these scenes."""
    plan = {"engine": engine, "connector": connector, "scenes": list(scenes), **more}
    plan.setdefault("model", str(ensure_model("float32")))
    return [sys.executable, str(PROGRAM), json.dumps(plan)]


def play(
    *scenes: str,
    connector: Mapping[str, Any] | None = None,
    processes: bool = False,
    variables: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """What each of *scenes* returned; *engine*: arguments of the engine beside the usual ones."""
    done = subprocess.run(
        command(scenes, connector or {}, engine, **(more or {})),
        env=environment(processes=processes, **(variables or {})),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, f"no result, exit status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    results: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT "))
    return results


class Waiting:
    """An engine that has started and waits at the scene ``wait_for_a_line`` until :meth:`go_on`."""

    def __init__(self, *scenes: str, connector: Mapping[str, Any], **engine: Any) -> None:
        self._process = subprocess.Popen(
            command(("wait_for_a_line", *scenes), connector, engine, transfer={"kv_role": "kv_consumer"}),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        assert any(line.strip() == "READY" for line in self._process.stdout), "the engine did not start"

    def go_on(self) -> dict[str, Any]:
        """Let it play the rest, and return what the scenes returned."""
        printed, _ = self._process.communicate("go on\n", timeout=TIMEOUT_S)
        results: dict[str, Any] = json.loads(printed.split("RESULT ")[-1].splitlines()[0])
        return results

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()


def fails(connector: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None, **engine: Any) -> str:
    """What an engine that must not start said."""
    done = subprocess.run(
        command([], connector or {}, engine, **(more or {})),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode != 0, "the engine started"
    return done.stderr


def kill_after(line: str, *scenes: str, connector: Mapping[str, Any], **engine: Any) -> None:
    """Play *scenes* and kill the engine the moment it prints *line*, in the middle of whatever it does next."""
    process = subprocess.Popen(
        command(scenes, connector, engine),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        said = any(printed.strip() == line for printed in process.stdout)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert said, f"the engine ended before it said {line!r}"
