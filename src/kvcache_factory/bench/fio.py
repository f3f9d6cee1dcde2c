"""fio as the yardstick of a disk: four psync jobs, each with its own part of one file."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from ..errors import StoreError

JOBS = 4
_LIMIT_S = 10  # of one run, inside fio
_PATIENCE_S = 60.0  # of one run, from outside


def find() -> str | None:
    """Where fio is, or None."""
    return shutil.which("fio")


class Fio:
    """Single blocks at random places of one file of *working_set* bytes, written once before."""

    name = f"fio psync x{JOBS}"

    def __init__(self, path: Path, block: int, working_set: int, round_bytes: int, direct: bool) -> None:
        part = max(working_set // JOBS // block, 2) * block
        self._part, self._moved = part, max(min(round_bytes // JOBS, part) // block, 1) * block
        name = str(path).replace(":", "\\:")  # a colon would begin another file
        self._common = [
            *("--name=disk", f"--filename={name}", "--ioengine=psync", f"--numjobs={JOBS}", "--thread"),
            *(f"--direct={int(direct)}", f"--bs={block}", f"--size={part}", f"--offset_increment={part}"),
            *("--randrepeat=0", "--allrandrepeat=0", "--group_reporting", f"--runtime={_LIMIT_S}"),
            "--output-format=json",
        ]
        self._run("--rw=write", "--fallocate=posix", f"--filesize={part * JOBS}")

    def rate(self, op: str) -> float:
        """Bytes per second of one round of ``put`` or ``get``, as fio gives it."""
        report = self._run(f"--rw={'randwrite' if op == 'put' else 'randread'}", f"--io_size={self._moved}")
        return float(report["write" if op == "put" else "read"]["bw_bytes"])

    def close(self) -> None:
        """Nothing is held between runs."""

    def _run(self, *options: str) -> dict[str, dict[str, float]]:
        command = ["fio", *self._common, *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
            # fio prints its warnings before the report.
            report: dict[str, dict[str, float]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
            told = getattr(error, "stderr", "") or error
            raise StoreError(f"fio failed, and with it the yardstick: {told}", "fio") from error
        return report
