"""Two engines, one directory: what Transformers computed is loaded by vLLM, and the other way round."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import ConfigError, MissingDependencyError
from .conversation import FirstToken
from .model import Progress, ensure_model, load_model, silent
from .text import question, reference_text
from .vllm_side import BLOCK_TOKENS, MARK

Row = dict[str, Any]
Answer = dict[str, Any]

_MEMORY_GB = 0.5
_DISK_GB = 2.0
_STEPS = 10  # lines of progress from both sides, about
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from kvcache_factory.demo.vllm_side import main; main()"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: the demo shows blocks, not processes
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
}


def run_cross_engine(
    *, dtype: str = "float32", max_new_tokens: int = 32, vllm_python: Path | None = None, progress: Progress = silent
) -> list[Row]:
    """Exchange blocks between Transformers here and vLLM in a process of *vllm_python*; a row for each direction.

    Rows: ``writer``, ``reader``, ``prompt_tokens``, ``reused_tokens``, ``ttft_without_s`` and ``ttft_with_s`` (seconds
    to the reader's first token, computed and loaded), ``identical`` (the reader answers with the loaded blocks as it
    does without), ``diverges_at``, and ``same_as_writer`` (both engines give the same tokens).

    Raises ConfigError when no Python with vLLM is found or it fails, MissingDependencyError without the packages.
    """
    python = find_vllm_python(vllm_python)
    model, tokenizer = load_model(dtype, progress)
    tell = _teller(progress)
    prompts = {"A": _prompt(tokenizer, "after"), "B": _prompt(tokenizer, "before")}
    with tempfile.TemporaryDirectory(prefix="kvcache-factory-demo-") as directory:
        mine = {name: _transformers(model, ids, max_new_tokens, None, tell) for name, ids in prompts.items()}
        _transformers(model, prompts["A"], max_new_tokens, directory, tell)
        requests = [
            {"name": "A, loaded", "token_ids": prompts["A"], "fresh": False},
            {"name": "B, computed", "token_ids": prompts["B"], "fresh": True},
            {"name": "A, computed", "token_ids": prompts["A"], "fresh": True},
        ]
        job = _job(dtype, directory, max_new_tokens, max(map(len, prompts.values())), requests)
        theirs = {answer["name"]: answer for answer in _run_vllm(python, job, tell)}
        loaded = _transformers(model, prompts["B"], max_new_tokens, directory, tell)
    progress(_STEPS, _STEPS)
    return [
        _row("transformers", "vllm", prompts["A"], theirs["A, computed"], theirs["A, loaded"], mine["A"]),
        _row("vllm", "transformers", prompts["B"], mine["B"], loaded, theirs["B, computed"]),
    ]


def find_vllm_python(given: Path | None = None) -> Path:
    """A Python that has vLLM: *given*, this one, or that of ``.venv-vllm`` here or beside this environment."""
    if given is not None:
        if not os.access(given, os.X_OK) or given.is_dir():
            raise ConfigError(f"--vllm-python {given} is no program; give the Python of an environment with vLLM")
        return given
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    for folder in (Path.cwd(), Path(sys.prefix).parent):
        python = folder / ".venv-vllm" / "bin" / "python"
        if os.access(python, os.X_OK):
            return python
    raise ConfigError("no Python with vLLM was found; say `make setup`, or give one with --vllm-python")


def _prompt(tokenizer: Any, place: str) -> list[int]:
    """The reference text with a question before or after it, as a chat: two prompts that share no block."""
    parts = [reference_text(), question(1)]
    content = "\n\n".join(parts if place == "after" else reversed(parts))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _transformers(
    model: Any, ids: Sequence[int], max_new_tokens: int, directory: str | None, tell: Callable[[str], None]
) -> Answer:
    """A greedy answer of Transformers; with a *directory*, through a new manager whose blocks rest there."""
    import torch

    from ..backend import CPUBackend, DiskBackend, HierarchicalBackend
    from ..integration.transformers import TransformersCacheAdapter
    from ..manager import CacheManager

    prompt = torch.tensor([ids])

    def answer() -> Answer:
        clock = FirstToken()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=clock,
        )
        return {"token_ids": output[0, len(ids) :].tolist(), "ttft_s": clock.seconds, "reused_tokens": 0}

    tell("Transformers: " + ("computing" if directory is None else "through the directory"))
    if directory is None:
        return answer()
    memory, disk = CPUBackend(size_gb=_MEMORY_GB), DiskBackend(directory, size_gb=_DISK_GB)
    with CacheManager(backend=HierarchicalBackend([memory, disk])) as manager:
        adapter = TransformersCacheAdapter.attach(model, manager, block_tokens=BLOCK_TOKENS)
        try:
            found = answer()
            found["reused_tokens"] = adapter.status()["reused_tokens"]
        finally:
            adapter.detach()
        manager.wait()
    return found


def _job(
    dtype: str, directory: str, max_new_tokens: int, longest: int, requests: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model": str(ensure_model(dtype)),
        "dtype": dtype,
        "max_new_tokens": max_new_tokens,
        "max_model_len": longest + max_new_tokens + BLOCK_TOKENS,
        "settings": {
            "disk_path": directory,
            "disk_gb": _DISK_GB,
            "memory_gb": _MEMORY_GB,
            "load_decision": "always",
            "max_wait_s": 30.0,
        },
        "requests": requests,
    }


def _run_vllm(python: Path, job: dict[str, Any], tell: Callable[[str], None]) -> list[Answer]:
    """Run *job* in a process of *python*; the answer of each request."""
    home = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(python), "-c", _PROGRAM, home],
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            assert process.stdin is not None, "pipes were asked for"
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.close()
            lines = list(_answers(process.stdout, tell))
        if lines and "missing" in lines[-1]:
            raise MissingDependencyError(f"{python} has no vLLM that can be imported: {lines[-1]['missing']}")
        if not lines or "done" not in lines[-1]:
            errors.seek(0)
            said = [line.strip() for line in errors.read()[-4000:].splitlines() if line.strip()]
            raise ConfigError(
                f"vLLM in {python} ended with status {process.returncode}: {said[-1] if said else 'it said nothing'}"
            )
    return lines[:-1]


def _answers(output: IO[str] | None, tell: Callable[[str], None]) -> Iterator[Answer]:
    for line in output or ():
        if line.startswith(MARK):
            content = json.loads(line.removeprefix(MARK))
            if "step" in content:
                tell(content["step"])
            else:
                yield content


def _teller(progress: Progress) -> Callable[[str], None]:
    done = 0

    def tell(text: str) -> None:
        nonlocal done
        progress(min(done, _STEPS - 1), _STEPS, text)
        done += 1

    return tell


def _row(writer: str, reader: str, prompt: Sequence[int], without: Answer, with_: Answer, written: Answer) -> Row:
    cold, warm = without["token_ids"], with_["token_ids"]
    parted = (i for i, (a, b) in enumerate(zip(cold, warm, strict=False)) if a != b)
    return {
        "writer": writer,
        "reader": reader,
        "prompt_tokens": len(prompt),
        "reused_tokens": with_["reused_tokens"],
        "ttft_without_s": without["ttft_s"],
        "ttft_with_s": with_["ttft_s"],
        "identical": cold == warm,
        "diverges_at": None if cold == warm else next(parted, min(len(cold), len(warm))),
        "same_as_writer": warm == written["token_ids"],
    }
