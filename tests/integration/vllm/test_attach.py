"""``VLLMCacheAdapter``: a manager of this process behind an engine that was made without one, and its sessions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import TIMEOUT_S, Once, environment, needs_vllm

from kvcache_factory.demo.model import ensure_model

pytestmark = needs_vllm

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": 64,
    "kv_cache_memory_bytes": 256 << 20,
}
EXAMPLE = Path(__file__).parents[3] / "examples" / "documented.py"


def run(program: Path, *arguments: str, processes: bool, **variables: str) -> str:
    """What a program printed; *processes*: vLLM's own default, the engine in a child process."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=environment(processes=processes, **variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(
    params=[
        pytest.param(False, id="one process"),
        pytest.param(True, id="child processes", marks=pytest.mark.soak),  # the documented example has children, too
    ]
)
def found(request: pytest.FixtureRequest, once: Once) -> dict[str, Any]:
    """The findings of the program, with the engine in the same process and with vLLM's default."""
    program = Path(__file__).with_name("attach_program.py")

    def act() -> Any:
        printed = run(program, str(ensure_model("float32")), json.dumps(ENGINE), processes=request.param)
        return json.loads(printed.split("RESULT ")[-1].splitlines()[0])

    result: dict[str, Any] = once(f"attach-{request.param}", act)
    return result


def test_a_text_prompt_goes_on_from_the_session(found: dict[str, Any]) -> None:
    """The second prompt has all of the first turn in front, token by token, and every full block of it is loaded."""
    said = found["one"]["all"]
    assert found["two"]["prompt"][: len(said)] == said
    assert found["two"]["cached"] == (len(said) - 1) // 64 * 64 > 0  # the last token was never computed


def test_history_can_be_left_out(found: dict[str, Any]) -> None:
    """``history="none"`` leaves the prompt alone, and ``"auto"`` one that contains the conversation."""
    assert len(found["none"]["prompt"]) < 8
    assert found["contained"]["prompt"] == found["whole"]


def test_other_requests_are_undisturbed(found: dict[str, Any]) -> None:
    """A request that was added before goes on, and its output comes from ``engine.step()``."""
    assert found["others"] == ["other"]


def test_after_clear_session_nothing_of_the_history_is_seen(found: dict[str, Any]) -> None:
    """Neither in the prompt nor in the cache: what only this session had is dropped, in whichever process it is."""
    assert found["dropped"] > 0
    assert len(found["cleared"]["prompt"]) < 8
    assert found["cleared"]["cached"] == found["again"]["cached"] == 0


def test_the_session_is_charged_in_the_process_that_keeps_the_blocks(found: dict[str, Any]) -> None:
    """Its row says how much it reused; the books are in order."""
    rows = [row for row in found["sessions"] if row["session"] == "visitor"]
    assert max(row["reused_tokens"] for row in rows) > 0
    assert found["check"] == []


def test_status_and_detach(found: dict[str, Any]) -> None:
    """The adapter has counted requests and hits, and takes its methods with it."""
    assert found["status"]["errors"] == 0
    assert found["status"]["hits"] >= 1
    assert found["detached"]


def test_the_documented_example_runs_as_vllm_comes() -> None:
    """With vLLM's default of child processes: three answers, and the third prompt has no past."""
    variables = {
        "EXAMPLE_DEVICE": "cpu",
        "EXAMPLE_MODEL": str(ensure_model("float32")),
        "EXAMPLE_MAX_TOKENS": "64",
        "EXAMPLE_ENGINE": json.dumps(ENGINE),
    }
    printed = run(EXAMPLE, processes=True, **variables)
    assert printed.count("AI:") == 3
    sizes = [int(line[1:].split()[0]) for line in printed.splitlines() if "tokens of prompt" in line]
    assert sizes[1] > sizes[0] + 50
    assert sizes[2] < 20
